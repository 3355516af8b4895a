from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import InferenceSection, ModelSection, TasksSection, WeightsSection
from hpcrl.errors import DataError, InfraError
from hpcrl.inference.supervisor import TokenSpan, VllmServer, _read_generated
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.manifest import Chunk, Layout, Manifest

ANSWER: dict[str, Any] = {
    "choices": [
        {
            "token_ids": [5, 6],
            "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.25}]},
            "weight_versions": [{"version": "0.1", "start": 0, "end": 1}, {"version": "0.2", "start": 1, "end": 2}],
            "finish_reason": "stop",
        }
    ]
}


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    answer = copy.deepcopy(ANSWER)
    place: Any = answer["choices"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return answer


def test_an_answer_is_read() -> None:
    generated = _read_generated(ANSWER)
    assert (generated.token_ids, generated.logprobs, generated.finish_reason) == ([5, 6], [-0.5, -0.25], "stop")
    assert generated.spans == [TokenSpan(0, 1, "0.1"), TokenSpan(1, 2, "0.2")]


def test_an_aborted_answer_without_tokens_is_read() -> None:
    answer = {"choices": [{"token_ids": [], "logprobs": None, "weight_versions": None, "finish_reason": "abort"}]}
    assert _read_generated(answer).finish_reason == "abort"


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        changed(["logprobs"], None),
        changed(["logprobs", "content"], ANSWER["choices"][0]["logprobs"]["content"][:1]),
        changed(["logprobs", "content", 0, "token_id"], 9),
        changed(["logprobs", "content", 0, "logprob"], float("nan")),
        changed(["logprobs", "content", 0, "logprob"], -9999.0),
        changed(["logprobs", "content", 0, "logprob"], None),
        changed(["weight_versions"], None),
        changed(["weight_versions", 1, "start"], 0),
        changed(["weight_versions", 1, "end"], 3),
    ],
)
def test_an_incomplete_answer_is_a_data_error(answer: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="engine_answer"):
        _read_generated(answer)


def test_with_adapters_the_answer_names_the_one_that_was_used() -> None:
    answer = changed(["weight_versions"], [{"version": "default", "start": 0, "end": 2}]) | {"model": "0.7"}
    assert _read_generated(answer, "0.7").spans == [TokenSpan(0, 2, "0.7")]
    with pytest.raises(DataError, match=r"asked for adapter 0\.6, answered by .*'0\.7'"):
        _read_generated(answer, "0.6")
    with pytest.raises(DataError, match=r"asked for adapter 0\.7"):  # the base model has changed meanwhile
        _read_generated(ANSWER | {"model": "0.7"}, "0.7")


class Routes:
    """vLLM's routes: all answer, but for the question which version is held; notes how long each answer would be waited for."""

    def __init__(self) -> None:
        self.waits: dict[str, float] = {}

    async def post(self, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        self.waits[path.partition("?")[0]] = timeout_s
        return {}

    async def get(self, path: str, timeout_s: float) -> dict[str, Any]:
        raise TimeoutError


def test_a_flip_awaits_the_longest_generation_and_an_engine_that_is_silent_after_it_is_broken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(
        model=ModelSection(path=str(tmp_path)),
        tasks=TasksSection(train="t"),
        inference=InferenceSection(request_timeout_s=5000.0),
        weights=WeightsSection(pin="turn"),
    )
    layout = Layout.of([("w", "float32", (2,))])
    chunks = [Chunk(0, layout.nbytes, "0" * 32)]
    manifest = Manifest.build(PolicyVersion(0, 1), None, layout, chunks, tokenizer_digest="t", model_config_digest="c")
    (tmp_path / "0.1.json").write_text(manifest.to_json())
    server, routes = VllmServer(config, tmp_path, "0.0", tmp_path / "log", gpu=False), Routes()
    server._http = routes  # type: ignore[assignment]
    with pytest.raises(InfraError, match=r"flip_failed: version 0\.1: .*no answer"):
        asyncio.run(server.flip(tmp_path / "0.1.json", tmp_path / "staging"))
    assert routes.waits["/pause"] > 5000.0
