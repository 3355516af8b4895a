"""Scores a task as the caller, for a test that must not be root: ``score_as_user.py TASK IMAGE SCRATCH``, sol.py on standard input.

Runs on the system's Python: standard library only, as sandbox and scoring are.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from hpcrl.errors import InfraError
from hpcrl.sandbox.apptainer import ApptainerSandbox
from hpcrl.sandbox.images import Image
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.tasks import sandbox_spec
from hpcrl.scoring.private import load_private
from hpcrl.scoring.runner import score

_detached = ApptainerSandbox.detached


async def _slowly(self: ApptainerSandbox) -> bool:
    """As on a busy node: what comes after the tests' end takes a while, so that whoever races it wins."""
    await asyncio.sleep(0.3)
    return await _detached(self)


async def main(task_dir: Path, image: Image, scratch: Path, sol: bytes) -> dict[str, object]:
    ApptainerSandbox.detached = _slowly  # type: ignore[method-assign]
    task, limits = load_private(task_dir), Limits(command_timeout_s=20)
    async with SandboxPool(backend="apptainer", start_concurrency=1, scratch=scratch) as pool:
        async with pool.sandbox(sandbox_spec(task.public, image, limits)) as sandbox:
            await sandbox.write("sol.py", sol)
            artifact = await sandbox.artifact()
        try:
            got = await score(task, artifact, image, limits, pool)
        except InfraError as error:
            return {"reward": None, "why": error.reason}
    return {"reward": got.reward, "why": got.policy_failure}


if __name__ == "__main__":
    where = [Path(argument) for argument in sys.argv[1:]]
    print(json.dumps(asyncio.run(main(where[0], Image(where[1], "sha256-0"), where[2], sys.stdin.buffer.read()))))
