"""Checkpoints: bit-equal continuation, and whatever kills a save leaves the last complete one in force."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import worlds
from samples import config_for, tiny_model

from hpcrl.errors import DataError, UserError
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer import checkpoint as module
from hpcrl.trainer.checkpoint import Checkpoints, latest_complete
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.model import Policy, export_hf
from hpcrl.trainer.update import make_optimizer

ALONE = Ranks(0, 1, torch.device("cpu"))


def policy_and_optimizer(seed: int = 0) -> tuple[Policy, torch.optim.Optimizer]:
    policy = Policy(tiny_model(seed), 1.0)
    return policy, make_optimizer(policy, config_for(Path("unused")).trainer)


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    batches = worlds.prepare(tmp_path)
    config = config_for(tmp_path / "model", checkpoint_every=1, keep_checkpoints=5)
    _, through, _, _ = worlds.train(tmp_path, ALONE, config, batches)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "0.3" / "COMPLETE").unlink()
    found = latest_complete(checkpoints)
    assert found is not None
    assert str(found.version) == "0.2"
    torch.manual_seed(12345)
    result, resumed, told, published = worlds.train(tmp_path, ALONE, config, batches, lineage=1)
    assert torch.equal(resumed, through)
    assert result["version"] == "1.3"
    assert told[0] == "start checkpoint_step=2"
    assert [name for name, _ in published] == ["1.2", "1.3"]


def test_random_state_and_optimizer_come_back(tmp_path: Path) -> None:
    policy, optimizer = policy_and_optimizer()
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoints = Checkpoints(tmp_path, ALONE, keep=1)
    saved = checkpoints.save(policy, optimizer, PolicyVersion(0, 1))
    drawn = torch.rand(4)
    other, other_optimizer = policy_and_optimizer(seed=9)
    checkpoints.load(saved, other, other_optimizer)
    assert torch.equal(torch.rand(4), drawn)
    assert torch.equal(worlds.flat(policy), worlds.flat(other))
    for left, right in zip(
        optimizer.state_dict()["state"].values(), other_optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_old_checkpoints_are_removed_and_the_newest_lineage_wins(tmp_path: Path) -> None:
    policy, optimizer = policy_and_optimizer()
    checkpoints = Checkpoints(tmp_path, ALONE, keep=2)
    for version in (PolicyVersion(0, 8), PolicyVersion(0, 10), PolicyVersion(1, 9)):
        checkpoints.save(policy, optimizer, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.10", "1.9"]
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.version == (1, 9)
    assert latest_complete(tmp_path / "nothing") is None


@pytest.mark.parametrize("stage", ["_fsync_tree", "publish_text", "save"])
def test_a_save_that_dies_at_any_stage_leaves_the_last_one_in_force(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizer = policy_and_optimizer()
    checkpoints = Checkpoints(tmp_path, ALONE, keep=2)
    checkpoints.save(policy, optimizer, PolicyVersion(0, 1))

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.dcp if stage == "save" else module, stage, die)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(policy, optimizer, PolicyVersion(0, 2))
    found = latest_complete(tmp_path)
    assert found is not None
    assert str(found.version) == "0.1"
    checkpoints.save(policy, optimizer, PolicyVersion(0, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.1", "0.2"]


def test_kill_9_while_saving_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from test_trainer_checkpoint import *\n"
        "policy, optimizer = policy_and_optimizer(); checkpoints = Checkpoints(Path(sys.argv[1]), ALONE, keep=2)\n"
        "for step in range(1, 10000):\n"
        "    checkpoints.save(policy, optimizer, PolicyVersion(0, step)); print(step, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    finished = [int(child.stdout.readline()) for _ in range(3)]
    time.sleep(0.03)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    finished += [int(line) for line in child.stdout if line.endswith("\n")]
    child.stdout.close()
    found = latest_complete(tmp_path)
    assert found is not None
    assert found.version.step >= finished[-1]
    policy, optimizer = policy_and_optimizer(seed=4)
    Checkpoints(tmp_path, ALONE, keep=2).load(found, policy, optimizer)
    assert torch.equal(worlds.flat(policy), worlds.flat(policy_and_optimizer()[0]))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    policy, optimizer = policy_and_optimizer()
    checkpoints = Checkpoints(tmp_path, ALONE, keep=2)
    saved = checkpoints.save(policy, optimizer, PolicyVersion(0, 1))
    wide = Policy(tiny_model(hidden_size=48), 1.0)
    with pytest.raises(DataError, match="cannot be loaded into this model"):
        checkpoints.load(saved, wide, make_optimizer(wide, config_for(Path("unused")).trainer))


def test_export_is_a_model_directory(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    policy, _ = policy_and_optimizer(seed=2)
    export_hf(policy, source, tmp_path / "out")
    again = Policy.load(tmp_path / "out", "float32", torch.device("cpu"), 1.0)
    assert torch.equal(worlds.flat(policy), worlds.flat(again))
    assert (tmp_path / "out" / "tokenizer.json").exists()
    with pytest.raises(UserError, match="exists"):
        export_hf(policy, source, tmp_path / "out")
