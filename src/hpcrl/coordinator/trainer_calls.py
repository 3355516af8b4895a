"""The trainer's calls: start, published, batch, bad_shard, off_policy, checkpointed, eval, eval_status.

A batch is given out once per version: the same version asked again gets the same batch, also after a restart of either side.
Consumption is provisional; ``start`` from checkpoint step c takes back every consumption at a later step.
A batch or an evaluation that waits for a version which too many replicas refused is refused with their reasons, never waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcrl.coordinator.binding import Binder
from hpcrl.coordinator.consumption import consume, take_back
from hpcrl.coordinator.entities import BOUND, Attempt, EvalRun, Group, Position, Version
from hpcrl.coordinator.ledger import Ledger, Refused
from hpcrl.coordinator.replica_calls import ReplicaCalls
from hpcrl.coordinator.stragglers import split_due
from hpcrl.protocol import messages as m
from hpcrl.protocol.states import State
from hpcrl.protocol.version import PolicyVersion

__all__ = ["TrainerCalls"]

_AGE_EVERY_S = 1.0


class TrainerCalls:
    def __init__(self, ledger: Ledger, replicas: ReplicaCalls, binder: Binder) -> None:
        self._l = ledger
        self._replicas = replicas
        self._binder = binder
        self.last_batch: m.Batch | None = None
        self._aged_at = 0.0

    # ------------------------------------------------------------ start

    def start(self, request: m.TrainerStart, consumed_later: Iterable[Group], now: float) -> m.TrainerStarted:
        """Begin a lineage at the checkpoint's step. ``consumed_later``: the groups consumed at steps after it, from the store."""
        ledger, step = self._l, request.checkpoint_step or 0
        for attempt in [a for a in ledger.attempts.values() if a.state in BOUND]:
            ledger.cancel(attempt, "trainer_restarted", now)
        for replica in ledger.replicas.values():
            self._replicas.lose(replica, "trainer_restarted", now)
        for run in ledger.evals.values():
            self._abandon(run, now)
        for group in consumed_later:
            take_back(ledger, group, now)
        ledger.changes.unconsume(step)
        ledger.set_position(Position(ledger.position.lineage + 1, step))
        ledger.set_floor(min(ledger.floor, step))
        ledger.reckon()
        self.last_batch = None
        self.give_up_spoiled(now)
        ledger.wake_all()
        return m.TrainerStarted(lineage=ledger.position.lineage, step=step)

    def _abandon(self, run: EvalRun, now: float) -> None:
        if not run.active:
            return
        run.cancelled = True
        run.pending.clear()
        for group in [g for g in self._l.groups.values() if g.eval_version == run.version]:
            self._l.close_group(group, "trainer_restarted", now)
        self._l.changes.eval(run)

    # ------------------------------------------------------------ versions

    def published(self, request: m.VersionPublished, now: float) -> m.Empty:
        version = self._own(request.version)
        # Published in the background: the batch for this version may already have been given out, moving the position on.
        if version.step > self._l.position.step:
            raise Refused(f"version {version} is out of turn: training stands at {self._l.position.version}")
        known = Version(version=version, digest=request.digest, nbytes=request.nbytes, published_at=now)
        self._l.versions.setdefault(version, known)
        self._l.changes.version(self._l.versions[version])
        return m.Empty()

    def checkpointed(self, request: m.CheckpointDone, now: float) -> m.Empty:
        version = self._own(request.version)
        self._l.changes.checkpoint(str(version), version.step, now)
        return m.Empty()

    def _own(self, text: str) -> PolicyVersion:
        version = PolicyVersion.parse(text)
        if version.lineage != self._l.position.lineage:
            raise Refused(f"version {text} is of another lineage: training stands at {self._l.position.version}")
        return version

    # ------------------------------------------------------------ batch

    def batch(self, request: m.BatchRequest, now: float) -> m.Batch:
        ledger, version = self._l, self._own(request.version)
        if self.last_batch is not None and self.last_batch.version == request.version:
            return self.last_batch
        if version != ledger.position.version:
            raise Refused(f"no batch for {version}: the next one is for {ledger.position.version}")
        if version.step >= ledger.staleness.steps:
            raise Refused(f"no batch for {version}: the run has {ledger.staleness.steps} steps (trainer.steps)")
        chosen = self._choose(now)
        ledger.asking.note("trainer", f"batch {version}", now, satisfied=chosen is not None)
        if chosen is None:
            why = self._binder.given_up(version)
            if ledger.given_up is not None:
                raise Refused(f"no batch for {version}: {ledger.given_up}")
            if why is not None and not self._binder.can_go_on():
                raise Refused(f"no batch for {version}: older versions are out of the lag bound, and {why}")
            return m.Batch(
                version=request.version,
                groups=None,
                in_flight=ledger.tally.in_flight,
                waiting_groups=len(ledger.complete),
            )
        refs = batch_groups(chosen)
        for group in chosen:
            consume(ledger, group, now)
        ledger.set_position(Position(version.lineage, version.step + 1))
        self.give_up_spoiled(now)
        ledger.wakes |= {"lease", "flip"}
        self.last_batch = m.Batch(version=request.version, groups=refs)
        return self.last_batch

    def _choose(self, now: float) -> list[Group] | None:
        """The oldest complete groups that make a batch; what is too stale or too old is drawn again and counted on the way."""
        ledger = self._l
        wanted, step = ledger.staleness.groups_per_step, ledger.position.step
        if len(ledger.complete) < wanted:
            return None
        if step == ledger.staleness.steps - 1 and any(
            g.head is not None and g.state == "open" for g in ledger.groups.values()
        ):
            return None  # the last batch waits for every straggler: none is left out for having been slow
        chosen = [group for _, group in sorted(ledger.complete.items()) if not self._gave_up(group, now)][:wanted]
        if len(chosen) < wanted:
            return None
        taken = {group.group_id for group in chosen}
        tails = [tail for tail in list(ledger.tails.values()) if tail.head in taken or tail.head not in ledger.groups]
        return chosen + [tail for tail in tails if not self._gave_up(tail, now)]

    def _gave_up(self, group: Group, now: float) -> bool:
        """Whether samples of the group became too old for this batch; they are drawn again."""
        spoiled = self._l.staleness.spoiled(group, self._l.position.step, now)
        if spoiled is not None:
            self._l.redraw(group, spoiled[1], spoiled[0], now)
        return spoiled is not None

    def restore_batch(self, groups: list[Group]) -> None:
        """After a restart: the batch that was given out last, from the groups consumed at the present position."""
        if groups:
            version = PolicyVersion(self._l.position.lineage, self._l.position.step - 1)
            ordered = sorted(groups, key=lambda group: (group.head is not None, group.seq))
            self.last_batch = m.Batch(version=str(version), groups=batch_groups(ordered))

    def give_up_spoiled(self, now: float) -> None:
        """Give up early what can no longer be consumed in time; it is drawn again with newer weights."""
        for group in [group for group in self._l.groups.values() if group.split == "train"]:
            if group.group_id in self._l.groups:  # not closed with its head meanwhile
                self._gave_up(group, now)

    def expire(self, now: float) -> None:
        """Stragglers are split off, and what grew too old by the clock is given up when it happens: its place is wanted."""
        split_due(self._l, now)
        if self._l.config.staleness.max_age_s is not None and now - self._aged_at >= _AGE_EVERY_S:
            self._aged_at = now
            self.give_up_spoiled(now)

    def _give_back(self, version: PolicyVersion, consumed: Iterable[Group], now: float) -> None:
        """The batch for ``version`` is not trained as it was given: its groups wait for the next answer. No-op before it was given.

        Raises Refused for a batch that is not under way.
        """
        ledger = self._l
        if version.step not in (ledger.position.step, ledger.position.step - 1):
            raise Refused(f"no batch for {version} is being trained: training stands at {ledger.position.version}")
        ledger.wakes |= {"batch", "lease", "flip"}
        if version.step == ledger.position.step:
            return
        for group in consumed:
            take_back(ledger, group, now)
        ledger.changes.unconsume(version.step)
        ledger.set_position(Position(*version))
        ledger.reckon()
        self.last_batch = None

    def bad_shard(self, request: m.BadShard, consumed: Iterable[Group], now: float) -> m.Empty:
        """A shard cannot be read: the batch is taken back, the shard's samples fail and are drawn again.

        ``consumed``: the groups of that batch, from the store. Groups of it that the shard has no part in are in the next answer.
        """
        ledger = self._l
        self._give_back(self._own(request.version), consumed, now)
        for attempt in [a for a in ledger.attempts.values() if a.shard == request.shard]:
            if attempt.attempt_id in ledger.attempts:  # its group may have been closed for another one of them
                ledger.fail(attempt, "data", "bad_shard", now)
        return m.Empty()

    def off_policy(self, request: m.OffPolicy, consumed: Iterable[Group], now: float) -> m.Empty:
        """Trajectories deviate too far from the weights of ``version``: the batch is taken back, they are drawn again.

        From here on nothing older than ``version`` is sampled from. What that version itself samples does not deviate from it, so
        that the batch comes about, however small the bound.
        """
        ledger, version = self._l, self._own(request.version)
        self._give_back(version, consumed, now)
        ledger.set_floor(version.step)
        spoiled: dict[str, list[Attempt]] = {}
        for attempt in [ledger.attempts.get(attempt_id) for attempt_id in request.deviations]:
            if attempt is not None and attempt.state is State.ACCEPTED:
                spoiled.setdefault(attempt.rollout.group.group_id, []).append(attempt)
        for group_id, attempts in spoiled.items():
            if group_id in ledger.groups:  # a tail may have been closed with its head
                ledger.redraw(ledger.groups[group_id], attempts, "ratio", now)
        return m.Empty()

    # ------------------------------------------------------------ evaluation

    def eval(self, request: m.EvalRequest, now: float) -> m.Empty:
        """Create the evaluation of a version; asking again for the same one changes nothing."""
        ledger, version = self._l, self._own(request.version)
        if not ledger.eval_tasks:
            raise Refused("no evaluation without held-out tasks: set tasks.eval")
        if version in ledger.evals:
            return m.Empty()
        total = len(ledger.eval_tasks) * request.samples
        run = EvalRun(version=version, samples=request.samples, total=total, created_at=now)
        ledger.evals[version] = run
        ledger.changes.eval(run)
        for index, task in enumerate(ledger.eval_tasks):
            group = Group(
                group_id=f"e{version}-{index}",
                seq=index,
                split="eval",
                task=task,
                created_at=now,
                min_step=version.step,
                eval_version=version,
            )
            ledger.add_group(group, request.samples)
        return m.Empty()

    def eval_status(self, request: m.EvalStatusRequest, now: float) -> m.EvalResult:
        run = self._l.evals.get(PolicyVersion.parse(request.version))
        if run is None:
            raise Refused(f"no evaluation of version {request.version} was asked for")
        why = (self._binder.given_up(run.version) or self._l.given_up) if run.active else None
        if why is not None:
            raise Refused(f"no evaluation: {why}")
        self._l.asking.note("trainer", f"evaluation {run.version}", now, satisfied=not run.active)
        return eval_result(run)


