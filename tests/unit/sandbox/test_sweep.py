from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.sandbox.sweep import WorkerScratch, default_base, sweep


def test_the_living_are_spared_and_the_dead_removed(tmp_path: Path) -> None:
    base = tmp_path / "base"
    alive = WorkerScratch(base)
    dead = base / "w-dead"
    (dead / "attempt" / "work").mkdir(parents=True)
    (dead / "lock").touch()
    (base / "w-half-removed").mkdir()
    (base / ".new-starting").mkdir()
    (base / "unrelated").mkdir()
    assert sweep(base) == ["w-dead", "w-half-removed"]
    assert sorted(os.listdir(base)) == sorted([".new-starting", "unrelated", alive.path.name])
    alive.new_attempt("g/1 x").mkdir()
    alive.close()
    assert sorted(os.listdir(base)) == [".new-starting", "unrelated"]


def test_an_attempt_name_is_one_plain_component(tmp_path: Path) -> None:
    scratch = WorkerScratch(tmp_path / "base")
    try:
        first, second = scratch.new_attempt("../g,1:x"), scratch.new_attempt("../g,1:x")
        assert first != second and first.parent == scratch.path and first.name.startswith(".._g_1_x-")
    finally:
        scratch.close()


def test_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep(tmp_path / "missing") == []


def test_a_lock_held_elsewhere_counts(tmp_path: Path) -> None:
    worker = tmp_path / "w-1"
    worker.mkdir()
    descriptor = os.open(worker / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert sweep(tmp_path) == []
    os.close(descriptor)
    assert sweep(tmp_path) == ["w-1"]


def test_a_base_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(EnvironmentFault, match="HPCRL_SCRATCH"):
        WorkerScratch(tmp_path / "link")


def test_the_guard_outlives_the_signal_that_ends_its_worker(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to everybody in a step at once."""
    holds = "import sys; from pathlib import Path; from hpcrl.sandbox.sweep import WorkerScratch\n"
    holds += "scratch = WorkerScratch(Path(sys.argv[1])); print(scratch._guard.pid, flush=True); input()"
    argv = [sys.executable, "-c", holds, str(tmp_path / "base")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        guard = int(worker.stdout.readline())
        assert os.listdir(tmp_path / "base")
        deadline = time.monotonic() + 60.0
        while b"TERM" not in Path(f"/proc/{guard}/cmdline").read_bytes():  # it is not the shell yet
            assert time.monotonic() < deadline
        ignored = 1 << (signal.SIGTERM - 1)
        while not ignored & int(Path(f"/proc/{guard}/status").read_text().split("SigIgn:")[1].split()[0], 16):
            assert time.monotonic() < deadline, "the guard does not ignore SIGTERM"
            time.sleep(0.01)
        os.kill(guard, signal.SIGTERM)
        worker.terminate()
    while os.listdir(tmp_path / "base"):
        assert time.monotonic() < deadline, "the guard did not sweep"
        time.sleep(0.01)


def test_default_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/a")
    monkeypatch.setenv("SLURM_TMPDIR", "/b")
    monkeypatch.delenv("HPCRL_SCRATCH", raising=False)
    assert default_base() == Path(f"/b/hpcrl-{os.geteuid()}")
    monkeypatch.setenv("HPCRL_SCRATCH", "/c")
    assert default_base() == Path(f"/c/hpcrl-{os.geteuid()}")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="an epilog runs as root")
def test_the_epilog_sweeps_the_job_owners_scratch(tmp_path: Path) -> None:
    base = tmp_path / f"hpcrl-{os.getuid()}"
    (base / "w-dead" / "attempt").mkdir(parents=True)
    (base / "w-dead" / "lock").touch()
    epilog = Path(__file__).parents[3] / "slurm" / "epilog.d" / "hpcrl-sandboxes"
    given = {"PATH": os.environ["PATH"], "HPCRL_PYTHON": sys.executable, "HPCRL_SCRATCH": str(tmp_path)}
    # Without a job, and with nonsense for one, it does nothing; it never fails, which would drain the node.
    for user, left in ((None, ["w-dead"]), ("0; rm", ["w-dead"]), (str(os.getuid()), [])):
        env = given if user is None else {**given, "SLURM_JOB_UID": user}
        assert subprocess.run([epilog], env=env, check=False).returncode == 0
        assert os.listdir(base) == left
