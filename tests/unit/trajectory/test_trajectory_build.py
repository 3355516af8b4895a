"""from_record joins lease, record and score, and refuses what does not belong together."""

from __future__ import annotations

import pytest

from hpcrl.errors import DataError
from hpcrl.protocol.messages import Lease, Sampling, ScoredAttempt
from hpcrl.protocol.record import AttemptRecord, RequestRecord, VersionSpan
from hpcrl.trajectory import from_record

LEASE = Lease(
    attempt_id="g000001-r0-a0",
    rollout_id="g000001-r0",
    group_id="g000001",
    task_id="t",
    split="train",
    task_dir="/t",
    policy_version="0.1",
    replica_id="inf0",
    base_url="http://h/v1",
    api_key="k",
    sampling=Sampling(),
    deadline_at=10.0,
)
SCORE = ScoredAttempt(
    attempt_id=LEASE.attempt_id, reward=1.0, rewards={"reward": 1.0}, verifier_version="v", scoring_s=0.2
)


def request(start: int, end: int, started_at: float, ending: str) -> RequestRecord:
    return RequestRecord.model_validate(
        {
            "request_id": f"q{start}",
            "segment": 0,
            "prompt_tokens": start,
            "start": start,
            "end": end,
            "ending": ending,
            "sampling": Sampling(),
            "started_at": started_at,
            "queue_s": 0.0,
            "generate_s": 0.1,
        }
    )


def record(**changes: object) -> AttemptRecord:
    fields: dict[str, object] = {
        "attempt_id": LEASE.attempt_id,
        "token_ids": [5, 6, 7, 8, 9, 10],
        "logprobs": [0.0, 0.0, -0.5, -0.1, 0.0, -0.2],
        "loss_mask": [0, 0, 1, 1, 0, 1],
        "segments": [0],
        "version_spans": [VersionSpan(start=2, end=4, version="0.1"), VersionSpan(start=5, end=6, version="0.2")],
        "requests": [request(2, 4, 100.0, "stop"), request(5, 6, 101.0, "length")],
        "messages": [{"role": "user", "content": "x"}],
    }
    return AttemptRecord.model_validate(fields | changes)


def test_everything_arrives() -> None:
    got = from_record(LEASE, record(), SCORE, run_id="r", environment_version="e", timings={"model": 0.2})
    assert got.tokens == 6
    assert got.trained_tokens == 3
    assert (str(got.oldest_version), str(got.newest_version)) == ("0.1", "0.2")
    assert got.first_token_at == 100.0
    assert got.ending == "length"
    assert got.timings == {"model": 0.2, "scoring": 0.2}
    assert got.spans.tolist() == [[2, 4, 0, 1], [5, 6, 0, 2]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt_id": "other"}, "wrong_attempt"),
        ({"requests": []}, "no_tokens"),
        ({"logprobs": [0.0] * 5}, "length_mismatch"),
        ({"version_spans": []}, "no_version"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(DataError) as caught:
        from_record(LEASE, record(**changes), SCORE, run_id="r", environment_version="e")
    assert caught.value.reason == reason
