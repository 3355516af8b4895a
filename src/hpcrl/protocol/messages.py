"""What travels between the roles as JSON: frozen, validated at both ends, unknown fields refused.

Every mutating request carries an ``Idempotency-Key`` header (see client.py); a repeated call gets the first answer.
Times are seconds since the epoch (``*_at``) or durations in seconds (``*_s``). Paths are relative to the run directory.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# fmt: off
__all__ = [
    "WORKER_LEFT", "Ack", "ArtifactItem", "ArtifactReport", "BadShard", "Batch", "BatchGroup", "BatchRequest", "CheckpointDone",
    "Empty", "EndedReply", "EndedRequest", "EvalRequest", "EvalResult", "EvalStatusRequest",
    "FailureItem", "FailureReport", "Finish", "FlipGrant",
    "FlipRequest", "Heartbeat", "HeartbeatReply", "Lease", "LeaseReply", "LeaseRequest", "Message", "OffPolicy", "Phase",
    "ProcessStart", "ReplicaReady", "ReplicaRefused", "ReplicaRegister", "Sampling", "ScoreItem", "ScoreReport", "ScoredAttempt",
    "ScoresReply", "ScoresRequest", "ScoringLease", "ScoringReply", "ScoringRequest", "SealedItem", "SealedReport",
    "TrainerStart", "TrainerStarted", "TrajectoryRef", "VersionPublished",
]
# fmt: on

FailureKind = Literal["infra", "policy", "data"]
Split = Literal["train", "eval"]


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Empty(Message):
    """No content."""


class Ack(Message):
    """Outcome per item of a batched report: attempt_ids taken, and attempt_id → reason for those refused."""

    accepted: list[str] = []
    rejected: dict[str, str] = {}


class ProcessStart(Message):
    """First call of a worker or scorer process: it holds nothing, so that what an earlier one of its name held is lost."""

    name: str = Field(examples=["cpu1-0"])


# ---------------------------------------------------------------- worker


class Sampling(Message):
    """How the policy is sampled, per request. Logprobs are recorded after temperature and top_p."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 512


class Lease(Message):
    """One attempt for a worker: who it is, where its model is, and until when it must have ended."""

    attempt_id: str = Field(examples=["g000012-r3-a0"])
    rollout_id: str = Field(examples=["g000012-r3"])
    group_id: str = Field(examples=["g000012"])
    task_id: str
    split: Split
    task_dir: str = Field(description="the task's directory, absolute")
    policy_version: str = Field(examples=["0.7"])
    replica_id: str
    base_url: str = Field(examples=["http://10.77.0.12:8000/v1"])
    api_key: str = Field(description="bearer key that joins calls to this attempt")
    sampling: Sampling
    deadline_at: float = Field(description="total wall-clock limit of the attempt, seconds since the epoch")


class LeaseRequest(Message):
    """Ask for up to ``n`` attempts; the call waits up to ``wait_s`` for the first one."""

    worker_id: str
    n: int
    wait_s: float = 10.0


class LeaseReply(Message):
    leases: list[Lease] = []
    stop: bool = Field(False, description="the run has ended: finish and exit")


class Phase(Message):
    """What an attempt is doing and since when."""

    name: str = Field(examples=["tool call"])
    since: float


class Heartbeat(Message):
    """One call per worker for all its attempts. ``running`` moves LEASED attempts to RUNNING; a beat extends every lease.

    ``phases`` is for people who ask what everybody waits for; it is not stored.
    """

    worker_id: str
    attempt_ids: list[str]
    running: list[str] = []
    phases: dict[str, Phase] = {}


class HeartbeatReply(Message):
    cancelled: dict[str, str] = Field({}, description="attempt_id → reason, for attempts that must be dropped")
    stop: bool = False


class ArtifactItem(Message):
    """The attempt has ended and its changed files are stored. ``policy_failure``: what the agent broke, if anything."""

    attempt_id: str
    artifact: str = Field(description="path of the stored artifact", examples=["artifacts/sha256-9f…"])
    digest: str
    environment_version: str
    policy_failure: str | None = None


class ArtifactReport(Message):
    worker_id: str
    items: list[ArtifactItem]


WORKER_LEFT = "worker_left"
"""Reason of attempts that a worker gives back because it has to go: no retry is spent."""


class FailureItem(Message):
    attempt_id: str
    kind: FailureKind
    reason: str = Field(examples=["sandbox_start"])
    message: str = ""


class FailureReport(Message):
    """From a worker or a scorer: the attempt yields no score."""

    reporter_id: str
    items: list[FailureItem]


class ScoresRequest(Message):
    """Wait up to ``wait_s`` until at least one of this worker's attempts has a score that was not sealed yet."""

    worker_id: str
    attempt_ids: list[str]
    wait_s: float = 10.0


class ScoredAttempt(Message):
    attempt_id: str
    reward: float
    rewards: dict[str, float]
    verifier_version: str
    scoring_s: float
    policy_failure: str | None = None


