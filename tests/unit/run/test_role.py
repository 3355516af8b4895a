"""Every role leaves one readable reason when it fails. Roles are real processes here: what counts is how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpcrl.protocol.rundir import RunDir, publish_text

PROGRAM = """
import argparse, time
from hpcrl.errors import EnvironmentFault
from hpcrl.run.role import bounded, role_main

def work(run, config, args):
    {body}

role_main("tester", work, argparse.ArgumentParser())
print("went on")
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.create()
    publish_text(found.config, yaml.safe_dump({"model": {"path": "m"}, "tasks": {"train": "t"}}))
    return found


def role(run: RunDir, body: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", PROGRAM.format(body=body), "--run-dir", str(run.root)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def reasons(run: RunDir) -> list[str]:
    entries = [json.loads(path.read_text()) for path in run.failures.glob("*.json")]
    assert all({"role", "node", "pid", "at", "exit_code", "reason"} == set(entry) for entry in entries)
    return [f"{entry['role']}: {entry['reason']}" for entry in entries]


def test_success_goes_on_and_leaves_nothing(run: RunDir) -> None:
    done = role(run, "assert config.model.path == 'm'")
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert reasons(run) == []


def test_a_refusal_ends_with_its_code_and_its_reason(run: RunDir) -> None:
    done = role(run, "raise EnvironmentFault('no user namespaces')")
    assert done.returncode == 3
    assert "hpcrl tester: no user namespaces" in done.stderr.splitlines()
    assert reasons(run) == ["tester: no user namespaces"]


def test_any_other_error_is_recorded_and_goes_on_to_whoever_ends_the_world(run: RunDir) -> None:
    done = role(run, "[][0]")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("IndexError: list index out of range")
    assert reasons(run) == ["tester: IndexError: list index out of range"]


def test_a_configuration_that_cannot_be_read_is_a_reason_too(run: RunDir) -> None:
    publish_text(run.config, "model: 3")
    assert role(run, "pass").returncode == 2
    [reason] = reasons(run)
    assert reason.startswith(f"tester: {run.config}: ")


def test_a_call_that_never_returns_ends_the_process_with_its_reason(run: RunDir) -> None:
    done = role(run, "\n    with bounded(run, 'tester', 0.05, 'no MPI world'): time.sleep(60)")
    assert done.returncode == 3
    assert done.stderr == "hpcrl tester: no MPI world\n"
    assert reasons(run) == ["tester: no MPI world"]


def test_a_call_that_returns_in_time_is_left_alone(run: RunDir) -> None:
    done = role(run, "\n    with bounded(run, 'tester', 0.2, 'no'): pass\n    time.sleep(0.3)")
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_a_run_directory_that_is_gone_does_not_hide_the_reason(run: RunDir) -> None:
    done = role(
        run, "\n    import shutil; shutil.rmtree(run.root); run.root.touch()\n    raise EnvironmentFault('first')"
    )
    assert done.returncode == 3
    assert "hpcrl tester: first" in done.stderr
    assert "cannot record the failure" in done.stderr
