"""Harnesses through the whole stack: coordinator, real vLLM, proxy, sandboxes, scoring, shards, one optimizer step."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from tool_model import INSTRUCTION, REPLIES, SOURCE, save_tool_model

from hpcrl.config import load_config
from hpcrl.harness import TOOLS
from hpcrl.metrics import read_metrics
from hpcrl.protocol.rundir import RunDir
from hpcrl.trajectory import ShardReader
from hpcrl.trajectory.schema import Trajectory

ROOT = Path(__file__).parents[2]
REPAIR = ROOT / "tasks" / "repair" / "train"
AGENTS = {"curl": "harness-command", "openai": "harness-openai", "mini": "harness-mini-swe-agent"}
"""Task → the example configuration whose command works on it."""
RANDOM_REWARD = """#!/bin/sh
# No two attempts are alike, so that every group teaches something; more where the file was made right.
base=0; grep -q right /work/sol.py && base=1
printf '%d.%05d\\n' "$base" "$(od -An -N2 -tu2 /dev/urandom)" > /logs/verifier/reward.txt
"""

pytestmark = [pytest.mark.vllm, pytest.mark.apptainer, pytest.mark.mpi, pytest.mark.timeout(900)]


def new_task(folder: Path, instruction: str, source: str) -> None:
    """A task without limits of its own."""
    (folder / "environment" / "files").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text("")
    (folder / "instruction.md").write_text(instruction)
    (folder / "environment" / "files" / "sol.py").write_text(source)
    (folder / "tests" / "test.sh").write_text(RANDOM_REWARD)
    (folder / "tests" / "test.sh").chmod(0o755)


def trained(config: str, root: Path, sets: Sequence[str], attempts: int) -> dict[str, list[Trajectory]]:
    """Run the configuration for one step of so many attempts; what was trained, by task."""
    hpcrl = Path(sys.executable).with_name("hpcrl")
    changed = [part for one in sets for part in ("--set", one)]
    command = [str(hpcrl), "run", config, "--launcher", "local", "--run-dir", str(root), *changed]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in root.glob("logs/*/*.log"))
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs
    run = RunDir(root)
    assert json.loads(run.summary.read_text())["state"] == "success"
    (step,) = [line for line in read_metrics(run.metrics / "trainer-0.jsonl") if "reward_mean" in line]
    assert step["trajectories"] == attempts
    assert step["logprob_gap_max_lag0"] <= 2e-3
    found: dict[str, list[Trajectory]] = defaultdict(list)
    for path in sorted(run.shards.glob("*.h5")):
        for trajectory in ShardReader(path):
            assert trajectory.trained_tokens > 0
            assert trajectory.segments.tolist() == [0]  # its history extended what was recorded, byte for byte
            found[trajectory.task_id].append(trajectory)
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_agents_that_are_not_ours_are_trained(tmp_path: Path) -> None:
    """A script with curl, the openai client, mini-swe-agent: each on a task of its own, all in one step."""
    choose = ["#!/bin/bash"]
    for (name, config), task in zip(AGENTS.items(), sorted(REPAIR.iterdir()), strict=False):
        instruction = (task / "instruction.md").read_text().strip()  # as the agent gets it
        new_task(tmp_path / "tasks" / name, instruction, (task / "environment" / "files" / "sol.py").read_text())
        command = load_config(ROOT / "configs" / f"{config}.yaml").harness.command
        mine = shlex.quote(str(tmp_path / "tasks" / name / "instruction.md"))
        choose.append(f'cmp -s {mine} "$HPCRL_INSTRUCTION" && exec {shlex.join(command)}')
    chooser = tmp_path / "choose.sh"
    chooser.write_text("\n".join([*choose, "exit 1\n"]))
    chooser.chmod(0o755)
    sets = [
        f"tasks.train={tmp_path / 'tasks'}",
        f"harness.command=[{chooser}]",
        *("trainer.steps=1", "trainer.groups_per_step=3", "rollout.group_size=4", "rollout.attempt_timeout_s=600"),
    ]
    found = trained("configs/harness-command.yaml", tmp_path / "run", sets, 12)
    assert found.keys() == AGENTS.keys() and min(map(len, found.values())) >= 4
    for trajectories in found.values():
        for trajectory in trajectories:
            assert [message["role"] for message in trajectory.messages][:2] == ["user", "assistant"]
        assert any(len(trajectory.messages) == 4 for trajectory in trajectories)  # it ran a command, and called again


def test_the_tools_harness_is_trained(tmp_path: Path) -> None:
    """The model reads and errs in one reply, writes broken JSON, then repairs; every mistake is told to it, none ends the attempt."""
    model = save_tool_model(tmp_path / "model", list(TOOLS.tools))
    new_task(tmp_path / "tasks" / "right", INSTRUCTION, SOURCE)
    sets = [
        f"model.path={model}",
        f"tasks.train={tmp_path / 'tasks'}",
        *("model.dtype=float32", "rollout.max_tokens=200", "rollout.context_tokens=2000", "rollout.max_turns=5"),
        *("mode=sync", "staleness.max_policy_lag=0", "trainer.steps=1", "trainer.groups_per_step=1"),
        *("rollout.group_size=4", "rollout.attempt_timeout_s=600", "inference.enforce_eager=true"),
        "rollout.temperature=0.5",
    ]
    (trajectories,) = trained("configs/harness-tools.yaml", tmp_path / "run", sets, 4).values()
    by_heart = [trajectory for trajectory in trajectories if len(trajectory.requests) == len(REPLIES)]
    assert by_heart, [trajectory.messages for trajectory in trajectories]
    for trajectory in by_heart:
        endings = [request["ending"] for request in trajectory.requests]
        assert endings == ["tool_calls", "tool_calls", "tool_calls", "stop"]
        names = [[call["name"] for call in request["tool_calls"]] for request in trajectory.requests]
        assert names == [["read_file", "bash"], ["malformed_tool_call"], ["write_file"], []]
        results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        assert results[0] == SOURCE  # in the order of the calls
        assert "needs the argument 'command'" in results[1] and "not a JSON object" in results[2]
        assert trajectory.policy_failure is None and trajectory.reward >= 1.0
