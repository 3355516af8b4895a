"""The inference side's calls: register, flip, ready, refused; and ended, by which it learns what it need not generate any more.

    register → UP (serves nothing) ─flip granted→ FLIPPING ─ready→ UP (serves v) ─flip asked→ DRAINING ─drained→ FLIPPING → …
    several slots:  UP (serves v) ─flip asked, a slot free→ UP (target w) ─ready→ UP (serves w, and v to the end) → …

A flip is granted when no attempt that ``pinning.py`` keeps with the old version still talks to it. While it drains it gets no new
ones; with ``pin: turn`` and ``token`` that takes no time, with several slots nothing drains. Replicas roll: one
may start to drain only while another still serves and at most half of them drain at once, so that work that can be admitted
finds a place. Where nothing could be admitted on the replica anyway (``sync`` mode, or the staleness bound is reached),
it need not wait for the others. A replica with an unfinished evaluation of the version it serves does not leave that version.
"""

from __future__ import annotations

from hpcrl.coordinator.binding import Binder
from hpcrl.coordinator.entities import Replica, ReplicaState, Version
from hpcrl.coordinator.ledger import Ledger, Refused
from hpcrl.protocol import messages as m
from hpcrl.protocol.version import PolicyVersion

__all__ = ["ReplicaCalls"]


