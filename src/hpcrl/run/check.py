"""One sandbox is started on this node and looked at from inside, before anything expensive starts."""

from __future__ import annotations

import argparse
import asyncio

from hpcrl.config import RunConfig
from hpcrl.run.role import role_main
from hpcrl.run.sandboxes import Images
from hpcrl.sandbox.check import preflight

__all__ = ["main"]


async def _check(config: RunConfig) -> None:
    await preflight(await Images(config).of(None), config.sandbox.backend)


def main() -> None:
    role_main(
        "sandbox check",
        lambda _run, config, _args: asyncio.run(_check(config)),
        argparse.ArgumentParser(prog="hpcrl.run.check"),
    )


if __name__ == "__main__":
    main()
