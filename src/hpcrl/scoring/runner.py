"""Scores one artifact.

    fresh work directory: image content + task files ─► artifact applied ─► sandbox starts, tests mounted read-only at /tests
    ─► bash /tests/test.sh in the work directory ─► all its processes ended ─► /logs/verifier/reward.txt | reward.json, from the host

Who is to blame decides what is reported:

    a reward was written                               that score
    the verifier overran its time, or what it ran      reward 0, policy failure: the artifact is what differs between attempts
    broke a limit of the sandbox
    a process had come loose from the tests, and the   reward 0, policy failure "verifier_background": who wrote it is not known
    reward is above 0, unusable or missing
    the tests were interrupted (status 130), and the   reward 0, policy failure "verifier_interrupted": they may not have come to
    reward is above 0                                  write it
    modes kept the tests from writing the reward,      reward 0, policy failure "verifier_locked": somebody else wrote it
    and it is above 0
    no reward, or not a finite number                  InfraError("no_reward" | "bad_reward"): the verifier is broken
    both reward.txt and reward.json                    InfraError("bad_reward"): which of them is the tests' own cannot be known
    the verifier was killed from outside (status 137)  InfraError("verifier_killed"): what it wrote before is no verdict
    the sandbox did not start or was killed            InfraError
    the artifact is no artifact                        DataError

The code under test runs beside the tests under the same user, as Harbor defines it, and may write to /logs/verifier too. So a reward
counts only if the tests wrote it last, undisturbed: nothing is written once they have ended, since all processes end before it is read;
and no process may have come loose from the tests' own line (forked twice, left behind by a killed parent, still running at the end),
for only such a one can write behind their last line, or after having ended them. The sandbox is a guarded one: its image cannot be
changed from inside, and what came loose stays to be seen. docs/security.md says what remains.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field, replace

from hpcrl.errors import InfraError, PolicyError
from hpcrl.sandbox.artifact import restrict
from hpcrl.sandbox.base import Mount, Sandbox
from hpcrl.sandbox.images import Image
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.tasks import sandbox_spec
from hpcrl.scoring.private import PrivateTask
from hpcrl.scoring.rewards import parse_json, parse_text, total

__all__ = ["LOGS", "TESTS", "Score", "score"]

TESTS = "/tests"
LOGS = "/logs/verifier"

_REWARD_BYTES = 1 << 16
_DETAIL_CHARACTERS = 2000
_FILES = ("reward.txt", "reward.json")
_KILLED = 128 + signal.SIGKILL
_INTERRUPTED = 128 + signal.SIGINT
"""Other signals end a shell at once, and who sent one has then come loose. This one it dies of after the program it waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Example: ``Score(reward=1.0, rewards={"reward": 1.0}, verifier_version="sha256-…", duration_s=0.2)``.

    ``policy_failure``: why the score is 0 without a verdict ("verifier_timeout", "disk_limit", …). ``detail``: the end of what the
    verifier printed, for people.
    """

    reward: float
    verifier_version: str
    duration_s: float
    rewards: dict[str, float] = field(default_factory=dict)
    policy_failure: str | None = None
    detail: str = ""


async def score(
    task: PrivateTask, artifact: bytes, image: Image | None, limits: Limits, pool: SandboxPool, name: str = "score"
) -> Score:
    """Score ``artifact``. Raises InfraError, DataError as listed above. ``name`` labels the scratch directory."""
    began = time.monotonic()
    if task.public.artifacts is not None:
        artifact = restrict(artifact, task.public.artifacts)
    spec = replace(
        sandbox_spec(task.public, image, limits),
        artifact=artifact,
        guarded=True,
        env={**task.public.env, **task.env},
        mounts=(Mount(target=TESTS, source=task.tests), Mount(target=LOGS, writable=True)),
    )
    async with pool.sandbox(spec, name) as sandbox:
        failure: str | None = None
        output = ""
        status = 0
        loose = False
        try:
            result = await sandbox.run(_command(pool), task.timeout_s)
            output, status = result.output[-_DETAIL_CHARACTERS:], result.exit_code
            if result.timed_out:
                failure = "verifier_timeout"
            elif result.flooded:
                failure = "verifier_output_limit"
            elif status == _KILLED:
                raise InfraError("verifier_killed", f"the tests were killed; they printed: {_end(output)}")
            loose = await sandbox.detached()
        except PolicyError as error:
            failure, output = f"verifier_{error.reason}", str(error)
        await sandbox.finish()
        rewards: dict[str, float] = {}
        if failure is None:
            try:
                rewards = await _rewards(sandbox, output)
            except InfraError:
                # A file spoilt from behind is no fault of the tests: no second try for who spoilt it.
                if not loose:
                    raise
            if not rewards or total(rewards) > 0:
                failure = await _doubt(sandbox, status, loose)
                rewards = {} if failure is not None else rewards
        return Score(
            reward=total(rewards) if rewards else 0.0,
            rewards=rewards,
            verifier_version=task.verifier_version,
            duration_s=time.monotonic() - began,
            policy_failure=failure,
            detail=output,
        )


def _command(pool: SandboxPool) -> str:
    # The process backend has no namespace to mount in: it names its directories in the environment.
    tests = TESTS if pool.isolated else "$HPCRL_MOUNT_0"
    return f'if command -v bash >/dev/null; then exec bash "{tests}/test.sh"; else exec sh "{tests}/test.sh"; fi'


async def _doubt(sandbox: Sandbox, status: int, loose: bool) -> str | None:
    """Why a reward above 0, written in the tests' place, is perhaps not theirs."""
    if loose:
        return "verifier_background"
    if status == _INTERRUPTED:
        return "verifier_interrupted"
    return "verifier_locked" if await sandbox.locked(LOGS, _FILES) else None


async def _rewards(sandbox: Sandbox, output: str) -> dict[str, float]:
    found: list[dict[str, float]] = []
    for name, parse in zip(_FILES, (parse_text, parse_json), strict=True):
        try:
            content = await sandbox.read_mount(LOGS, name, _REWARD_BYTES)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise InfraError("bad_reward", f"{LOGS}/{name}: {error}") from error
        found.append(parse(content))
    if len(found) > 1:
        raise InfraError("bad_reward", f"both reward.txt and reward.json are in {LOGS}; tests must write one of them")
    if not found:
        raise InfraError(
            "no_reward", f"the tests wrote neither reward.txt nor reward.json; they printed: {_end(output)}"
        )
    return found[0]


def _end(output: str) -> str:
    return repr(output[-300:].strip())
