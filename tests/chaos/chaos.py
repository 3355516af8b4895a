"""Kill -9 of everything, at random moments and at every edge of the state machine; then the books must balance.

    python tests/chaos/chaos.py --minutes 10 --seed 1 [--kills 100] [--backend apptainer]

First an unbroken run, then rounds of the same run in which worker, scorer, coordinator and trainer step are killed, paused past their
lease, and sealed shards damaged, until the minutes are over. Each round ends by itself, and then what its last checkpoint was trained
on must be exactly what the unbroken run was trained on: the same (task, group, rollout), each once, each from one attempt, as the
database says; and no sandbox may be left. The model is a script behind the real HTTP interface; the trainer step computes nothing.
With ``--domains`` whole jobs on a real Slurm are broken instead: see domains.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import domains
from fake_replica import FakeReplica, Messages
from stack import GROUP_SIZE, GROUPS_PER_STEP, ROLES, Stack

from hpcrl.coordinator.check import check_database
from hpcrl.coordinator.database import open_for_reading
from hpcrl.protocol.keys import AttemptKey, proxy_secret
from hpcrl.protocol.states import State

EDGES = (State.LEASED, State.RUNNING, State.ARTIFACT_READY, State.SCORED, State.ACCEPTED, State.CONSUMED)
ROUND_S = 900.0
"""Longest round: past it, something waits for ever."""


def agent(key: AttemptKey, messages: Messages) -> str:
    """Every other rollout repairs the file; all of them look first."""
    if len(messages) == 1:
        return "```bash\ncat answer\n```"
    right = int(key.attempt_id.rpartition("-r")[2].partition("-")[0]) % 2 == 0
    return "```bash\necho right > answer\n```" if right else "I give up."


class Chaos:
    """What is done to one stack after the other. ``done`` counts it by kind; ``wanted`` kills are enough once every edge was hit."""

    def __init__(self, chance: random.Random, wanted: int | None) -> None:
        self.chance = chance
        self.wanted = wanted
        self.done: Counter[str] = Counter()
        self.paused: dict[str, float] = {}
        self.edges = [(role, state) for role in ROLES for state in EDGES]
        chance.shuffle(self.edges)
        self.turn = 0

    def turn_to(self, stack: Stack) -> None:
        self.stack = stack
        self.paused.clear()

    def act(self) -> None:
        """One blow: mostly a kill at the next edge of the matrix or at a random moment; now and then a pause or a damaged shard."""
        kind = self.chance.random()
        if kind < 0.55:
            role, state = self.edges[self.turn % len(self.edges)]
            if self.wait_for(state) and self.stack.kill(role):
                self.turn += 1
                self.done[f"kill {role.partition('-')[0]} at {state.value}"] += 1
        elif kind < 0.9:
            role = self.chance.choice(ROLES)
            if self.stack.kill(role):
                self.done[f"kill {role.partition('-')[0]} at random"] += 1
        elif kind < 0.95:
            self.pause(self.chance.choice(("worker-0", "worker-1", "scorer-0")))
        elif self.stack.damage(self.chance):
            self.done["damaged shards"] += 1
        self.wake()

    def wait_for(self, state: State) -> bool:
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            status = self.stack.status()
            if status is not None and status.attempts.get(state):
                return True
            self.stack.watch()
            time.sleep(0.02)
        return False

    def pause(self, role: str) -> None:
        """Stop a process past its lease: what it reports afterwards comes too late."""
        process = self.stack.processes[role]
        if process.poll() is None and role not in self.paused:
            process.send_signal(signal.SIGSTOP)
            self.paused[role] = time.monotonic() + 1.5 * self.stack.lease_s
            self.done["pauses past the lease"] += 1

    def wake(self, everybody: bool = False) -> None:
        for role, until in list(self.paused.items()):
            if everybody or time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    self.stack.processes[role].send_signal(signal.SIGCONT)
                del self.paused[role]

    @property
    def kills(self) -> int:
        return sum(count for kind, count in self.done.items() if kind.startswith("kill"))

    @property
    def missed(self) -> list[str]:
        """Edges at which nothing was killed yet."""
        return [f"{role} at {state.value}" for role, state in self.edges[self.turn :]]

    @property
    def enough(self) -> bool:
        return self.wanted is not None and self.kills >= self.wanted and not self.missed


def play(stack: Stack, chaos: Chaos | None, until: float) -> list[str]:
    """One run to its end; chaos, if any, stops at ``until``. Returns what was wrong so far."""
    problems: list[str] = []
    with FakeReplica(proxy_secret(stack.run.secret()), "r0", agent) as replica:
        stack.replica_url = replica.base_url
        stack.start()
        if chaos is not None:
            chaos.turn_to(stack)
        deadline = time.monotonic() + ROUND_S
        while not stack.done:
            if time.monotonic() > deadline:
                problems.append(f"no end after {ROUND_S:.0f} s: {stack.status()}")
                break
            if chaos is not None and time.monotonic() < until and not chaos.enough:
                time.sleep(chaos.chance.uniform(0.0, 1.2))
                chaos.act()
            elif chaos is not None:
                chaos.wake(everybody=True)
            stack.watch()
            time.sleep(0.05)
        if chaos is not None:
            chaos.wake(everybody=True)
        left = stack.close()
    return problems + [f"left behind: {name}" for name in left] + stack.deaths


def balance(stack: Stack) -> tuple[Counter[tuple[str, ...]], list[str]]:
    """The multiset of (task, group, rollout) that was trained, and what does not fit the database."""
    saved = json.loads((stack.run.root / "checkpoint.json").read_text())
    trained = Counter(tuple(entry[:3]) for entry in saved["trained"])
    problems = [f"trained {count} times: {entry}" for entry, count in trained.items() if count > 1]
    connection = open_for_reading(stack.run.database)
    problems += check_database(connection)
    told = {tuple(row) for row in connection.execute("SELECT rollout_id, attempt_id FROM consumptions")}
    connection.close()
    if told != {tuple(entry[2:]) for entry in saved["trained"]}:
        problems.append("the database's consumptions are not what the last checkpoint was trained on")
    return trained, problems


@dataclass(frozen=True)
class Verdict:
    """What all rounds together showed."""

    rounds: int
    trajectories: int
    done: Counter[str]
    missed: list[str]
    problems: list[str]

    def say(self) -> None:
        for kind, count in sorted(self.done.items()):
            print(f"{count:5} {kind}")
        print(f"edges never hit: {', '.join(self.missed) or 'none'}")
        kills = sum(count for kind, count in self.done.items() if kind.startswith("kill"))
        print(f"{self.rounds} rounds, {kills} SIGKILLs, {len(self.problems)} problems")
        if not self.problems:
            print(
                f"each round trained the {self.trajectories} (task, group, rollout) of the unbroken run; "
                "0 duplicates, 0 mixed attempts, 0 orphan sandboxes"
            )
        for line in self.problems:
            print(f"PROBLEM {line}")


def campaign(given: argparse.Namespace, root: Path) -> Verdict:
    """The unbroken run, then rounds of chaos until minutes are over, or kills and edges are enough."""
    options = {"backend": given.backend, "lease_s": given.lease}
    until = time.monotonic() + 60 * given.minutes
    stack = Stack(root / "unbroken", given.steps, **options)
    problems = play(stack, None, until)
    unbroken, more = balance(stack)
    problems += more
    print(f"unbroken run: {unbroken.total()} trajectories trained", flush=True)
    if unbroken.total() != given.steps * GROUPS_PER_STEP * GROUP_SIZE:
        problems.append(f"the unbroken run trained {unbroken.total()} trajectories")
    chaos, number = Chaos(random.Random(given.seed), given.kills), 0
    while not problems and not chaos.enough and time.monotonic() < until:
        number += 1
        stack = Stack(root / f"round-{number}", given.steps, **options)
        before = chaos.kills
        problems = play(stack, chaos, until)
        trained, more = balance(stack)
        problems += more
        if trained != unbroken:
            missing, extra = list((unbroken - trained).items())[:5], list((trained - unbroken).items())[:5]
            problems.append(f"missing {missing}, too much {extra}")
        print(f"round {number}: {chaos.kills - before} kills, {trained.total()} trajectories trained", flush=True)
    return Verdict(number, unbroken.total(), chaos.done, chaos.missed, problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, help="stop sooner: after so many kills, when every edge was hit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="training steps of each run")
    parser.add_argument("--lease", type=float, default=6.0, help="seconds; more on a machine that others use")
    parser.add_argument("--backend", choices=("process", "apptainer"), default="process")
    parser.add_argument("--domains", help="break whole jobs on a development cluster: all, or domains (see domains.py)")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="hpcrl-chaos-", dir="/var/tmp" if given.domains else None))
    if given.domains:
        problems = domains.main(given.domains, given.seed, given.kills, given.minutes, root)
        if not problems:
            shutil.rmtree(root)
        return 1 if problems else 0
    verdict = campaign(given, root)
    verdict.say()
    if verdict.problems:
        print(f"the run directories are kept in {root} (seed {given.seed})")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
