"""One sandbox is started on this node and looked at from inside, before anything expensive starts; every task's image must be there."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from hpcrl.config import RunConfig
from hpcrl.errors import UserError
from hpcrl.run.role import role_main
from hpcrl.run.sandboxes import Images, limits_of
from hpcrl.sandbox.check import preflight
from hpcrl.sandbox.tasks import list_tasks, load_task

__all__ = ["check_task_images", "main"]


async def check_task_images(config: RunConfig, images: Images) -> None:
    """Resolve the image of every task that names one: else its attempts would be tried again and again.

    May take as long as a build, once per image. Raises UserError naming the task, EnvironmentFault.
    """
    for folder in (config.tasks.train, config.tasks.eval):
        for path in [] if folder is None else list_tasks(Path(folder)):
            task = load_task(path)
            if task.image is None:
                continue
            try:
                await images.of(task)
            except UserError as error:
                raise UserError(f"task {task.directory}: {error}") from error


async def _check(config: RunConfig) -> None:
    images = Images(config)
    await preflight(
        await images.of(None), config.sandbox.backend, limits=limits_of(config), strict=config.limits.strict
    )
    await check_task_images(config, images)


def main() -> None:
    role_main(
        "sandbox check",
        lambda _run, config, _args: asyncio.run(_check(config)),
        argparse.ArgumentParser(prog="hpcrl.run.check"),
    )


if __name__ == "__main__":
    main()
