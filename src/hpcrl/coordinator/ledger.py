"""The live state and the few primitive moves everything else is made of. Pure: time is passed in, nothing is read or written.

Each move keeps the counters, the change set for the store, and ``wakes`` (topics whose waiting calls should look again):

    lease      work or a replica to put it on may have appeared        scoring    an artifact waits
    batch      a group is complete                                     flip       a replica may switch
    eval       an evaluation ended                                     scores:ID  worker ID has a score to fetch
    ended:ID   an attempt on replica ID has ended

What has ended leaves memory: consumed and closed groups at once, attempts into a bounded list of the last endings, from which
late reports get their reason.
"""

from __future__ import annotations

import heapq
import json
from collections import OrderedDict

from hpcrl.config import RunConfig
from hpcrl.coordinator import stragglers
from hpcrl.coordinator.changes import Changes
from hpcrl.coordinator.entities import BOUND, Attempt, EvalRun, Group, Position, Replica, Rollout, Task, Version
from hpcrl.coordinator.failing import FailedRow
from hpcrl.coordinator.pinning import Pinning
from hpcrl.coordinator.staleness import Staleness
from hpcrl.coordinator.tally import Tally
from hpcrl.coordinator.tasks import TaskOrder
from hpcrl.coordinator.waits import Asking
from hpcrl.errors import HpcrlError
from hpcrl.protocol.states import State, check_transition
from hpcrl.protocol.version import PolicyVersion

__all__ = ["Ledger", "Refused"]

_ENDED_KEPT = 20_000
_MIN_ACCEPTED = 2


class Refused(HpcrlError):
    """A call that does not fit the present state (answered with 409). The message says what would fit."""


