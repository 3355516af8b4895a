"""``hpcrl score RUN --verifier NEW``: stored artifacts, scored again with other tests."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.cli.errors import run_at
from hpcrl.errors import RunError

if TYPE_CHECKING:
    from hpcrl.run.rescore import Rescored

__all__ = ["score_again"]

_NAMED = 20


def score_again(run_dir: Path, verifier: Path, jobs: int, as_json: bool) -> None:
    """Score, print what changed. Raises RunError when an attempt got no score."""
    from rich.console import Console
    from rich.progress import Progress

    from hpcrl.config import load_config
    from hpcrl.run.rescore import new_verifiers, rescore, scores_file, stored_attempts, summary
    from hpcrl.run.sandboxes import Images, open_pool

    run = run_at(run_dir)
    config = load_config(run.config, [])
    verifiers = new_verifiers(verifier)
    attempts = stored_attempts(run)
    console = Console(stderr=True)

    async def work() -> list[Rescored]:
        async with open_pool(config, Images(config)) as pool:
            with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
                row = bar.add_task("attempts", total=len(attempts))
                return await rescore(
                    run, config, attempts, verifiers, pool, jobs, lambda count: bar.advance(row, count)
                )

    results = asyncio.run(work())
    found = summary(results)
    path = scores_file(run, verifiers)
    if as_json:
        print(json.dumps({"file": str(path), **asdict(found)}))
    else:
        print(
            f"{found.attempts} attempts: {found.same} as before, {found.raised} higher, {found.lowered} lower, "
            f"{found.new} that had no score, {found.failed} failed"
        )
        if found.mean_before is not None and found.mean_after is not None:
            print(f"mean reward {found.mean_before:.4f} before, {found.mean_after:.4f} now")
        failed = [result for result in results if result.failure is not None]
        for result in failed[:_NAMED]:
            print(f"{result.attempt_id}: {result.failure}")
        if len(failed) > _NAMED:
            print(f"and {len(failed) - _NAMED} more")
        print(os.path.relpath(path))
    if found.failed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.failures.items()))
        raise RunError(
            f"{found.failed} of {found.attempts} attempts got no new score ({reasons}); the same command tries them again"
        )
