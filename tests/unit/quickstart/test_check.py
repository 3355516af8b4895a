from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.quickstart import check

CASES = [((7, 3), 1), ((20, 6), 2)]
RIGHT = "def f(a, b):\n    return a % b\n"


@pytest.mark.parametrize(
    ("source", "result"),
    [
        (RIGHT, True),
        ("def f(a, b):\n    return a * b\n", False),
        ("def g(a, b):\n    return a % b\n", False),
        ("def f(a, b):\n    return\n", False),
        ("def f(a, b)\n", False),
        ("def f(a, b):\n    return a / b\n", False),
        ("import os\n" + RIGHT, False),
        ("class A:\n    pass\n" + RIGHT, False),
        (RIGHT + "#" * 400, False),
        ("def f(a, b):\n    return f(a, b)\n", False),
        ("x = 9\nx = x ** 9\n" + RIGHT, False),
        ("def f(a, b):\n    return (i for i in ()).gi_frame\n", False),
        ("def f(a, b):\n    return f.__globals__\n", False),
        ("def f(a, b):\n    return eval('1')\n", False),
    ],
)
def test_passes(source: str, result: bool) -> None:
    assert check.passes(source, "f", CASES) is result


def test_equal_value_of_another_type_does_not_pass() -> None:
    source = "def f(a, b):\n    return a < b\n"
    assert check.passes(source, "f", [((1, 2), True)])
    assert not check.passes("def f(a, b):\n    return 1\n", "f", [((1, 2), True)])


def run(tmp_path: Path, source: str | bytes | None, cases: str = f"('f', {CASES!r})") -> str | None:
    """The reward file that the check leaves behind, run as in the sandbox."""
    (tmp_path / "cases.txt").write_text(cases)
    if source is not None:
        (tmp_path / "sol.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    paths = [str(tmp_path / name) for name in ("cases.txt", "sol.py", "reward.txt")]
    subprocess.run([sys.executable, "-I", "-S", check.__file__, *paths], check=False, capture_output=True, timeout=20)
    reward = tmp_path / "reward.txt"
    return reward.read_text() if reward.exists() else None


def test_rewards(tmp_path: Path) -> None:
    assert run(tmp_path, RIGHT) == "1\n"
    assert run(tmp_path, "def f(a, b):\n    return a\n") == "0\n"
    assert run(tmp_path, b"\xff\xfe") == "0\n"


def test_missing_file_is_a_failed_repair(tmp_path: Path) -> None:
    assert run(tmp_path, None) == "0\n"


def test_endless_loop_is_a_failed_repair(tmp_path: Path) -> None:
    assert run(tmp_path, "def f(a, b):\n    while a:\n        pass\n") == "0\n"


def test_only_processor_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that runs everything ten times slower must not fail a right repair."""
    timers = []
    monkeypatch.setattr(check._signal, "setitimer", lambda which, seconds: timers.append((which, seconds)))
    (tmp_path / "cases.txt").write_text(f"('f', {CASES!r})")
    (tmp_path / "sol.py").write_text(RIGHT)
    check.main(*(str(tmp_path / name) for name in ("cases.txt", "sol.py", "reward.txt")))
    assert timers == [(signal.ITIMER_PROF, 1.0), (signal.ITIMER_PROF, 0.0)]


@pytest.mark.parametrize(
    "body", ["import time", "from time import sleep", "input()", "open(0)", "(yield)", "await f(1, 2)", "print(1)"]
)
def test_nothing_that_waits_can_be_called(body: str) -> None:
    """What the limit on processor time rests on."""
    assert not check.passes(f"def f(a, b):\n    {body}\n    return a % b\n", "f", CASES)


def test_unreadable_cases_give_no_reward(tmp_path: Path) -> None:
    assert run(tmp_path, RIGHT, cases="(") is None