class Ledger:
    """See the module's docstring. Attributes are read by the other parts of this package and written only through methods."""

    def __init__(self, config: RunConfig, train: list[Task], evaluation: list[Task], secret: str) -> None:
        self.config = config
        self.secret = secret
        self.order = TaskOrder(train, config.run.seed)
        self.eval_tasks = evaluation
        self.staleness = Staleness(
            max_policy_lag=config.staleness.max_policy_lag,
            max_age_s=config.staleness.max_age_s,
            groups_per_step=config.trainer.groups_per_step,
            steps=config.trainer.steps,
        )
        self.pinning = Pinning.of(config)
        self.changes = Changes()
        self.tally = Tally(self.changes.counter)
        self.wakes: set[str] = set()
        self.position = Position()
        self.floor = 0
        self.failing = FailedRow(config.coordinator.failed_groups, config.coordinator.failed_after_s)
        self.given_up: str | None = None
        self.finished: str | None = None
        self.next_seq = 0
        self.unconsumed = 0
        self.groups: dict[str, Group] = {}
        self.attempts: dict[str, Attempt] = {}
        self.ended: OrderedDict[str, str] = OrderedDict()
        self.complete: dict[int, Group] = {}
        self.tails: dict[str, Group] = {}
        self.ripe: dict[str, Group] = {}
        self.pending: list[tuple[int, str]] = []
        self.scoring: OrderedDict[str, Attempt] = OrderedDict()
        self.replicas: dict[str, Replica] = {}
        self.versions: dict[PolicyVersion, Version] = {}
        self.evals: dict[PolicyVersion, EvalRun] = {}
        self.leases: list[tuple[float, str]] = []
        self.scoring_leases: list[tuple[float, str]] = []
        self.asking = Asking()
        self._evicted: list[Group] = []

    # ------------------------------------------------------------ whole-run values

    def set_position(self, position: Position) -> None:
        self.position = position
        self.changes.meta("lineage", str(position.lineage))
        self.changes.meta("step", str(position.step))

    def set_floor(self, step: int) -> None:
        """From now on nothing is sampled for training from versions before ``step`` (never beyond the position's)."""
        if step != self.floor:
            self.floor = step
            self.changes.meta("floor", str(step))

    def set_finished(self, reason: str | None) -> None:
        """``reason`` is empty for success; None opens a finished run again."""
        self.finished = reason
        self.changes.meta("finished", json.dumps(reason))
        self.wake_all()

    def set_given_up(self, reason: str | None) -> None:
        """Nothing is sampled any more, and the trainer is told ``reason``; None lets a resumed run try again."""
        self.given_up = reason
        self.failing.clear()
        self.changes.meta("given_up", json.dumps(reason))
        self.changes.meta("failing", self.failing.dump())
        self.wakes |= {"batch", "eval"}

    def wake_all(self) -> None:
        workers = {f"scores:{attempt.worker_id}" for attempt in self.attempts.values()}
        replicas = {f"ended:{replica_id}" for replica_id in self.replicas}
        self.wakes |= {"lease", "scoring", "batch", "flip", "eval"} | workers | replicas

    # ------------------------------------------------------------ groups and rollouts

    def add_group(self, group: Group, size: int) -> None:
        """Enter a new group with ``size`` pending rollouts."""
        self.groups[group.group_id] = group
        for index in range(size):
            rollout = Rollout(rollout_id=f"{group.group_id}-r{index}", group=group, index=index)
            group.rollouts.append(rollout)
            self.tally.add("rollouts", State.PENDING)
            self.changes.rollout(rollout)
            self.enqueue(rollout)
        group.unended = size
        if group.split == "train":
            self.unconsumed += 1
        self.changes.group(group)

    def enqueue(self, rollout: Rollout) -> None:
        """Put a PENDING rollout where the next lease finds it."""
        group = rollout.group
        self.wakes.add("lease")
        if group.eval_version is not None:
            self.evals[group.eval_version].pending.append(rollout)
            return
        group.pending.append(rollout)
        if not group.queued:
            group.queued = True
            heapq.heappush(self.pending, (group.seq, group.group_id))

    def _set_rollout(self, rollout: Rollout, state: State) -> None:
        self.tally.add("rollouts", rollout.state, -1)
        self.tally.add("rollouts", state)
        rollout.state = state

    def _repend(self, rollout: Rollout) -> None:
        self._set_rollout(rollout, State.PENDING)
        self.changes.rollout(rollout)
        self.enqueue(rollout)

    def _end_rollout(self, rollout: Rollout, state: State, now: float) -> None:
        self._set_rollout(rollout, state)
        self.changes.rollout(rollout)
        group = rollout.group
        group.unended -= 1
        if group.eval_version is not None:
            self._count_eval(rollout, group.eval_version)
        if group.unended:
            return
        if group.split == "eval":
            self.evict(group)
            group.state = "done"
        elif len(group.accepted) >= (1 if group.head is not None else min(_MIN_ACCEPTED, len(group.rollouts))):
            self.set_complete(group)
            self.end_failing()
        else:
            self.close_group(group, "group_failed", now)
            self._count_failed(group, now)
        self.changes.group(group)

    def _count_failed(self, group: Group, now: float) -> None:
        if group.head is not None:
            return
        self.failing.add_group(now)
        self.changes.meta("failing", self.failing.dump())
        reason = self.failing.verdict(now)
        if reason is not None and self.given_up is None:
            self.set_given_up(reason)

    def end_failing(self) -> None:
        """A group was completed: those that failed before it no longer count."""
        if self.failing.clear():
            self.changes.meta("failing", self.failing.dump())

    def set_complete(self, group: Group) -> None:
        """All its rollouts have ended and enough are accepted: it waits for a batch (a tail goes with or after its head)."""
        group.state = "complete"
        if group.head is None:
            self.complete[group.seq] = group
        else:
            self.tails[group.head] = group
        self.ripe.pop(group.group_id, None)
        self.wakes.add("batch")

    def _unlist(self, group: Group) -> None:
        if group.split == "eval":
            return  # never listed; its seq, the number of its task, may be that of a training group
        if group.head is None:
            self.complete.pop(group.seq, None)
        else:
            self.tails.pop(group.head, None)
        self.ripe.pop(group.group_id, None)

    def _unend(self, rollout: Rollout) -> None:
        """An ended rollout is about to be pending again: its group, complete or not, waits for it."""
        group = rollout.group
        if not rollout.ended:
            return
        group.unended += 1
        if group.state == "complete":
            group.state = "open"
            self._unlist(group)
            self.changes.group(group)

    def redraw(self, group: Group, spoiled: list[Attempt], reason: str, now: float) -> None:
        """Draw samples that became too old again; a group of which that happened too often is closed and another takes its place.

        So which (task, group, rollout) are trained does not depend on what was slow or crashed, as long as the budget lasts.
        """
        if group.redraws >= self.config.coordinator.redraws:
            self.close_group(group, reason, now)
            return
        group.redraws += 1
        self.tally.add("groups", f"redrawn:{reason}")
        for attempt in spoiled:
            self.cancel(attempt, reason, now)
        self.changes.group(group)
        self.wakes |= {"lease", "flip"}

    def _count_eval(self, rollout: Rollout, version: PolicyVersion) -> None:
        run = self.evals[version]
        run.done += 1
        if rollout.attempt is None or rollout.attempt.reward is None:
            run.failed += 1
        else:
            run.reward_sum += rollout.attempt.reward
        self.changes.eval(run)
        if not run.active:
            self.wakes |= {"eval", "flip"}

    def close_group(self, group: Group, reason: str, now: float) -> None:
        """Give the group up, and its tail: its attempts are cancelled with ``reason``, its place is free for another."""
        tail = stragglers.tail_of(self.groups, group)
        if tail is not None:
            self.close_group(tail, reason, now)
        group.state = "closed"
        group.pending.clear()
        for rollout in group.rollouts:
            if rollout.attempt is not None:
                self._cancel(rollout.attempt, reason, now)
            if rollout.state is not State.INFRA_FAILED:
                self._set_rollout(rollout, State.CANCELLED)
                self.changes.rollout(rollout)
        self.evict(group)
        if group.head is not None:
            self.tally.add("groups", f"tail_closed:{reason}")
        elif group.split == "train":
            self.unconsumed -= 1
            self.tally.add("groups", f"closed:{reason}")
            self.reckon()
        self.changes.group(group)
        self.wakes |= {"lease", "flip"}

    def reckon(self) -> None:
        """Lower ``min_step`` of the unconsumed groups whose places in the line moved forward because one ahead was closed.

        So the first groups of the line can always be bound to the version the next batch is trained at, and a batch always comes
        about. To be called when a group was closed, and when groups were taken back: one ahead of them may have been closed while
        they were in a batch.
        """
        line = sorted(
            (g for g in self.groups.values() if g.split == "train" and g.head is None), key=lambda group: group.seq
        )
        for place, group in enumerate(line):
            step = self.staleness.step_at(self.position.step, place)
            if step < group.min_step:
                group.min_step = step
                self.changes.group(group)

    def evict(self, group: Group) -> None:
        """Forget a group that has ended, whatever the end. What the call still needs of it is there until :meth:`release`."""
        del self.groups[group.group_id]
        self._evicted.append(group)
        self._unlist(group)
        for rollout in group.rollouts:
            if rollout.attempt is not None:
                self._forget(rollout.attempt, rollout.attempt.state.value)

    def release(self) -> None:
        """Take evicted groups apart, once their rows are with the store: as cycles they would wait for a whole garbage collection.

        Such collections stop every call for as long as they take.
        """
        for group in self._evicted:
            for rollout in group.rollouts:
                rollout.attempt = None
            group.rollouts.clear()
            group.pending.clear()
        self._evicted.clear()

    # ------------------------------------------------------------ attempts

    def add_attempt(self, attempt: Attempt) -> None:
        """Enter a fresh LEASED attempt of a PENDING rollout."""
        rollout = attempt.rollout
        rollout.tries += 1
        rollout.attempt = attempt
        self.attempts[attempt.attempt_id] = attempt
        self.replicas[attempt.replica_id].live[attempt.attempt_id] = attempt
        self.tally.add("attempts", State.LEASED)
        self._set_rollout(rollout, State.LEASED)
        self.changes.rollout(rollout)
        self.changes.transition(attempt, State.PENDING, State.LEASED, attempt.leased_at, "")
        heapq.heappush(self.leases, (attempt.lease_until, attempt.attempt_id))

    def move(self, attempt: Attempt, new: State, now: float, cause: str = "") -> None:
        """One transition of an attempt that keeps its rollout (forward moves). Raises IllegalTransition."""
        self._move(attempt, new, now, cause)
        self._set_rollout(attempt.rollout, new)

    def _move(self, attempt: Attempt, new: State, now: float, cause: str) -> None:
        old = attempt.state
        check_transition(old, new)
        attempt.state, attempt.cause, attempt.changed_at = new, cause, now
        self.tally.add("attempts", old, -1)
        self.tally.add("attempts", new)
        if attempt.rollout.group.split == "train":
            self.tally.accepted_unused += (new is State.ACCEPTED) - (old is State.ACCEPTED)
        if old is State.ARTIFACT_READY:
            self.scoring.pop(attempt.attempt_id, None)
        if old in BOUND and new not in BOUND:
            replica = self.replicas[attempt.replica_id]
            replica.live.pop(attempt.attempt_id, None)
            if replica.target is not None and not self.pinning.blocked(replica):
                self.wakes.add("flip")
        self.changes.transition(attempt, old, new, now, cause)

    def accept(self, attempt: Attempt, now: float) -> None:
        """SCORED → ACCEPTED: the rollout has ended well."""
        self._move(attempt, State.ACCEPTED, now, "")
        if attempt.rollout.group.split == "train" and attempt.reward is not None:
            self.tally.recent.append(attempt.reward)
        self._end_rollout(attempt.rollout, State.ACCEPTED, now)
        stragglers.note_ripe(self, attempt.rollout.group, now)

    def fail(self, attempt: Attempt, kind: str, reason: str, now: float, message: str = "") -> None:
        """The attempt yields no score: the rollout is tried again until its budget of retries for this ``kind`` is spent.

        ``kind`` is ``infra`` or ``data``; what the policy broke is scored and never comes here. ``message``: more, for people.
        """
        cause, limits = f"{kind}:{reason}", self.config.coordinator
        self._unend(attempt.rollout)
        self._move(attempt, State.INFRA_FAILED, now, cause)
        self.tally.add("failures", cause)
        if attempt.rollout.group.split == "train":
            self.failing.add_attempt(cause, f"{attempt.attempt_id} on {attempt.worker_id}: {message or reason}")
        self._forget(attempt, reason)
        rollout = attempt.rollout
        rollout.attempt = None
        rollout.infra_failures += kind == "infra"
        rollout.data_failures += kind == "data"
        if rollout.infra_failures > limits.infra_retries or rollout.data_failures > limits.data_retries:
            self._end_rollout(rollout, State.INFRA_FAILED, now)
        else:
            self._repend(rollout)

    def cancel(self, attempt: Attempt, reason: str, now: float) -> None:
        """Give an attempt up without blame: the rollout is pending again and no retry is spent."""
        self._unend(attempt.rollout)
        self._cancel(attempt, reason, now)
        self._repend(attempt.rollout)

    def _cancel(self, attempt: Attempt, reason: str, now: float) -> None:
        self._move(attempt, State.CANCELLED, now, reason)
        self.tally.add("cancelled", reason)
        self._forget(attempt, reason)
        attempt.rollout.attempt = None

    def _forget(self, attempt: Attempt, reason: str) -> None:
        self.attempts.pop(attempt.attempt_id, None)
        self.remember_ended(attempt.attempt_id, reason)
        self.wakes |= {f"scores:{attempt.worker_id}", f"ended:{attempt.replica_id}"}

    def remember_ended(self, attempt_id: str, reason: str) -> None:
        self.ended[attempt_id] = reason
        if len(self.ended) > _ENDED_KEPT:
            self.ended.popitem(last=False)

    def reject(self, attempt_id: str, report: str, reporter: str, reason: str, now: float) -> None:
        """A report that comes too late or from the wrong one: stored and counted, without effect."""
        self.tally.add("rejected", reason)
        self.changes.rejection(attempt_id, report, reporter, reason, now)
