"""An engine that answers at once, for what is measured or tried without vLLM: what is left is the proxy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcrl.inference.supervisor import Generated, TokenSpan
from hpcrl.protocol.keys import AttemptKey
from hpcrl.protocol.messages import Sampling

__all__ = ["StubEngine"]

_LOGPROB = -0.1


class StubEngine:
    """Gives ``replies`` (token ids) one after the other, each with the end token, whatever it is asked; every version is served."""

    def __init__(self, replies: Iterator[list[int]], version: str) -> None:
        self.replies = replies
        self.served_version = version

    async def until_serving(self) -> None:
        """It always serves."""

    def version_for(self, key: AttemptKey) -> str | None:
        """The one version, for every key."""
        return self.served_version

    async def generate(
        self, version: str, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        """The next reply."""
        ids = [*next(self.replies), stop_token_ids[0]]
        return Generated(ids, [_LOGPROB] * len(ids), "stop", [TokenSpan(0, len(ids), version)])
