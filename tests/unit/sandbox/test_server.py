from __future__ import annotations

import shutil
import subprocess

import pytest

from hpcrl.errors import UserError
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.server import OPENING, call, parse_control, setup

LIMITS = Limits(processes=100_000, memory_bytes=1 << 40)


@pytest.mark.parametrize("shell", [name for name in ("bash", "dash") if shutil.which(name)])
def test_the_script_runs_in_any_shell(shell: str) -> None:
    script = OPENING + setup("/", {"GREETING": "it's\n$me"}, LIMITS)
    script += call(1, 'echo "$GREETING"; pwd; exit 3') + call(2, "kill -9 0") + call(3, "cat; echo last >&2")
    done = subprocess.run([shell], input=script, capture_output=True, timeout=20, check=False)
    assert done.stdout.decode() == "it's\n$me\n/\nlast\n"
    ready, *lines = done.stderr.splitlines()
    assert ready.startswith(b"ready ")
    assert [parse_control(line) for line in lines] == [(0, 0), (1, 3), (2, 137), (3, 0)]


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A;rm"])
def test_bad_environment_names(name: str) -> None:
    with pytest.raises(UserError, match="environment variable"):
        setup("/work", {name: "x"}, LIMITS)


@pytest.mark.parametrize("line", [b"", b"7", b"x 0", b"7 0 0", b"-1 0", b"9999999999 0", b"INFO: underlay"])
def test_other_control_lines_are_nothing(line: bytes) -> None:
    assert parse_control(line) is None


def test_limits_must_be_positive() -> None:
    with pytest.raises(UserError, match="processes is 0"):
        Limits(processes=0)
