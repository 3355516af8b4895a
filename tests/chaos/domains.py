"""Random faults in all failure domains, on real het jobs; then the books must balance.

    python tests/chaos/chaos.py --domains all --minutes 20 --seed 1 [--kills 60]

An unbroken run, then runs of the same configuration that are broken again and again, each fault after a trained step since the last:
a process of any role, the engine, the launcher, a node; preemption, requeue, the signal before the time limit; scancel of one
component or of all, after which the run is resumed. Each run must end with success, and with exactly the unbroken run's multiset of
(task, group, rollout) trained, each once; and nothing may be left on any node. The engine is `hpcrl.bench.stand_in`.
"""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from hpcrl.bench.life_jobs import LifeCluster, LifeJob
from hpcrl.coordinator.check import check_database
from hpcrl.coordinator.database import open_for_reading
from hpcrl.errors import RunError

__all__ = ["FAULTS", "Campaign"]

STEPS = 10
_LEFT_S = 30.0
_NODE_BACK_S = 10
"""A job that starts again within a second of its lost node's return can crash slurmctld (22.05.8: in build_job_info_resp, at the first
srun)."""


def _kill(*marks: str) -> Callable[[LifeJob, random.Random], LifeJob]:
    def fault(job: LifeJob, _: random.Random) -> LifeJob:
        job.kill(*marks)
        return job

    return fault


def _engine(job: LifeJob, _: random.Random) -> LifeJob:
    job.kill_engine()
    return job


def _launcher(job: LifeJob, _: random.Random) -> LifeJob:
    job.kill("hpcrl.launch.batch")
    return _resumed(job)


def _node(component: int) -> Callable[[LifeJob, random.Random], LifeJob]:
    """Power cut. Slurm or the launcher puts the job back into the queue; the node is repaired meanwhile."""

    def fault(job: LifeJob, _: random.Random) -> LifeJob:
        job.cluster.cluster.node(job.nodes()[component]).halt()
        job.until(lambda: job.state() in ("PENDING", "FAILED", "NODE_FAIL"), "requeue", timeout_s=180, dies=True)
        job.cluster.up()
        if job.over():
            return _resumed(job)
        job.soon_again(after_s=_NODE_BACK_S)
        return job

    return fault


def _preemption(job: LifeJob, chance: random.Random) -> LifeJob:
    node = job.nodes()[chance.randrange(3)]
    options = ["--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null"]
    job.cluster.slurm("sbatch", *options, "--wrap=sleep 3")
    job.soon_again()
    return job


def _requeue(job: LifeJob, _: random.Random) -> LifeJob:
    job.cluster.slurm("scontrol", "requeue", job.job_id)
    job.soon_again()
    return job


def _time_limit(job: LifeJob, _: random.Random) -> LifeJob:
    job.cluster.slurm("scancel", "--batch", "--signal=USR1", job.job_id)
    job.soon_again()
    return job


def _scancel(suffix: str) -> Callable[[LifeJob, random.Random], LifeJob]:
    def fault(job: LifeJob, _: random.Random) -> LifeJob:
        job.cluster.slurm("scancel", f"{job.job_id}{suffix}")
        return _resumed(job)

    return fault


def _resumed(job: LifeJob) -> LifeJob:
    job.until(job.over, "end of the job", timeout_s=90, dies=True)
    if left := _left(job):
        raise RunError(f"left behind: {left}")
    return job.cluster.resume(job)


FAULTS: dict[str, Callable[[LifeJob, random.Random], LifeJob]] = {
    "engine": _engine,
    "trainer rank": _kill("hpcrl.run.trainer"),
    "inference rank": _kill("hpcrl.run.inference"),
    "worker": _kill("hpcrl.run.worker"),
    "scorer": _kill("hpcrl.run.scorer"),
    "coordinator": _kill("hpcrl.run.coordinator"),
    "launcher": _launcher,
    "trainer node": _node(0),
    "inference node": _node(1),
    "sandbox node": _node(2),
    "preemption": _preemption,
    "scontrol requeue": _requeue,
    "time limit": _time_limit,
    "scancel of inference": _scancel("+1"),
    "scancel of sandboxes": _scancel("+2"),
    "scancel of all": _scancel(""),
}
"""Domain → fault; it returns the job that goes on with the run."""


