"""AttemptRecord + identities + score → Trajectory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpcrl.errors import DataError
from hpcrl.protocol.messages import Lease, ScoredAttempt
from hpcrl.protocol.record import AttemptRecord
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trajectory.schema import SPAN_COLUMNS, Trajectory

__all__ = ["from_record"]


def from_record(
    lease: Lease,
    record: AttemptRecord,
    score: ScoredAttempt,
    *,
    run_id: str,
    environment_version: str,
    policy_failure: str | None = None,
    timings: Mapping[str, float] | None = None,
) -> Trajectory:
    """Join what the proxy recorded, what the lease says and what the scorer found. Raises DataError when they do not fit.

    ``timings`` is name → seconds of the attempt's stages; the scorer's time is added as ``scoring``.
    """
    for part, attempt_id in (("record", record.attempt_id), ("score", score.attempt_id)):
        if attempt_id != lease.attempt_id:
            raise DataError(
                "wrong_attempt", f"the {part} of attempt {attempt_id} was joined to attempt {lease.attempt_id}"
            )
    if not record.requests:
        raise DataError("no_tokens", f"attempt {lease.attempt_id}: no model call was recorded")
    spans = [(span.start, span.end, *PolicyVersion.parse(span.version)) for span in record.version_spans]
    return Trajectory(
        run_id=run_id,
        task_id=lease.task_id,
        group_id=lease.group_id,
        rollout_id=lease.rollout_id,
        attempt_id=lease.attempt_id,
        split=lease.split,
        policy_version=lease.policy_version,
        environment_version=environment_version,
        verifier_version=score.verifier_version,
        token_ids=np.asarray(record.token_ids, dtype=np.int32),
        logprobs=np.asarray(record.logprobs, dtype=np.float32),
        loss_mask=np.asarray(record.loss_mask, dtype=np.uint8),
        segments=np.asarray(record.segments, dtype=np.int32),
        spans=np.asarray(spans, dtype=np.int32).reshape(-1, len(SPAN_COLUMNS)),
        reward=score.reward,
        rewards=dict(score.rewards),
        first_token_at=min(request.started_at for request in record.requests),
        ending=record.requests[-1].ending,
        policy_failure=policy_failure,
        timings={**(timings or {}), "scoring": score.scoring_s},
        requests=tuple(request.model_dump(mode="json") for request in record.requests),
        messages=tuple(record.messages),
    ).validate()