class ScoresReply(Message):
    scores: list[ScoredAttempt] = []
    cancelled: dict[str, str] = {}


class SealedItem(Message):
    """The attempt's trajectory stands in a sealed shard and passed its completeness checks."""

    attempt_id: str
    shard: str = Field(examples=["shards/cpu1-0003.h5"])
    row: int
    tokens: int
    trained_tokens: int
    oldest_version: str
    newest_version: str
    first_token_at: float


class SealedReport(Message):
    worker_id: str
    items: list[SealedItem]


# ---------------------------------------------------------------- scorer


class ScoringRequest(Message):
    scorer_id: str
    n: int
    wait_s: float = 10.0


class ScoringLease(Message):
    attempt_id: str
    task_id: str
    task_dir: str
    artifact: str
    digest: str
    policy_failure: str | None
    deadline_at: float


class ScoringReply(Message):
    leases: list[ScoringLease] = []
    stop: bool = False


class ScoreItem(Message):
    attempt_id: str
    reward: float
    rewards: dict[str, float]
    verifier_version: str
    scoring_s: float
    policy_failure: str | None = None


class ScoreReport(Message):
    scorer_id: str
    items: list[ScoreItem]


# ---------------------------------------------------------------- inference


class ReplicaRegister(Message):
    replica_id: str
    base_url: str
    node: str


class EndedRequest(Message):
    """Wait up to ``wait_s`` until at least one of these attempts, which generate on the replica, is not wanted any more."""

    replica_id: str
    attempt_ids: list[str]
    wait_s: float = 10.0


class EndedReply(Message):
    ended: dict[str, str] = Field({}, description="attempt_id → reason, for attempts whose generations must be dropped")


class ReplicaLoad(Message):
    """How full the replica's KV cache is, 0 to 1: a mean of the last samples."""

    replica_id: str
    kv_use: float


class FlipRequest(Message):
    """The replica holds a verified standby copy of ``version`` and asks to switch; waits up to ``wait_s`` to be drained."""

    replica_id: str
    version: str
    wait_s: float = 10.0


class FlipGrant(Message):
    """Whether the replica may switch now; ``keep`` are the versions that it has to go on serving beside the new one."""

    granted: bool
    keep: list[str] = []


class ReplicaReady(Message):
    """The flip is verified: the replica now serves ``version``. Durations in seconds."""

    replica_id: str
    version: str
    digest: str
    transfer_s: float
    verify_s: float
    pause_s: float


class ReplicaRefused(Message):
    replica_id: str
    version: str
    reason: str


# ---------------------------------------------------------------- trainer


class TrainerStart(Message):
    """First call of a trainer: where it stands. ``checkpoint_step`` is None for a fresh run."""

    checkpoint_step: int | None = None


class TrainerStarted(Message):
    lineage: int
    step: int


class VersionPublished(Message):
    """The trainer begins to publish ``version`` (its weights after that step)."""

    version: str
    digest: str
    nbytes: int


class BatchRequest(Message):
    """Ask for the batch that turns ``version`` into the next step; waits up to ``wait_s``. Repeatable: same answer."""

    version: str
    wait_s: float = 10.0


class TrajectoryRef(Message):
    attempt_id: str
    rollout_id: str
    shard: str
    row: int
    reward: float
    oldest_version: str
    tokens: int
    trained_tokens: int


class BatchGroup(Message):
    """``baseline``: rewards of the same group's trajectories that an earlier batch trained; they belong to the group's mean and
    deviation, so that latecomers are judged as their group was, but are not trained again."""

    group_id: str
    task_id: str
    trajectories: list[TrajectoryRef]
    baseline: list[float] = []


class Batch(Message):
    """``groups`` is None while the batch is not complete (ask again)."""

    version: str
    groups: list[BatchGroup] | None
    in_flight: int = 0
    waiting_groups: int = 0


class BadShard(Message):
    """A shard of the batch for ``version`` cannot be read: its samples are drawn again, and the batch is taken back if it was given."""

    version: str
    shard: str
    reason: str


class OffPolicy(Message):
    """Trajectories of the batch for ``version`` deviate too far from its weights (``staleness.max_ratio_dev``): the batch is taken
    back, they are drawn again. ``deviations``: attempt_id → mean of |π_now/π_behaviour − 1| over its trained tokens."""

    version: str
    deviations: dict[str, float]


class CheckpointDone(Message):
    version: str


class EvalRequest(Message):
    """Sample every held-out task ``samples`` times with exactly ``version``."""

    version: str
    samples: int


class EvalStatusRequest(Message):
    version: str
    wait_s: float = 10.0


class EvalResult(Message):
    version: str
    done: int
    total: int
    success: float | None = Field(None, description="mean reward over scored attempts; None until all have ended")
    failed: int = Field(0, description="attempts without a score (never counted as 0)")


class Finish(Message):
    """The run is over: everyone stops. ``reason`` is empty for success."""

    reason: str = ""
