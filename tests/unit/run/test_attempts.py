from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from hpcrl.errors import DataError, InfraError
from hpcrl.harness import Outcome
from hpcrl.metrics import metric
from hpcrl.protocol.messages import ArtifactItem, Lease, Sampling, SealedItem
from hpcrl.protocol.record import AttemptRecord, Ending, RequestRecord
from hpcrl.run.attempts import Ended, _judge_program, attempt_values, fetch_record

RECORD = AttemptRecord(
    attempt_id="g1-r0-a0",
    token_ids=[1],
    logprobs=[0.0],
    loss_mask=[0],
    segments=[0],
    version_spans=[],
    requests=[],
    messages=[],
)


def lease(base_url: str) -> Lease:
    return Lease(
        attempt_id="g1-r0-a0",
        rollout_id="g1-r0",
        group_id="g1",
        task_id="t",
        split="train",
        task_dir="/t",
        policy_version="0.0",
        replica_id="r0",
        base_url=base_url,
        api_key="sk-x",
        sampling=Sampling(),
        deadline_at=0.0,
    )


def fetch(status: int, text: str) -> tuple[AttemptRecord, dict[str, object]]:
    """The record as fetched from a server that answers so, and what that server was asked."""
    asked: dict[str, object] = {}

    async def handler(request: web.Request) -> web.Response:
        asked.update(path=request.path, key=request.headers["Authorization"], body=await request.json())
        return web.Response(status=status, text=text)

    async def main() -> AttemptRecord:
        app = web.Application()
        app.router.add_post("/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            async with aiohttp.ClientSession() as session:
                return await fetch_record(session, lease(f"http://{host}:{port}/v1"), "worker-key")
        finally:
            await runner.cleanup()

    return asyncio.run(main()), asked


def test_the_record_comes_from_the_side_channel_with_the_workers_key() -> None:
    record, asked = fetch(200, RECORD.model_dump_json())
    assert record == RECORD
    assert asked == {"path": "/side/record", "key": "Bearer worker-key", "body": {"attempt_id": "g1-r0-a0"}}


@pytest.mark.parametrize(
    ("status", "text", "kind", "reason"),
    [
        (404, "{}", DataError, "no_record"),
        (503, "", InfraError, "record_fetch"),
        (200, "{", DataError, "record_invalid"),
        (200, json.dumps({"attempt_id": "x"}), DataError, "record_invalid"),
    ],
)
def test_a_missing_record_is_typed(status: int, text: str, kind: type[DataError], reason: str) -> None:
    with pytest.raises(kind) as caught:
        fetch(status, text)
    assert caught.value.reason == reason


def test_a_dead_proxy_is_an_infrastructure_failure() -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            await fetch_record(session, lease("http://127.0.0.1:9/v1"), "k")

    with pytest.raises(InfraError, match="record_fetch"):
        asyncio.run(main())


def test_every_value_of_an_attempt_is_a_known_metric() -> None:
    stages = ("attempt", "sandbox_start", "model", "commands", "artifact", "record", "score_wait")
    artifact = ArtifactItem(attempt_id="a", artifact="artifacts/x", digest="x", environment_version="e")
    outcome = Outcome(ended="context_exceeded", policy_failure="context_exceeded")
    ended = Ended(lease("http://h/v1"), outcome, RECORD, artifact, dict.fromkeys(stages, 1.0))
    sealed = SealedItem(
        attempt_id="a",
        shard="s",
        row=0,
        tokens=9,
        trained_tokens=4,
        oldest_version="0.0",
        newest_version="0.0",
        first_token_at=0.0,
    )
    values = attempt_values(ended, sealed, 0.5)
    for name in values:
        assert metric(name).name == name
    assert values["policy_failures"] == {"context_exceeded": 1} and values["tokens_sampled"] == 4


def request(ending: Ending) -> RequestRecord:
    return RequestRecord(
        request_id="q",
        segment=0,
        prompt_tokens=1,
        start=0,
        end=0,
        ending=ending,
        sampling=Sampling(),
        started_at=0.0,
        queue_s=0.5,
        generate_s=1.0,
    )


def test_a_program_whose_context_is_full_is_the_policys_failure_whatever_its_exit_code() -> None:
    outcome = Outcome(ended="program", problem="1: context_length_exceeded")
    _judge_program(outcome, RECORD.model_copy(update={"requests": [request("stop"), request("truncated")]}))
    assert (outcome.ended, outcome.policy_failure, outcome.problem) == ("truncated", "truncated", None)
    assert (outcome.turns, outcome.model_s) == (2, 3.0)


def test_a_program_that_fails_otherwise_stays_a_problem() -> None:
    outcome = Outcome(ended="program", problem="1: no key")
    _judge_program(outcome, RECORD.model_copy(update={"requests": [request("truncated"), request("stop")]}))
    assert (outcome.ended, outcome.policy_failure, outcome.problem) == ("program", None, "1: no key")
    built_in = Outcome(ended="max_turns", turns=1)
    _judge_program(built_in, RECORD.model_copy(update={"requests": [request("truncated")]}))
    assert (built_in.ended, built_in.turns) == ("max_turns", 1)
