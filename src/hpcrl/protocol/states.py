"""The life of an attempt: an enum and one transition table. An illegal move raises.

    PENDING → LEASED → RUNNING → ARTIFACT_READY → SCORED → ACCEPTED → CONSUMED
                  ↘        ↘            ↘             ↘        ↘
                    INFRA_FAILED                    CANCELLED

A *rollout* is PENDING while it has no live attempt; a failed attempt returns it to PENDING until its retry budget is spent.
CONSUMED is provisional until a checkpoint at or after its step is complete; a resume moves later consumptions back to ACCEPTED.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["TRANSITIONS", "IllegalTransition", "State", "check_transition"]


class State(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    RUNNING = "running"
    ARTIFACT_READY = "artifact_ready"
    SCORED = "scored"
    ACCEPTED = "accepted"
    CONSUMED = "consumed"
    INFRA_FAILED = "infra_failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({State.INFRA_FAILED, State.CANCELLED})

TRANSITIONS: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.LEASED}) | _ENDS,
    State.LEASED: frozenset({State.RUNNING}) | _ENDS,
    State.RUNNING: frozenset({State.ARTIFACT_READY}) | _ENDS,
    State.ARTIFACT_READY: frozenset({State.SCORED}) | _ENDS,
    State.SCORED: frozenset({State.ACCEPTED}) | _ENDS,
    State.ACCEPTED: frozenset({State.CONSUMED, State.INFRA_FAILED, State.CANCELLED}),
    State.CONSUMED: frozenset({State.ACCEPTED}),
    State.INFRA_FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


class IllegalTransition(ValueError):
    """A move that the table does not have: a bug in the caller, never a user's mistake."""


def check_transition(old: State, new: State) -> None:
    """Raise IllegalTransition unless ``old → new`` is in the table."""
    if new not in TRANSITIONS[old]:
        allowed = ", ".join(sorted(TRANSITIONS[old])) or "nothing (final)"
        raise IllegalTransition(f"{old} → {new} is not a legal transition; from {old} allowed: {allowed}")
