"""Three small runs on Slurm from Python, one after the other has room, and what came of them.

.venv/bin/python docs/sweep.py [RUNS]   from the project's root; on the one-machine cluster after: eval "$(hpcrl devcluster env)"
"""

from __future__ import annotations

import sys

from hpcrl.launch import Run, submit_run

SMALL = ["--ntasks-per-node=1", ":", "--nodes=1", ":", "--nodes=1"]
"""One trainer, one replica, one sandbox node."""


def start(lr: float, runs: str) -> Run:
    trainer = {"steps": 4, "groups_per_step": 2, "optimizer": {"lr": lr}}
    return submit_run(
        "configs/quickstart.yaml",
        sbatch=SMALL,
        run={"name": f"lr{lr:g}", "dir": runs},
        trainer=trainer,
        tasks={"eval": None},
    )


def main(runs: str = "runs") -> None:
    started = {lr: start(lr, runs) for lr in (5e-5, 1.5e-4, 3e-4)}
    for lr, run in started.items():
        print(f"lr {lr:g}: job {run.job_id}, {run.root}", flush=True)
    for lr, run in started.items():
        outcome, summary = run.wait(), run.metrics()
        print(
            f"lr {lr:g}: {outcome}, {summary.get('steps')} steps, {run.end().get('reason') or summary.get('trajectories_trained')}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
