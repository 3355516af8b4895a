"""One sandbox is started on this node and looked at from inside, before anything expensive starts; every task's image must be there."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from hpcrl.config import RunConfig
from hpcrl.errors import UserError
from hpcrl.run.role import role_main
from hpcrl.run.sandboxes import Images
from hpcrl.sandbox.check import preflight
from hpcrl.sandbox.tasks import Task, list_tasks, load_task

__all__ = ["main"]


async def _check(config: RunConfig) -> None:
    images = Images(config)
    await preflight(await images.of(None), config.sandbox.backend)
    for folder in (config.tasks.train, config.tasks.eval):
        for path in [] if folder is None else list_tasks(Path(folder)):
            task = load_task(path)
            if task.image is not None:
                await _check_image(images, task)


async def _check_image(images: Images, task: Task) -> None:
    """A task whose image nobody has would be tried again and again. May take as long as a build, once per image."""
    try:
        await images.of(task)
    except UserError as error:
        raise UserError(f"task {task.directory}: {error}") from error


def main() -> None:
    role_main(
        "sandbox check",
        lambda _run, config, _args: asyncio.run(_check(config)),
        argparse.ArgumentParser(prog="hpcrl.run.check"),
    )


if __name__ == "__main__":
    main()
