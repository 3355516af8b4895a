"""The live objects of the queue: groups of rollouts, their attempts, replicas, versions, evaluations.

    Group ──< Rollout ──< Attempt        at most one attempt of a rollout is live; ended ones leave memory
    Replica                              serves one version at a time

They carry no behaviour beyond small derived values; ``ledger.py`` moves them. All times are seconds since the epoch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from hpcrl.protocol.messages import Split
from hpcrl.protocol.states import State
from hpcrl.protocol.version import PolicyVersion

__all__ = [
    "BOUND",
    "LIVE",
    "Attempt",
    "EvalRun",
    "Group",
    "GroupState",
    "Position",
    "Replica",
    "ReplicaState",
    "Rollout",
    "Task",
    "Version",
]

BOUND = frozenset({State.LEASED, State.RUNNING})
"""States in which an attempt still talks to its replica."""
LIVE = BOUND | {State.ARTIFACT_READY, State.SCORED}
"""States in which a worker still owes something for the attempt (its lease must be kept alive)."""

GroupState = Literal["open", "complete", "consumed", "closed", "done"]
"""``complete`` waits for a batch; ``closed`` was given up; ``done`` is an evaluation group whose rollouts have all ended."""


class Task(NamedTuple):
    """One task directory. Example: ``Task("fix-0001", "/shared/tasks/train/fix-0001")``."""

    task_id: str
    task_dir: str


class Position(NamedTuple):
    """Where training stands: the next batch will be trained at ``step`` of ``lineage``; lineage −1: no trainer has started."""

    lineage: int = -1
    step: int = 0

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.lineage, self.step)


@dataclass(kw_only=True, slots=True)
class Attempt:
    """One try at a rollout. Example id: ``g000012-r3-a0``. ``changed_at``: its last transition; ``phase``: what its worker last said
    it was doing (``model call``), since when."""

    attempt_id: str
    rollout: Rollout
    worker_id: str
    replica_id: str
    version: PolicyVersion
    state: State
    leased_at: float
    lease_until: float
    deadline_at: float
    changed_at: float
    cause: str = ""
    phase: str = ""
    phase_since: float = 0.0
    # from the worker, with the artifact
    artifact: str = ""
    digest: str = ""
    environment_version: str = ""
    policy_failure: str | None = None
    # scoring
    scorer_id: str | None = None
    scoring_until: float = 0.0
    scoring_tries: int = 0
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    verifier_version: str = ""
    scoring_s: float = 0.0
    # from the worker, with the sealed shard
    shard: str = ""
    row: int = -1
    tokens: int = 0
    trained_tokens: int = 0
    oldest_version: PolicyVersion | None = None
    newest_version: PolicyVersion | None = None
    first_token_at: float = 0.0
    consumed_step: int | None = None

    @property
    def oldest(self) -> PolicyVersion:
        """The oldest version among its tokens: as recorded, or the bound one before that is known."""
        return self.version if self.oldest_version is None else self.oldest_version


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One sample wanted. ``attempt`` is the live or accepted one; PENDING without one. Example id: ``g000012-r3``."""

    rollout_id: str
    group: Group
    index: int
    tries: int = 0
    infra_failures: int = 0
    data_failures: int = 0
    state: State = State.PENDING
    attempt: Attempt | None = None

    @property
    def ended(self) -> bool:
        return self.state not in _UNENDED


_UNENDED = LIVE | {State.PENDING}


@dataclass(kw_only=True, slots=True)
class Group:
    """One draw of a task. ``min_step``: the oldest version step that can still be consumed in time when the group's turn comes.
    ``redraws``: how often samples of it that became too old were drawn again.

    ``head``: this group is the *tail* of that one: its stragglers, which are trained in a later batch. ``baseline``: rewards of the
    head's trajectories once they were consumed. ``ripe_at``: when so many rollouts were accepted that stragglers may be split off.
    """

    group_id: str
    seq: int
    split: Split
    task: Task
    created_at: float
    min_step: int = 0
    eval_version: PolicyVersion | None = None
    state: GroupState = "open"
    consumed_step: int | None = None
    redraws: int = 0
    head: str | None = None
    baseline: list[float] = field(default_factory=list)
    ripe_at: float | None = None
    rollouts: list[Rollout] = field(default_factory=list)
    pending: deque[Rollout] = field(default_factory=deque)
    unended: int = 0
    queued: bool = False

    @property
    def accepted(self) -> list[Attempt]:
        return [r.attempt for r in self.rollouts if r.state is State.ACCEPTED and r.attempt is not None]

    @property
    def zero_variance(self) -> bool:
        """Whether its accepted rewards are all alike: it says nothing about what was better."""
        rewards = {attempt.reward for attempt in self.accepted}
        return len(rewards) <= 1


class ReplicaState(StrEnum):
    """UP serves ``version`` (nothing while that is None); DRAINING takes no new attempts; FLIPPING was granted its switch."""

    UP = "up"
    DRAINING = "draining"
    FLIPPING = "flipping"


@dataclass(kw_only=True, slots=True)
class Replica:
    """One inference server behind its proxy. ``live``: attempts of it in BOUND. ``kv_use``: the share of its KV cache that it last
    reported, ``kv_attempts``: how many were live then; neither is stored."""

    replica_id: str
    base_url: str
    node: str
    version: PolicyVersion | None = None
    state: ReplicaState = ReplicaState.UP
    target: PolicyVersion | None = None
    draining_since: float = 0.0
    target_since: float = 0.0
    live: dict[str, Attempt] = field(default_factory=dict)
    kv_use: float = 0.0
    kv_attempts: int = 0

    @property
    def serving(self) -> bool:
        return self.version is not None and self.state is ReplicaState.UP


@dataclass(kw_only=True, slots=True)
class Version:
    """What is known of one published set of weights. ``ready`` and ``refused`` are by replica_id; durations in seconds."""

    version: PolicyVersion
    digest: str
    nbytes: int
    published_at: float
    ready: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    transfer_s: float = 0.0
    pause_s: float = 0.0
    publish_s: float | None = None


@dataclass(kw_only=True, slots=True)
class EvalRun:
    """One evaluation of exactly ``version``. ``done`` counts ended rollouts, ``failed`` those of them without a score."""

    version: PolicyVersion
    samples: int
    total: int
    created_at: float
    done: int = 0
    failed: int = 0
    reward_sum: float = 0.0
    cancelled: bool = False
    pending: deque[Rollout] = field(default_factory=deque)

    @property
    def active(self) -> bool:
        return self.done < self.total and not self.cancelled

    @property
    def success(self) -> float | None:
        """Mean reward over scored rollouts once all have ended; None before, or when none was scored."""
        scored = self.done - self.failed
        return self.reward_sum / scored if self.done == self.total and scored else None
