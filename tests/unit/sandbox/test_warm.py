from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpcrl.sandbox.base import Mount, SandboxSpec
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.warm import Demand, kind_of, shares

IMAGE = Path("/images/sha256-1")


def test_what_an_attempt_brings_makes_no_other_kind() -> None:
    bare = SandboxSpec(image=IMAGE)
    full = SandboxSpec(
        image=IMAGE, files=(Path("/task"),), artifact=b"x", env={"A": "1"}, limits=Limits(memory_bytes=1 << 20)
    )
    assert kind_of(bare) == kind_of(full)
    assert kind_of(bare) != kind_of(SandboxSpec(image=Path("/images/sha256-2")))
    assert kind_of(bare) != kind_of(SandboxSpec(image=IMAGE, workdir="/app"))
    mounted = [SandboxSpec(image=IMAGE, mounts=(Mount(target="/tests", writable=w),)) for w in (False, True)]
    assert len({kind_of(spec) for spec in (bare, *mounted)}) == 3


def test_a_kind_holds_nothing_of_an_attempt() -> None:
    tests = Mount(target="/tests", source=Path("/private/tests"))
    like = SandboxSpec(image=IMAGE, files=(Path("/task"),), artifact=b"x", env={"A": "1"}, mounts=(tests,))
    made = kind_of(like).spec(like)
    assert (made.files, made.artifact, made.env) == ((), None, {})
    assert made.mounts == (Mount(target="/tests"),) and kind_of(made) == kind_of(like)


def test_nothing_is_wanted_before_anybody_asked() -> None:
    assert Demand().wanted(0.0) == 0


def test_steady_arrivals_want_what_arrives_within_one_start() -> None:
    demand = Demand()
    for _ in range(50):
        demand.started(0.6)
    for second in range(100):
        for arrival in range(4):
            demand.arrived(second + arrival / 4)
    assert demand.wanted(100.0) == 3  # one a quarter of a second: three within 0.6 s, both ends counted
    for _ in range(50):
        demand.started(0.01)
    demand.arrived(101.0)
    assert demand.wanted(101.0) == 3  # the busiest time counts until it is ten minutes old
    demand.arrived(750.0)
    assert demand.wanted(750.0) == 1
    assert demand.wanted(1350.1) == 0


def test_a_batch_wants_as_many_as_the_batch() -> None:
    demand = Demand()
    for step in range(3):
        for _ in range(16):
            demand.arrived(60.0 * step)
    assert demand.wanted(170.0) == 16


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_it_is_the_largest_number_within_one_start(times: list[float]) -> None:
    demand = Demand()
    for _ in range(100):
        demand.started(2.0)
    exact = demand._start_s
    for time in sorted(times):
        demand.arrived(time)
    assert demand.wanted(100.0) == max(sum(end - exact <= t <= end for t in times) for end in times)


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 100))
def test_shares_keep_the_bound_and_the_order(wanted: list[int], bound: int) -> None:
    given_ = shares(wanted, bound)
    assert sum(given_) == min(bound, sum(wanted)) and all(g <= w for g, w in zip(given_, wanted, strict=True))
    for index in range(1, len(given_)):
        assert given_[index] == 0 or given_[index - 1] == wanted[index - 1]