class Campaign:
    """``wanted`` faults, or as many as fit into ``minutes``; ``domains``: those of FAULTS to choose among."""

    def __init__(self, cluster: LifeCluster, domains: list[str], seed: int, wanted: int, minutes: float) -> None:
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self.runs = 0
        self._cluster = cluster
        self._chance = random.Random(seed)
        self._domains = domains
        self._turn: list[str] = []
        self._wanted = wanted
        self._until = time.monotonic() + 60 * minutes

    def go(self) -> None:
        self._cluster.up()
        job = self._cluster.submit(STEPS, stand_in=True)
        job.until(job.over, "end of the unbroken run", timeout_s=600, dies=True)
        unbroken = self._balance(job)
        print(f"unbroken run: {unbroken.total()} trajectories trained", flush=True)
        while self._more and not self.problems:
            self._broken_run(unbroken)

    @property
    def _more(self) -> bool:
        return self.done.total() < self._wanted and time.monotonic() < self._until

    def _next(self) -> str:
        """All domains in random order, then all again."""
        if not self._turn:
            self._turn = self._chance.sample(self._domains, len(self._domains))
        return self._turn.pop()

    def _broken_run(self, unbroken: Counter[tuple[str, ...]]) -> None:
        self.runs += 1
        job = self._cluster.submit(STEPS, "slurm.requeues=1000", "run.restarts=1000", stand_in=True)
        name, faults = "", 0
        try:
            while self._more:
                _await_step(job)
                time.sleep(self._chance.uniform(0.0, 2.0))
                if job.over() or job.end():
                    break
                name = self._next()
                began = time.monotonic()
                job = FAULTS[name](job, self._chance)
                faults += 1
                self.done[name] += 1
                print(f"  {name}: {time.monotonic() - began:.1f} s", flush=True)
            job.until(job.over, "end", timeout_s=400, dies=True)
        except RunError as error:
            self.problems.append(f"after {name}: {error} ({job.run.root})")
            return
        trained = self._balance(job)
        print(f"run {self.runs}: {faults} faults, {trained.total()} trajectories trained", flush=True)
        if trained != unbroken:
            missing, extra = list((unbroken - trained).items())[:5], list((trained - unbroken).items())[:5]
            self.problems.append(f"{job.run.root}: missing {missing}, too much {extra}")

    def _balance(self, job: LifeJob) -> Counter[tuple[str, ...]]:
        """What the run's database says was trained; what does not fit is a problem."""
        if job.end().get("state") != "success":
            self.problems.append(f"{job.run.root} ended: {job.end()}; {job.tail()}")
        with closing(open_for_reading(job.run.database)) as database:
            self.problems += check_database(database)
            rows = database.execute(
                "SELECT g.task_id, a.group_id, c.rollout_id, c.times FROM consumptions c JOIN attempts a USING (attempt_id) "
                "JOIN groups g USING (group_id)"
            ).fetchall()
        self.problems += [f"trained {times} times: {rollout}" for *_, rollout, times in rows if times != 1]
        if left := _left(job):
            self.problems.append(f"left behind by {job.run.root}: {left}")
        return Counter(tuple(row[:3]) for row in rows)

    def say(self) -> None:
        for name, count in sorted(self.done.items()):
            print(f"{count:5} {name}")
        print(f"{self.runs} runs, {self.done.total()} faults, {len(self.problems)} problems")
        for line in self.problems:
            print(f"PROBLEM {line}")


def _await_step(job: LifeJob) -> None:
    goal = job.steps() + 1
    job.until(lambda: job.steps() >= goal or job.over(), "step", dies=True)


def _left(job: LifeJob) -> list[str]:
    deadline = time.monotonic() + _LEFT_S
    while (left := job.cluster.left(job.run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def main(domains: str, seed: int, wanted: int | None, minutes: float, root: Path) -> list[str]:
    """The campaign on a cluster of its own; what was wrong. SIGTERM ends it like an error, so that the cluster goes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = list(FAULTS) if domains == "all" else domains.split(",")
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise SystemExit(f"--domains {unknown[0]}: all, or some of {', '.join(FAULTS)}, separated by commas")
    root.chmod(0o711)  # run by root, sandboxes are another user's
    cluster = LifeCluster("hpcrl-chaos", root)
    campaign = Campaign(cluster, names, seed, 10_000 if wanted is None else wanted, minutes)
    try:
        campaign.go()
    finally:
        campaign.say()
        if campaign.problems:
            _keep_logs(cluster, root)
        cluster.cluster.down()
    return campaign.problems


def _keep_logs(cluster: LifeCluster, root: Path) -> None:
    """Slurm's word on what went wrong, which goes with the cluster."""
    directory = cluster.cluster.directory
    (root / "slurm").mkdir()
    for log in (*directory.glob("slurmctld/slurmctld.*"), *directory.glob("nodes/*/slurmd.log")):
        if log.is_file():
            shutil.copy(log, root / "slurm" / f"{log.parent.name}-{log.name}")
