"""A run directory made by hand: what the roles of a small finished run would have left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config import dump_config, parse_config
from hpcrl.metrics import MetricsWriter
from hpcrl.protocol.messages import EvalResult
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.states import State
from hpcrl.protocol.status import Status


def final_status(run_id: str) -> Status:
    return Status(
        run_id=run_id,
        step=3,
        version="0.3",
        stopped=True,
        attempts={State.CONSUMED: 96, State.INFRA_FAILED: 2, State.CANCELLED: 1, State.RUNNING: 0},
        rollouts={State.CONSUMED: 96},
        failures={"infra:sandbox_start": 2},
        cancelled={"stale": 1},
        rejected_reports={"lease_expired": 1},
        replicas={"r0": "ready 0.3"},
        in_flight=0,
        accepted_unused=0,
        scoring_backlog=0,
        lag_histogram={0: 32, 1: 60, 2: 4},
        consumed=96,
        duplicates=0,
        eval=[
            EvalResult(version="0.3", done=20, total=20, success=0.9, failed=0),
            EvalResult(version="0.0", done=19, total=20, success=0.3, failed=1),
        ],
        recent_reward=0.8,
        versions=[
            {"version": "0.0", "digest": "aa", "publish_s": 0.2, "pause_s": 0.01, "digests": {"r0": "aa", "r1": "aa"}},
            {"version": "0.1", "digest": "bb", "publish_s": 0.4, "pause_s": 0.03, "digests": {"r0": "bb", "r1": "bb"}},
            {"version": "0.2", "digest": "cc", "publish_s": 0.3, "pause_s": 0.02, "digests": {"r0": "cc"}},
        ],
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = RunDir(tmp_path / "quick-1")
    run.create()
    config = parse_config({"run": {"seed": 7}, "model": {"path": "m"}, "tasks": {"train": "t"}})
    run.config.write_text(dump_config(config), encoding="utf-8")
    with MetricsWriter(run.root, "trainer", 0) as trainer:
        for step, tokens in ((1, 1000), (2, 9000), (2, 2000), (3, 3000)):  # step 2 was done again after a resume
            trainer.write(
                {
                    "reward_mean": 0.2 * step,
                    "train_s": 1.5,
                    "step_s": 8.0,
                    "batch_wait_s": 6.0,
                    "tokens_trained": tokens,
                    "trajectories": 32,
                    "logprob_gap_max_lag0": 2e-6 * step,
                    "lag_histogram": {"0": 16, "1": 16},
                },
                step=step,
            )
    for name, counts in (("a", (100, 300)), ("b", (50, 200, 10, 40))):  # replica b was started again
        with MetricsWriter(run.root, "inference", name) as replica:
            for count in counts:
                replica.write({"tokens_generated": count, "queue_s": 0.001 * count, "flip_pause_s": 0.02})
    with MetricsWriter(run.root, "worker", "n1-0") as worker:
        worker.write(
            {"sandbox_start_s": 0.05, "model_s": 1.0, "attempt_s": 1.4, "policy_failures": {"sandbox_dead": 1}}
        )
        worker.write({"failures": {"infra:sandbox_start": 2}, "pool_hits": 3, "pool_misses": 1})
    run.final_status.write_text(final_status("quick-1").model_dump_json(), encoding="utf-8")
    run.end.write_text(json.dumps({"state": "success", "reason": "", "started_at": 100.0, "ended_at": 854.0}))
    return run.root
