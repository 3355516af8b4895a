"""Names of weights, and the one transition table."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import UserError
from hpcrl.protocol.states import TRANSITIONS, IllegalTransition, State, check_transition
from hpcrl.protocol.version import PolicyVersion

LINE = [
    State.PENDING,
    State.LEASED,
    State.RUNNING,
    State.ARTIFACT_READY,
    State.SCORED,
    State.ACCEPTED,
    State.CONSUMED,
]
ENDS = {State.INFRA_FAILED, State.CANCELLED}


@given(st.integers(0, 10**6), st.integers(0, 10**9))
def test_a_version_reads_back(lineage: int, step: int) -> None:
    version = PolicyVersion(lineage, step)
    assert PolicyVersion.parse(str(version)) == version


def test_versions_order_by_lineage_then_step() -> None:
    written = ["1.2", "0.10", "0.9", "1.0"]
    assert [str(version) for version in sorted(map(PolicyVersion.parse, written))] == ["0.9", "0.10", "1.0", "1.2"]


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.2", "a.b", "1 .2", "default", "1.2\n"])
def test_anything_else_is_no_version(text: str) -> None:
    with pytest.raises(UserError, match=r"is not a policy version: expected LINEAGE\.STEP"):
        PolicyVersion.parse(text)


def test_the_table_covers_every_state() -> None:
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)))
def test_exactly_the_documented_moves_are_legal(old: State, new: State) -> None:
    forward = old in LINE[:-1] and LINE[LINE.index(old) + 1] == new
    failure = old in LINE[:-1] and new in ENDS
    taken_back = (old, new) == (State.CONSUMED, State.ACCEPTED)
    if forward or failure or taken_back:
        check_transition(old, new)
    else:
        with pytest.raises(IllegalTransition, match=f"{old} → {new} is not a legal transition"):
            check_transition(old, new)
