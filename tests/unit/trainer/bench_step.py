"""CPU and wall time of one training step at the quickstart's size: ``python bench_step.py [RANKS] [MAX_TOKENS_PER_PACK]``."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import samples
import torch

from hpcrl.protocol.messages import Batch
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.model import Policy
from hpcrl.trainer.step import TrainingStep
from hpcrl.trainer.update import Updater, make_optimizer
from hpcrl.trajectory import ShardCache

SIZES = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.06,
}


def make_batch(folder: Path) -> Batch:
    made = [samples.trajectory(i, lengths=(200 + i % 36,), reward=float(i % 2), group_size=8) for i in range(128)]
    return samples.write_batch(folder, made, "0.0")


def measure(rank: int, world: int, port: int, folder: Path, max_tokens: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.connect(rank, world, "127.0.0.1", port)
    policy = Policy(samples.tiny_model(**SIZES), 1.0)
    config = samples.config_for(Path("unused"), minibatches=2, max_tokens_per_pack=max_tokens)
    batch = ranks.decide(lambda: make_batch(folder))
    updater = Updater(policy, make_optimizer(policy, config.trainer), ranks, config.trainer)
    step = TrainingStep(config, updater, ranks, ShardCache(folder))
    for _ in range(4):
        wall, cpu = time.monotonic(), time.process_time()
        values = step.run(batch)
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        print(f"rank {rank}: wall {wall:.2f} s, CPU {cpu:.2f} s, fill {values['pack_fill']:.2f}", flush=True)
    ranks.close()


def main() -> None:
    if len(sys.argv) == 6:
        rank, world, port, folder, max_tokens = sys.argv[1:]
        measure(int(rank), int(world), int(port), Path(folder), int(max_tokens))
        return
    world, max_tokens = (sys.argv[1:] + ["2", "8192"][len(sys.argv) - 1 :])[:2]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__]
        children = [
            subprocess.Popen([*command, str(rank), world, port, folder, max_tokens]) for rank in range(int(world))
        ]
        sys.exit(max(child.wait() for child in children))


if __name__ == "__main__":
    main()