class ReplicaCalls:
    def __init__(self, ledger: Ledger, binder: Binder) -> None:
        self._l = ledger
        self._binder = binder

    def register(self, request: m.ReplicaRegister, now: float) -> m.Empty:
        """A replica (re)starts and serves nothing yet: attempts bound to an earlier life of it are lost."""
        old = self._l.replicas.get(request.replica_id)
        if old is not None:
            self.lose(old, "replica_lost", now)
        replica = Replica(replica_id=request.replica_id, base_url=request.base_url, node=request.node)
        self._l.replicas[request.replica_id] = replica
        self._l.changes.replica(replica)
        self._l.wakes.add("flip")
        return m.Empty()

    def lose(self, replica: Replica, reason: str, now: float) -> None:
        """Fail what is bound to the replica; it serves nothing until READY."""
        for attempt in list(replica.live.values()):
            self._l.fail(attempt, "infra", reason, now)
        replica.version, replica.state, replica.target = None, ReplicaState.UP, None
        replica.kv_use, replica.kv_attempts = 0.0, 0
        self._l.changes.replica(replica)

    def _replica(self, replica_id: str) -> Replica:
        replica = self._l.replicas.get(replica_id)
        if replica is None:
            raise Refused(f"replica {replica_id!r} is not registered; call register first")
        return replica

    def _version(self, text: str) -> Version:
        version = self._l.versions.get(PolicyVersion.parse(text))
        if version is None or version.version.lineage != self._l.position.lineage:
            known = max(self._l.versions, default=None)
            raise Refused(f"version {text} was not published in this lineage; the last published one is {known}")
        return version

    # ------------------------------------------------------------ flip

    def flip(self, request: m.FlipRequest, now: float) -> m.FlipGrant:
        replica, version = self._replica(request.replica_id), self._version(request.version).version
        if replica.version == version and replica.state is ReplicaState.UP:
            return self._granted(replica, True)
        if replica.target != version:
            replica.target, replica.target_since, replica.draining_since = version, now, 0.0
            self._l.changes.replica(replica)
        if self._l.pinning.standby:
            return self._granted(replica, self._evaluated(replica) and not self._l.pinning.blocked(replica))
        if replica.state is ReplicaState.UP and self._may_leave(replica):
            replica.state, replica.draining_since = ReplicaState.DRAINING, now
            self._l.changes.replica(replica)
            self._l.wakes.add("lease")
        if replica.state is ReplicaState.DRAINING and not self._l.pinning.blocked(replica):
            replica.state = ReplicaState.FLIPPING
            self._l.changes.replica(replica)
        return self._granted(replica, replica.state is ReplicaState.FLIPPING)

    def _granted(self, replica: Replica, granted: bool) -> m.FlipGrant:
        return m.FlipGrant(granted=granted, keep=[str(version) for version in self._l.pinning.needed(replica)])

    def _may_leave(self, replica: Replica) -> bool:
        """Whether the replica may stop taking attempts for the version it serves."""
        if replica.version is None:
            return True
        if not self._evaluated(replica):
            return False
        others = [other for other in self._l.replicas.values() if other is not replica and other.version is not None]
        if not others or not self._binder.has_work_for(replica.version.step):
            return True
        away = sum(not other.serving for other in others)
        return away < len(others) and away < max(1, (len(others) + 1) // 2)

    def _evaluated(self, replica: Replica) -> bool:
        """Whether no evaluation of the version that the replica gives to new attempts is under way."""
        run = None if replica.version is None else self._l.evals.get(replica.version)
        return run is None or not run.active

    def expire(self, now: float) -> None:
        """Cancel what has kept a replica from changing versions for too long; let waiting replicas ask again."""
        limit, standby = self._l.config.weights.drain_timeout_s, self._l.pinning.standby
        for replica in self._l.replicas.values():
            waits = replica.target is not None if standby else replica.state is ReplicaState.DRAINING
            since = replica.target_since if standby else replica.draining_since
            if waits and now - since > limit:
                for attempt in self._l.pinning.blockers(replica):
                    self._l.cancel(attempt, "drain_timeout", now)
            if replica.target is not None and replica.state is not ReplicaState.FLIPPING:
                self._l.wakes.add("flip")

    # ------------------------------------------------------------ generations

    def load(self, request: m.ReplicaLoad, now: float) -> m.Empty:
        """What the next attempts are bound by (``binding.py``)."""
        replica = self._replica(request.replica_id)
        replica.kv_use, replica.kv_attempts = request.kv_use, len(replica.live)
        return m.Empty()

    def ended(self, request: m.EndedRequest, now: float) -> m.EndedReply:
        """Which of the attempts that generate on the replica are not wanted: lease expired, closed, stale, cancelled."""
        gone = {name for name in request.attempt_ids if name not in self._l.attempts}
        return m.EndedReply(ended={name: self._l.ended.get(name, "unknown_attempt") for name in sorted(gone)})

    # ------------------------------------------------------------ outcome

    def ready(self, request: m.ReplicaReady, now: float) -> m.Empty:
        replica, version = self._replica(request.replica_id), self._version(request.version)
        # What was bound to another version and pinned to it cannot be served any more (its engine failed and holds an older one).
        for attempt in [a for a in replica.live.values() if not self._l.pinning.outlives(a, version.version)]:
            self._l.fail(attempt, "infra", "replica_flipped", now)
        replica.version, replica.state, replica.target = version.version, ReplicaState.UP, None
        version.ready[replica.replica_id] = request.digest
        version.refused.pop(replica.replica_id, None)
        version.transfer_s = max(version.transfer_s, request.transfer_s)
        version.pause_s = max(version.pause_s, request.pause_s)
        self._complete(version, now)
        self._l.changes.replica(replica)
        self._l.wakes |= {"lease", "flip"}
        return m.Empty()

    def refused(self, request: m.ReplicaRefused, now: float) -> m.Empty:
        """The version did not verify or load. Before the flip was granted the old one goes on; after it nothing is served until READY.

        A replica whose engine still serves the old version says READY for that one first.
        """
        replica, version = self._replica(request.replica_id), self._version(request.version)
        version.refused[replica.replica_id] = request.reason
        if replica.target == version.version:
            if replica.state is ReplicaState.FLIPPING:
                self.lose(replica, "replica_lost", now)
            replica.state, replica.target = ReplicaState.UP, None
        self._complete(version, now)
        self._l.changes.replica(replica)
        self._l.wakes |= {
            "lease",
            "flip",
            "batch",
            "eval",
        }  # a trainer must not wait for a version that nobody will serve
        return m.Empty()

    def _complete(self, version: Version, now: float) -> None:
        answered = version.ready.keys() | version.refused.keys()
        if version.publish_s is None and version.ready and answered >= self._l.replicas.keys():
            version.publish_s = now - version.published_at
        self._l.changes.version(version)
