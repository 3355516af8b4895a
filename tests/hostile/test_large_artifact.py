"""An artifact that is large without content: its entries' names alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hpcrl.errors import PolicyError
from hpcrl.sandbox.base import SandboxSpec
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool

FILES = "python3 -c 'for n in range(3000): open(str(n).rjust(250, chr(97)), chr(119)).close()'"
LINKS = (
    "python3 -c 'import os\nfor n in range(3000): os.symlink(str(n) + chr(47) + 3 * (250 * chr(97) + chr(47)), str(n))'"
)


@pytest.mark.parametrize("command", [FILES, LINKS])
def test_it_is_refused(attack: Any, command: str) -> None:
    async def main() -> int:
        spec = SandboxSpec(image=attack.image.path, limits=Limits(artifact_bytes=1 << 20))
        async with (
            SandboxPool(backend="apptainer", start_concurrency=1, scratch=attack.base / "scratch") as pool,
            pool.sandbox(spec) as sandbox,
        ):
            assert (await sandbox.run(command)).exit_code == 0
            return len(await sandbox.artifact())

    with pytest.raises(PolicyError, match="artifact_limit"):
        asyncio.run(main())
