"""The command harness with real programs: small shell scripts that use the door to the sandbox."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpcrl.errors import InfraError, PolicyError
from hpcrl.harness import Limits, Outcome, run_program
from hpcrl.harness.program import program_environment


@dataclass
class Result:
    output: str = ""
    exit_code: int = 0
    timed_out: bool = False


@dataclass
class FakeShell:
    answer: Result | Exception = field(default_factory=Result)
    ran: list[str] = field(default_factory=list)

    async def run(self, command: str, timeout_s: float) -> Result:
        self.ran.append(command)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def program(script: str, shell: FakeShell, seconds: float = 60.0) -> Outcome:
    limits = Limits(max_turns=3, command_timeout_s=5, call_timeout_s=5, deadline=time.time() + seconds)
    argv = ["sh", "-c", script]
    return asyncio.run(run_program(argv, "Fix it.", shell, limits, base_url="http://r0/v1", api_key="sk-x"))


def test_a_program_is_told_where_everything_is_and_reaches_its_sandbox(tmp_path: Path) -> None:
    out, shell = tmp_path / "out", FakeShell(Result("said é\n", exit_code=7))
    script = (
        f'exec > {out}; echo "$OPENAI_BASE_URL $OPENAI_API_KEY $HPCRL_MODEL"; cat "$HPCRL_INSTRUCTION"; echo;'
        'set +e; "$HPCRL_EXEC" "ls -l | wc"; echo "status $?"; "$HPCRL_EXEC" -c "true"'
    )
    outcome = program(script + "; exit 0", shell)
    assert out.read_text() == "http://r0/v1 sk-x policy\nFix it.\nsaid é\nstatus 7\nsaid é\n"
    assert shell.ran == ["ls -l | wc", "true"]
    assert (outcome.ended, outcome.problem, outcome.policy_failure, outcome.commands) == ("program", None, None, 2)


def test_a_program_that_fails_says_why() -> None:
    outcome = program("echo no key >&2; exit 3", FakeShell())
    assert outcome.problem == "3: no key" and outcome.policy_failure is None


def test_a_program_that_is_not_there() -> None:
    limits = Limits(max_turns=3, command_timeout_s=5, call_timeout_s=5, deadline=time.time() + 60)
    with pytest.raises(InfraError, match=r"harness\.command /no/such"):
        asyncio.run(run_program(["/no/such"], "x", FakeShell(), limits, base_url="", api_key=""))


def test_a_sandbox_that_the_agent_broke_ends_the_program() -> None:
    outcome = program('"$HPCRL_EXEC" "kill -9 -1"; sleep 60', FakeShell(PolicyError("sandbox_dead")))
    assert (outcome.ended, outcome.policy_failure) == ("policy_failure", "sandbox_dead")
    with pytest.raises(InfraError, match="sandbox_killed"):
        program('"$HPCRL_EXEC" true; sleep 60', FakeShell(InfraError("sandbox_killed")))


def test_time_is_bounded_and_nothing_is_left(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(InfraError, match="attempt_timeout"):
        program(f"sleep 60 & echo $! > {pid}; wait", FakeShell(), seconds=0.1)
    # The session was killed with the program: a zombie at most, until whoever adopted it reaps it.
    deadline = time.monotonic() + 10
    started = pid.read_text().strip() if pid.exists() else ""  # neither, where time was over before
    while started and not _is_over(int(started)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_nothing_of_the_job_leaks_into_the_program() -> None:
    given = {"PATH": "/bin", "SLURM_JOB_ID": "1", "PMI_RANK": "0", "HPCRL_X": "1", "OPENAI_API_KEY": "mine"}
    found = program_environment(given, Path("/f"), "http://r0/v1", "sk-x", 3)
    assert found["PATH"] == "/bin" and found["OPENAI_API_KEY"] == "sk-x"
    assert not {"SLURM_JOB_ID", "PMI_RANK", "HPCRL_X"} & set(found)
