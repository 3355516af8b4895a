"""Real trainer ranks: the scenarios that test_ranks.py runs, each in one or two processes.

Run as ``worlds.py SCENARIO RANK WORLD PORT FD FOLDER``, where rank 0 inherits the listening socket FD; what a scenario
returns is saved as ``FOLDER/SCENARIO-RANK.pt``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from samples import config_for, micro_batches, record_logprobs, save_model, tiny_model, trajectory, write_batch

from hpcrl.config import RunConfig
from hpcrl.errors import DataError, InfraError, RunError, UserError
from hpcrl.protocol import client as calls
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.loop import Trainer
from hpcrl.trainer.model import Policy
from hpcrl.trainer.update import Updater

SAMPLES = 8
TEMPERATURE = 1.0


class GradientRecorder(torch.optim.SGD):
    """Keeps the gradient of each step instead of stepping."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = [parameter.grad.clone() for group in self.param_groups for parameter in group["params"]]
        self.gradient = torch.cat([gradient.reshape(-1) for gradient in found])


def gradient(ranks: Ranks, shares: list[list[int]], max_tokens: int) -> torch.Tensor:
    """Gradient of one minibatch of SAMPLES trajectories, divided over ranks as told."""
    policy = Policy(tiny_model(), TEMPERATURE)
    config = config_for(Path("unused"), optimizer={"max_grad_norm": 1e9})
    samples = [trajectory(i, lengths=(10 + 7 * i, 9) if i % 3 else (12 + i,)) for i in range(SAMPLES)]
    advantages = [(-1.0) ** i * (1 + i / 10) for i in range(SAMPLES)]
    own = shares[ranks.rank]
    batches = micro_batches([samples[i] for i in own], [advantages[i] for i in own], max_tokens)
    optimizer = GradientRecorder(policy.parameters(), lr=1.0)
    total = sum(sample.trained_tokens for sample in samples)
    result = Updater(policy, optimizer, ranks, config.trainer).minibatch(batches, total, first=True)
    assert result.sums["tokens"] == total
    return optimizer.gradient


def gradients(ranks: Ranks, folder: Path) -> list[torch.Tensor]:
    """Uneven division, and a rank with nothing to do."""
    everything = list(range(SAMPLES))
    return [
        gradient(ranks, [everything[:1], everything[1:]], 10_000),
        gradient(ranks, [[], everything], 1),
    ]


def non_finite(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """One rank's recorded logprob makes the ratio infinite: nobody steps; the next minibatch steps again."""
    policy = Policy(tiny_model(), TEMPERATURE)
    before = torch.cat([parameter.detach().clone().reshape(-1) for parameter in policy.parameters()])
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    updater = Updater(policy, optimizer, ranks, config_for(Path("unused")).trainer)
    sample = trajectory(ranks.rank, lengths=(20,))
    good = micro_batches([sample], [1.0], 100)
    (bad,) = micro_batches([sample], [-1.0], 100)
    if ranks.rank == ranks.world - 1:
        bad.behaviour[0] = -1e30
    skipped = updater.minibatch([bad], 10, first=True)
    after = torch.cat([parameter.detach().reshape(-1) for parameter in policy.parameters()])
    stepped = updater.minibatch(good, 10, first=False)
    return {
        "skipped": skipped.skipped,
        "unchanged": torch.equal(before, after),
        "stepped": not stepped.skipped and not torch.equal(after, policy.parameters()[0].new_tensor(0)),
        "weights": flat(policy),
    }


def flat(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in policy.parameters()])


class FakeCoordinator:
    """Answers the trainer from batches made beforehand, and writes down what it was told."""

    def __init__(self, batches: dict[int, m.Batch], start: m.TrainerStarted) -> None:
        self.batches = batches
        self.start = start
        self.told: list[str] = []
        self._asked = 0

    def call(self, endpoint: calls.Endpoint[Any, Any], request: Any) -> Any:
        self.told.append(f"{endpoint.path.rpartition('/')[2]} {getattr(request, 'version', request)}")
        if endpoint is calls.START:
            return self.start
        if endpoint is calls.BATCH:
            self._asked += 1
            if self._asked % 2:
                return m.Batch(version=request.version, groups=None)
            step = PolicyVersion.parse(request.version).step
            return self.batches[step].model_copy(update={"version": request.version})
        if endpoint is calls.EVAL_STATUS:
            return m.EvalResult(version=request.version, done=4, total=4, success=0.5)
        return endpoint.reply()


