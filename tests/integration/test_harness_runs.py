"""A harness that is not ours through the whole stack: coordinator, real vLLM, proxy, sandboxes, scoring, shards, one optimizer step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.metrics import read_metrics
from hpcrl.protocol.rundir import RunDir
from hpcrl.trajectory import ShardReader

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.vllm, pytest.mark.apptainer, pytest.mark.mpi, pytest.mark.timeout(900)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_an_agent_in_bash_and_curl_is_trained(tmp_path: Path) -> None:
    root = tmp_path / "run"
    hpcrl = Path(sys.executable).with_name("hpcrl")
    small = ["--set", "trainer.steps=1", "--set", "trainer.groups_per_step=4"]
    command = [str(hpcrl), "run", "configs/harness-command.yaml", "--run-dir", str(root), *small]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = RunDir(root)
    assert json.loads(run.summary.read_text())["state"] == "success"
    (step,) = [line for line in read_metrics(run.metrics / "trainer-0.jsonl") if "reward_mean" in line]
    assert step["trajectories"] == 32
    assert step["logprob_gap_max_lag0"] <= 2e-3
    trained = [trajectory for path in sorted(run.shards.glob("*.h5")) for trajectory in ShardReader(path)]
    assert len(trained) >= 32
    for trajectory in trained:
        assert trajectory.trained_tokens > 0
        assert trajectory.segments.tolist() == [0]  # the script's history extended what was recorded, byte for byte
        assert [message["role"] for message in trajectory.messages][:2] == ["user", "assistant"]
    assert any(len(trajectory.messages) == 4 for trajectory in trained)  # it ran a command, and called again
