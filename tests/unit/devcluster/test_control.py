from __future__ import annotations

import pytest

from hpcrl.devcluster.control import parse_nodes, to_resume, usable


def test_parse_nodes_reads_sinfo_lines() -> None:
    assert parse_nodes("cpu1 idle\ncpu2 drained*\ncpu1 idle\n\n") == {"cpu1": "idle", "cpu2": "drained*"}


@pytest.mark.parametrize("state", ["idle", "mixed", "allocated", "completing", "planned"])
def test_working_nodes_are_left_alone(state: str) -> None:
    assert usable(state) and not to_resume(state)


@pytest.mark.parametrize("state", ["down", "down*", "drained", "draining@", "drained*", "fail", "inval"])
def test_lost_nodes_are_resumed(state: str) -> None:
    assert to_resume(state) and not usable(state)


@pytest.mark.parametrize("state", ["idle*", "unknown", "unknown*", "absent", ""])
def test_silent_nodes_are_waited_for(state: str) -> None:
    assert not usable(state) and not to_resume(state)
