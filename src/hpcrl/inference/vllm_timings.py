"""The plugin inside vLLM that adds to the answer of ``/inference/v1/generate`` where its time went: entry point ``hpcrl_timings`` of
``vllm.general_plugins``.

vLLM measures queue, prefill and decode of every request and tells them in its chat answers (``--enable-per-request-metrics``), but not
in this route's (0.32). The plugin fills the field ``metrics`` of the answer, which is there, by vLLM's own function.

    API server     register() ─▶ ServingTokens.serve_tokens_full_generator is wrapped: it also looks at the last output
    other processes of vLLM, which load plugins too: nothing
"""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

__all__ = ["register", "timed"]

_SERVER = "vllm.entrypoints.openai.api_server"
_METHOD = "serve_tokens_full_generator"


def register() -> None:
    """Wrap the route's method in the API server; calling it again does nothing."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name != _SERVER:
        return
    from vllm.entrypoints.generate.base.serving import build_per_request_timing_metrics
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    method = getattr(ServingTokens, _METHOD)
    if not hasattr(method, "__wrapped__"):
        setattr(ServingTokens, _METHOD, timed(method, build_per_request_timing_metrics))


def timed(method: Callable[..., Awaitable[Any]], build: Callable[[Any, int], Any]) -> Callable[..., Awaitable[Any]]:
    """``method`` with ``build(stats, sampled tokens)`` of its last output as the answer's ``metrics``, where it has none."""

    @functools.wraps(method)
    async def wrapped(serving: Any, request: Any, outputs: AsyncGenerator[Any, None], *more: Any) -> Any:
        last: Any = None

        async def watched() -> AsyncGenerator[Any, None]:
            nonlocal last
            async for output in outputs:
                last = output
                yield output

        answer = await method(serving, request, watched(), *more)
        if last is not None and last.outputs and getattr(answer, "metrics", answer) is None:
            answer.metrics = build(last.metrics, len(last.outputs[0].token_ids))
        return answer

    return wrapped
