"""The ranks of ``hpcrl bench weights``: trainers first, then one receiver per node, in one MPI world.

    python -m mpi4py -m hpcrl.bench.ranks DIRECTORY        one task per node; DIRECTORY/plan.json is a ``sides.Plan``

Every rank goes through the same phases (sides.py); between two of them all ranks meet, so that nothing of one runs into the next. The
first round warms up connections, pages and the engine, and is not counted. All clocks are the machine's monotonic one: the nodes of a
development cluster are namespaces of one machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from hpcrl.bench.engine import Engine
from hpcrl.bench.sides import Plan, ReceiverSide, SenderSide, Side, Values
from hpcrl.bench.wire import Wire
from hpcrl.weights.mpi import World
from hpcrl.weights.staging import Staging

__all__ = ["main"]


def resident() -> Values:
    """Bytes of this process in memory: its own and those of files and shared memory that it maps."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {"rss": int(fields["VmRSS"].split()[0]) << 10, "shared": int(fields["RssShmem"].split()[0]) << 10}


def rounds(plan: Plan, side: Side, wire: Wire, say: Callable[[str], None]) -> list[Values]:
    """All rounds, the warm-up first; what this rank measured in each."""
    rows = []
    for step in range(plan.repeats + 1):
        row: Values = {}
        phases: list[tuple[str, Callable[[], Values]]] = [
            ("raw", side.raw),
            ("publish", partial(side.publish, step)),
            ("load", partial(side.load, step)),
        ]
        if plan.baselines:
            phases += [("gloo", side.gloo), ("write", side.write), ("read", side.read)]
        for name, phase in phases:
            wire.meet()
            began = time.monotonic()
            row |= phase()
            wire.meet()
            row[name] = time.monotonic() - began
            if name == "publish":
                row |= resident()
        say(f"round {step}: " + ", ".join(f"{name} {row[name]:.3f} s" for name, _ in phases))
        rows.append(row)
    return rows


def main() -> None:
    directory = Path(sys.argv[1])
    plan = Plan(**json.loads((directory / "plan.json").read_text(encoding="utf-8")))
    rank = int(os.environ["SLURM_PROCID"])
    torch.set_num_threads(1)
    world = World.connect("trainer" if rank < plan.senders else "inference", plan.senders + plan.receivers)
    wire = Wire(world, directory / "gloo")

    def say(line: str) -> None:
        if rank == 0:
            print(line, file=sys.stderr, flush=True)

    with ExitStack() as stack:
        if rank < plan.senders:
            side: Side = SenderSide(plan, directory, world, wire)
            idle = resident()
        else:
            nbytes = json.loads((directory / "size.json").read_text(encoding="utf-8"))
            idle = resident()
            staging = stack.enter_context(Staging("bench", f"replica{rank}"))
            receiver = ReceiverSide(plan, directory, world, wire, staging, nbytes)
            stack.callback(receiver.close)
            if plan.engine and rank == plan.senders:
                engine = Engine(Path(plan.model), plan.dtype, plan.threads, directory / "vllm.log")
                receiver.engine = stack.enter_context(engine)
            side = receiver
        rows = rounds(plan, side, wire, say)
        (directory / f"rank-{rank}.json").write_text(json.dumps({"rows": rows, "idle": idle}), encoding="utf-8")
    wire.close()
    world.close()


if __name__ == "__main__":
    main()
