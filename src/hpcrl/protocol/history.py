"""The life of one rollout as the coordinator tells it: its attempts, and every transition and rejected report in order of time."""

from __future__ import annotations

from pydantic import Field

from hpcrl.protocol.messages import Message, Split
from hpcrl.protocol.states import State

__all__ = ["AttemptHistory", "HistoryEvent", "HistoryRequest", "RolloutHistory"]


class HistoryRequest(Message):
    rollout_id: str = Field(description="a rollout's id, or that of one of its attempts")


class HistoryEvent(Message):
    """A transition of an attempt, or a report that came too late and was rejected."""

    at: float
    attempt_id: str
    what: str = Field(examples=["leased → running", "sealed report rejected"])
    cause: str
    by: str = ""


class AttemptHistory(Message):
    attempt_id: str
    state: State
    worker_id: str
    scorer_id: str | None
    replica_id: str
    policy_version: str
    reward: float | None
    shard: str
    row: int
    consumed_step: int | None


class RolloutHistory(Message):
    """Everything that ever happened to one rollout, in order of time."""

    rollout_id: str
    group_id: str
    task_id: str
    split: Split
    state: State = Field(description="pending stands for whatever its live attempt is in")
    infra_failures: int
    data_failures: int
    attempts: list[AttemptHistory]
    events: list[HistoryEvent]
