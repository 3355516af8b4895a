from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.sandbox.apptainer import FLAGS, Bind, exec_argv, find_apptainer
from hpcrl.sandbox.server import ENTRY, ENTRY_BELOW_INIT

HARDENING = {
    "--userns",
    "--containall",
    "--cleanenv",
    "--no-home",
    "--no-privs",
    "--no-eval",
    "--net",
    "--network=none",
    "--no-mount=sys,bind-paths",
}


def test_argv() -> None:
    binds = [Bind(Path("/scratch/a/work"), "/work", True), Bind(Path("/scratch/a/mount0"), "/tests", False)]
    argv = exec_argv("apptainer", Path("/image"), binds, "/work", None, Path("/scratch/a/f"))
    assert set(FLAGS) >= HARDENING and argv[4 : 4 + len(FLAGS)] == list(FLAGS)
    assert argv[4 + len(FLAGS) :] == [
        "--pwd=/work",
        "--security=seccomp:/scratch/a/f",
        "--bind=/scratch/a/work:/work:rw",
        "--bind=/scratch/a/mount0:/tests:ro",
        "/image",
        *ENTRY,
    ]


def test_a_guarded_image_is_read_only_and_its_init_buries_nothing() -> None:
    argv = exec_argv("apptainer", Path("/image"), [], "/work", None, Path("/scratch/a/f"), guarded=True)
    assert "--writable-tmpfs" in FLAGS and "--writable-tmpfs" not in argv and "--no-init" in argv
    assert set(argv) >= HARDENING and tuple(argv[-len(ENTRY_BELOW_INIT) :]) == ENTRY_BELOW_INIT


def test_root_becomes_somebody_else_first() -> None:
    argv = exec_argv("apptainer", Path("/image"), [], "/work", 65534, Path("/scratch/a/f"))
    assert argv[:5] == ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]


@pytest.mark.parametrize("target", ["tests", "/a:b", "/a,b", '/a"b'])
def test_paths_that_bind_syntax_cannot_say(target: str) -> None:
    with pytest.raises(UserError, match="cannot be mounted"):
        exec_argv("apptainer", Path("/image"), [Bind(Path("/x"), target, False)], "/work", None, Path("/scratch/a/f"))


def test_no_apptainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EnvironmentFault, match="tools/install-apptainer"):
        find_apptainer()
