"""The trainer against the real coordinator process: a whole asynchronous run, then a resume after its newest checkpoint is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_stack import FailingWorker, running, train

from hpcrl.config import load_config
from hpcrl.errors import InfraError
from hpcrl.metrics import read_metrics
from hpcrl.protocol import client as c
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.status import StatusRequest
from hpcrl.trainer.checkpoint import latest_complete


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with running(tmp_path) as run:
        yield run


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_a_whole_run_and_a_resume(run: RunDir, delay_s: float) -> None:
    config = load_config(run.config)
    result = train(run, config, delay_s)
    assert result["version"] == "0.6"
    assert result["eval"] == {"0": 0.5, "3": 0.5, "6": 0.5}
    steps = [line for line in read_metrics(run.metrics / "trainer-0.jsonl") if "reward_mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["lag_max"] <= 2 and line["trajectories"] == 8 for line in steps)
    gaps = [line["logprob_gap_max_lag0"] for line in steps if "logprob_gap_max_lag0" in line]
    assert gaps
    assert max(gaps) <= 1e-5
    (run.checkpoints / "0.6" / "COMPLETE").unlink()
    found = latest_complete(run.checkpoints)
    assert found is not None
    assert str(found.version) == "0.4"
    resumed = train(run, config, delay_s)
    assert resumed["version"] == "1.6"
    admin = c.Client(run, "admin")
    status = admin.call(c.STATUS, StatusRequest())
    admin.close()
    assert (status.step, status.duplicates, status.consumed) == (6, 0, 6 * 8)


def test_a_run_that_only_fails_ends_with_the_reasons_of_its_failures(tmp_path: Path) -> None:
    limits = {"infra_retries": 0, "failed_groups": 3, "failed_after_s": 1.0}
    with running(tmp_path, coordinator=limits) as run, pytest.raises(InfraError) as told:
        train(run, load_config(run.config), 0.0, worker_type=FailingWorker)
    text = str(told.value)
    assert "groups in a row failed within" in text and "infra:sandbox_start; the last, g" in text
    assert text.startswith("coordinator_refused: /v1/trainer/batch: 409 no batch for 0.0: ")
    assert "on w: no user namespaces (coordinator.failed_groups, failed_after_s)" in text
