"""The wrapper around vLLM's route; that it fits the real one is shown in tests/integration/test_inference.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from hpcrl.inference.supervisor import _read_times
from hpcrl.inference.vllm_timings import register, timed
from hpcrl.protocol.record import EngineTimes


def ask(answer: Any, outputs: int = 2) -> Any:
    async def produced() -> AsyncGenerator[Any, None]:
        for number in range(outputs):
            yield SimpleNamespace(metrics=f"stats {number}", outputs=[SimpleNamespace(token_ids=[7] * (number + 1))])

    async def method(serving: str, request: str, found: AsyncGenerator[Any, None], request_id: str) -> Any:
        assert (serving, request, request_id) == ("serving", "request", "id")
        assert len([one async for one in found]) == outputs
        return answer

    def build(stats: str, sampled: int) -> tuple[str, int]:
        return stats, sampled

    return asyncio.run(timed(method, build)("serving", "request", produced(), "id"))


def test_the_last_output_gives_the_times_where_the_answer_has_none() -> None:
    assert ask(SimpleNamespace(metrics=None)).metrics == ("stats 1", 2)
    assert ask(SimpleNamespace(metrics="speculative")).metrics == "speculative"
    assert ask(SimpleNamespace(metrics=None), outputs=0).metrics is None
    assert ask("an error without metrics") == "an error without metrics"


def test_nothing_of_vllm_is_imported_elsewhere_than_in_its_server() -> None:
    register()  # here vLLM's server is not the main program


def test_times_are_all_there_or_none() -> None:
    whole = {"queue_time_ms": 1.0, "time_to_first_token_ms": 20.0, "generation_time_ms": 0.0, "mean_itl_ms": None}
    assert _read_times(whole) == EngineTimes(queue_s=0.001, prefill_s=0.02, decode_s=0.0)
    assert _read_times(whole | {"queue_time_ms": None}) is None
    assert _read_times(None) is None