def eval_result(run: EvalRun) -> m.EvalResult:
    return m.EvalResult(
        version=str(run.version), done=run.done, total=run.total, success=run.success, failed=run.failed
    )


def batch_groups(groups: list[Group]) -> list[m.BatchGroup]:
    """Heads in their order, then tails; a tail whose head is among them joins it, another carries its head's rewards."""
    found: dict[str, m.BatchGroup] = {}
    for group in groups:
        name = group.head or group.group_id
        kept = [
            r.attempt for r in group.rollouts if r.attempt is not None and r.state in (State.ACCEPTED, State.CONSUMED)
        ]
        joined = found.get(name)
        found[name] = m.BatchGroup(
            group_id=name,
            task_id=group.task.task_id,
            trajectories=[*(joined.trajectories if joined else []), *map(_reference, kept)],
            baseline=[] if joined else group.baseline,
        )
    return list(found.values())


def _reference(attempt: Attempt) -> m.TrajectoryRef:
    return m.TrajectoryRef(
        attempt_id=attempt.attempt_id,
        rollout_id=attempt.rollout.rollout_id,
        shard=attempt.shard,
        row=attempt.row,
        reward=attempt.reward if attempt.reward is not None else float("nan"),
        oldest_version=str(attempt.oldest),
        tokens=attempt.tokens,
        trained_tokens=attempt.trained_tokens,
    )
