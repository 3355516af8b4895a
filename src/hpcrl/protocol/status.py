"""What a run is doing, for people and for the checks at its end."""

from __future__ import annotations

from pydantic import Field

from hpcrl.protocol.messages import EvalResult, Message
from hpcrl.protocol.states import State

__all__ = ["Status", "StatusRequest", "Wait"]


class StatusRequest(Message):
    pass


class Wait(Message):
    """One thing that waits. Example: trainer waits for batch 0.7 because "2 of 4 groups complete; g000012 7/8: …"."""

    who: str = Field(examples=["trainer", "replica r0", "worker cpu1-0"])
    what: str = Field(examples=["batch 0.7"])
    since: float = Field(description="seconds since the epoch")
    why: str


class Status(Message):
    """A snapshot for people and for the end-of-run checks."""

    run_id: str
    step: int
    version: str | None
    stopped: bool
    attempts: dict[State, int]
    rollouts: dict[State, int]
    failures: dict[str, int] = Field(description="kind:reason → count")
    cancelled: dict[str, int]
    rejected_reports: dict[str, int]
    replicas: dict[str, str] = Field(description="replica_id → state and version, readable")
    in_flight: int
    accepted_unused: int
    scoring_backlog: int
    lag_histogram: dict[int, int] = Field(description="policy lag → trajectories consumed")
    consumed: int
    duplicates: int
    eval: list[EvalResult]
    recent_reward: float | None
    groups: dict[str, int] = Field(
        {}, description="how training groups fared: consumed, zero_variance, closed:REASON, …"
    )
    waits: list[Wait] = Field([], description="who waits for what, longest first")
    versions: list[dict[str, float | str | dict[str, str]]]
