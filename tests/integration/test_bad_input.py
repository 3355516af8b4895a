"""What a user gets wrong: one clear line, a non-zero code, nothing started and nothing lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hetjobs import ROOT, Jobs

HPCRL = Path(sys.executable).with_name("hpcrl")


@pytest.fixture
def good(tmp_path: Path) -> dict[str, dict[str, object]]:
    """A configuration that passes all checks of files; its model is only looked at."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text('{"model_type": "qwen3"}')
    task = min((ROOT / "tasks/repair/train").iterdir())
    shutil.copytree(task, tmp_path / "tasks" / task.name)
    return {
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "tasks": {"train": str(tmp_path / "tasks")},
    }


def hpcrl(*argv: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and the one line on stderr."""
    done = subprocess.run(
        [*prefix, str(HPCRL), *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("hpcrl: ")
    return done.returncode, lines[0]


def write(tmp_path: Path, config: dict[str, dict[str, object]]) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.parametrize("command", [("run",), ("submit",)], ids=["local", "submit"])
class TestBeforeAnythingStarts:
    """The same refusals whether a run is started here or submitted; no run directory appears."""

    def refused(
        self, command: tuple[str, ...], tmp_path: Path, config: dict[str, dict[str, object]], *more: str
    ) -> str:
        code, line = hpcrl(*command, write(tmp_path, config), *more)
        assert code == 2
        assert not (tmp_path / "runs").exists()
        return line

    def test_unknown_key(self, command: tuple[str, ...], tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
        line = self.refused(command, tmp_path, good, "--set", "trainer.setps=3")
        assert "unknown key trainer.setps; did you mean trainer.steps?" in line

    def test_missing_model(self, command: tuple[str, ...], tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
        line = self.refused(command, tmp_path, good, "--set", "model.path=/nowhere/m")
        assert "model.path: /nowhere/m is not a directory" in line

    def test_model_without_tokenizer(
        self, command: tuple[str, ...], tmp_path: Path, good: dict[str, dict[str, object]]
    ) -> None:
        (tmp_path / "model" / "tokenizer.json").unlink()
        assert "has no tokenizer* (a tokenizer)" in self.refused(command, tmp_path, good)

    def test_missing_tasks(self, command: tuple[str, ...], tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
        line = self.refused(command, tmp_path, good, "--set", "tasks.eval=/nowhere/t")
        assert "tasks.eval: cannot read /nowhere/t" in line

    def test_malformed_task(self, command: tuple[str, ...], tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
        file = next((tmp_path / "tasks").glob("*/task.toml"))
        file.write_text("[verifier]\ntimeout_sec = 'an hour'\n")
        assert f"{file}: [verifier] timeout_sec is 'an hour'; expected" in self.refused(command, tmp_path, good)

    def test_used_run_directory(
        self, command: tuple[str, ...], tmp_path: Path, good: dict[str, dict[str, object]]
    ) -> None:
        used = tmp_path / "used"
        used.mkdir()
        (used / "config.resolved.yaml").write_text("precious")
        line = self.refused(command, tmp_path, good, "--run-dir", str(used))
        assert f"{used} already holds a run" in line
        assert (used / "config.resolved.yaml").read_text() == "precious"
        assert os.listdir(used) == ["config.resolved.yaml"]


def test_submit_without_slurm(tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
    code, line = hpcrl("submit", write(tmp_path, good), env={**os.environ, "PATH": str(tmp_path)})
    assert code == 2
    assert "sbatch is not on PATH" in line


def test_no_apptainer(tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
    code, line = hpcrl("run", write(tmp_path, good), env={**os.environ, "PATH": str(tmp_path)})
    assert code == 3
    assert "sandbox check on" in line
    assert "apptainer" in line
    assert _ends(tmp_path) == ["failed"]


def test_user_namespaces_switched_off(tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
    """In a user namespace of its own the process can switch them off for itself."""
    off = "echo 0 > /proc/sys/user/max_user_namespaces && exec "
    prefix = ("unshare", "--user", "--map-root-user", "sh", "-c", f'{off}"$0" "$@"')
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("cannot switch user namespaces off here")
    code, line = hpcrl("run", write(tmp_path, good), prefix=prefix)
    assert code == 3
    assert "user namespaces are switched off (/proc/sys/user/max_user_namespaces is 0)" in line


def test_an_image_that_is_none(tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
    code, line = hpcrl("run", write(tmp_path, good), "--set", "sandbox.image=/nowhere/i")
    assert code == 3
    assert "image '/nowhere/i': there is no file or directory /nowhere/i" in line


@pytest.mark.apptainer
def test_a_tasks_image_that_nobody_has(tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
    file = next((tmp_path / "tasks").glob("*/task.toml"))
    file.write_text('[environment]\ndocker_image = "python:3.12"\n')
    code, line = hpcrl("run", write(tmp_path, good))
    assert code == 3
    assert f"task {file.parent}: image 'python:3.12' is neither a directory, a .sif nor a .def file" in line
    assert _ends(tmp_path) == ["failed"]
    assert not list((tmp_path / "runs").glob("*/coordinator.db"))


@pytest.mark.apptainer
def test_limits_that_no_sandbox_can_start_with(tmp_path: Path, good: dict[str, dict[str, object]]) -> None:
    code, line = hpcrl("run", write(tmp_path, good), "--set", "sandbox.open_files=1")
    assert code == 3
    assert "sandbox check on" in line
    assert _ends(tmp_path) == ["failed"]


def _ends(tmp_path: Path) -> list[str]:
    return [json.loads(path.read_text())["state"] for path in (tmp_path / "runs").glob("*/end.json")]


# ---------------------------------------------------------------- inside Slurm


@pytest.fixture
def shared(jobs: Jobs, good: dict[str, dict[str, object]], tmp_path: Path) -> str:
    """The good configuration where the nodes see it."""
    for name in ("model", "tasks"):
        shutil.copytree(tmp_path / name, jobs.folder / name)
    good["model"]["path"] = str(jobs.folder / "model")
    good["tasks"]["train"] = str(jobs.folder / "tasks")
    return write(jobs.folder, good)


@pytest.mark.slurm
def test_a_partition_that_does_not_exist(jobs: Jobs, shared: str) -> None:
    script = (ROOT / "slurm" / "launch_hetjob.sh").read_text().replace("--partition=infer", "--partition=gpu-x")
    folder = jobs.folder / "slurm"
    folder.mkdir()
    (folder / "launch_hetjob.sh").write_text(script)
    done = subprocess.run(
        [str(HPCRL), "submit", shared], cwd=jobs.folder, env=jobs.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("hpcrl: sbatch refused the job: sbatch: error: ")
    assert "invalid partition specified: gpu-x" in line
    assert jobs.slurm("squeue", "-h") == ""


@pytest.mark.slurm
def test_a_job_without_three_components(jobs: Jobs, shared: str) -> None:
    job = jobs.wrap(f"exec {sys.executable} -m hpcrl.launch.batch {shared} --run-dir {{run}}", "--partition=cpu")
    assert job.wait(60) == "FAILED"
    assert job.last_line().startswith("hpcrl: the job has 1 component(s), but needs 3 (trainer, inference, sandbox)")
    assert not job.run_dir.exists()


@pytest.mark.slurm
def test_a_run_directory_that_only_the_first_node_sees(jobs: Jobs, shared: str) -> None:
    job = jobs.submit(shared, run_dir=Path("/tmp/hpcrl-run"))
    assert job.wait(90) == "FAILED"
    line = job.last_line()
    assert line.startswith("hpcrl: the run directory /tmp/hpcrl-run is not visible on cpu1, cpu2, infer1, infer2; ")
    assert "coordinator" not in job.text()


@pytest.mark.slurm
@pytest.mark.mpi
@pytest.mark.apptainer
@pytest.mark.parametrize(
    ("mpi", "message"),
    [
        ("none", "the MPI world has size 1 but the job has 4 ranks"),
        ("foo", r"Invalid MPI type 'foo'|specified plugin name for mpi/foo"),
    ],
)
def test_the_wrong_pmi_ends_quickly_with_its_reason(jobs: Jobs, shared: str, mpi: str, message: str) -> None:
    job = jobs.submit(shared, f"slurm.mpi={mpi}")
    job.wait_for(lambda: "started mpi" in job.text(), 90, "start")
    start = time.monotonic()
    assert job.wait(90) == "FAILED"
    assert time.monotonic() - start < 60
    assert re.search(message, job.last_line())  # srun prints two errors; which one comes first varies
    assert job.last_line().startswith("hpcrl: ")
