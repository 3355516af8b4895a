"""The doctor's table: every check is asked, a broken one says what to do and decides the exit code."""

from __future__ import annotations

import subprocess

import pytest
from typer.testing import CliRunner

from hpcrl.cli import doctor, doctor_checks
from hpcrl.cli.main import app
from hpcrl.errors import EnvironmentFault
from hpcrl.sandbox import check, images


def broken() -> str:
    raise EnvironmentFault("load the module")


def missing() -> str:
    raise FileNotFoundError(2, "No such file or directory", "tool")


@pytest.mark.parametrize(("check", "said"), [(broken, "load the module"), (missing, "tool")])
def test_one_broken_check_breaks_the_verdict_but_not_the_others(
    monkeypatch: pytest.MonkeyPatch, check: object, said: str
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"first": check, "second": lambda: "7 GiB free"})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 3
    assert said in result.stdout
    assert "7 GiB free" in result.stdout
    assert result.stderr.strip() == "hpcrl: something is broken; see the table"


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"only": lambda: "fine"})
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_a_configuration_is_one_more_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {})
    result = CliRunner().invoke(app, ["doctor", "/nowhere/x.yaml"])
    assert result.exit_code == 3
    assert "/nowhere/x.yaml" in " ".join(result.stdout.split())


def test_slurm_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentFault, match="sinfo is not on PATH"):
        doctor.CHECKS["Slurm"]()


def test_what_sandboxes_do_not_enforce_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: object) -> list[check.Gap]:
        return [
            check.Gap("disk is late", "a quota", late=True),
            check.Gap("memory is not bounded", "delegate a cgroup"),
        ]

    monkeypatch.setattr(check, "preflight", found)
    monkeypatch.setattr(images, "resolve", lambda name: None)
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor_checks, "_ask", lambda *argv: subprocess.CompletedProcess(argv, 0, "apptainer 1\n", ""))
    assert doctor_checks.sandboxes() == (
        "apptainer 1; disk is late; a run with limits.strict is refused here: memory is not bounded (remedy: delegate a cgroup)"
    )