class FakePublisher:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.published: list[tuple[str, torch.Tensor]] = []
        self.fails_at: str | None = None

    def publish(self, version: PolicyVersion) -> None:
        self.published.append((str(version), flat(self._policy)))

    def check(self) -> None:
        if self.fails_at in [name for name, _ in self.published]:
            raise InfraError("weights_timeout", f"{self.fails_at} was not taken")


def prepare(folder: Path, steps: int = 3) -> dict[int, m.Batch]:
    """A run directory with a start model and one batch per step: 4 groups of 4, sampled by the start model."""
    run = RunDir(folder / "run")
    run.create()
    policy = Policy(tiny_model(3), TEMPERATURE)
    save_model(folder / "model", 3)
    batches = {}
    for step in range(steps):
        samples = [record_logprobs(policy, trajectory(100 * step + i)) for i in range(16)]
        batches[step] = write_batch(run.root, samples, f"0.{step}", f"w{step}")
    return batches


def train(folder: Path, ranks: Ranks, config: RunConfig, batches: dict[int, m.Batch], lineage: int = 0) -> Any:
    """Run a Trainer against a fake coordinator; returns (result, weights, coordinator's log, published)."""
    resumed = PolicyVersion.parse("0.0")
    client = FakeCoordinator(batches, m.TrainerStarted(lineage=lineage, step=0)) if ranks.leads else None
    trainer = Trainer(config, RunDir(folder / "run"), ranks, client)
    if client is not None:
        resumed = trainer.resumed_from or resumed
        client.start = m.TrainerStarted(lineage=lineage, step=resumed.step)
    publisher = FakePublisher(trainer.policy)
    result = trainer.run(publisher)
    return result, flat(trainer.policy), client.told if client else [], publisher.published


def whole_run(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Three steps from prepared batches; the other ranks wait until rank 0 has made them."""
    batches = ranks.decide(lambda: prepare(folder))
    config = config_for(folder / "model", ranks=ranks.world, max_tokens_per_pack=64, checkpoint_every=2)
    result, weights, told, published = train(folder, ranks, config, batches)
    return {"result": result, "weights": weights, "told": told, "published": [name for name, _ in published]}


def failures(ranks: Ranks, folder: Path) -> list[str]:
    """An error on one rank is an error on all, with the cause in each message."""

    def fail(on: int) -> str:
        if ranks.rank == on:
            raise DataError("bad_shard", "shards/x.h5: truncated")
        return "fine"

    def refuse() -> str:
        raise UserError("no such thing")

    texts = []
    for attempt in (lambda: ranks.together(lambda: fail(1)), lambda: ranks.decide(refuse)):
        try:
            attempt()
        except (DataError, RunError, UserError) as error:
            texts.append(str(error))
    return texts


SCENARIOS: dict[str, Callable[[Ranks, Path], Any]] = {
    "gradients": gradients,
    "non_finite": non_finite,
    "whole_run": whole_run,
    "failures": failures,
}


def run_world(names: list[str], world: int, folder: Path) -> dict[str, list[Any]]:
    """Run scenarios on ``world`` real ranks; returns name → what each rank returned."""
    command = [sys.executable, __file__, ",".join(names)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = [str(listener.getsockname()[1]), str(listener.fileno()), str(folder)]
        children = [
            subprocess.Popen(
                [*command, str(rank), str(world), *places],
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[listener.fileno()] if rank == 0 else [],
            )
            for rank in range(world)
        ]
    errors = [child.communicate(timeout=240)[1] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError("\n".join(errors))
    return {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(world)] for name in names}


def main() -> None:
    names, rank, world, port, held, folder = sys.argv[1:7]
    torch.set_num_threads(1)
    listener = socket.socket(fileno=int(held)) if rank == "0" else None
    ranks = Ranks.connect(int(rank), int(world), "127.0.0.1", int(port), timeout_s=200, listener=listener)
    for name in names.split(","):
        torch.save(SCENARIOS[name](ranks, Path(folder)), Path(folder) / f"{name}-{rank}.pt")
    ranks.close()


if __name__ == "__main__":
    main()
