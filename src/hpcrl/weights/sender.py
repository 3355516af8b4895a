"""Publishing from the trainer: every trainer rank has a :class:`Publisher`, whose thread makes all MPI calls of that process.

    training thread      publish_async(v): wait for the previous publish ─ copy own byte range ─ hand over ─ train on
    publisher thread     digests of own chunks
       trainer 0         ◀─ digests ─ other trainers;  writes manifests/L.S.json;  ─ publish ─▶ replicas
                         ◀─ ready | refused ─ replicas (a replica that still flips the previous version answers later)
                         ─ go(receivers) ─▶ trainers, receivers         one wave for all that are ready by then
       all trainers      send own chunks to the wave's receivers
       trainer 0         ◀─ verified | refused ─ receivers;  the next wave while replicas are left;  ─ done ─▶ trainers

Chunks flow only to receivers that said they have room and fit, so a refusal never leaves a message unmatched. A replica that refuses
after "verified" (its flip failed) says so later; that is kept in :attr:`Publisher.refusals`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from hpcrl.errors import HpcrlError, InfraError, RunError
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import chunk_digest
from hpcrl.weights.manifest import Chunk, Manifest, cut
from hpcrl.weights.mpi import Pacer, World
from hpcrl.weights.plan import choose, legs_of, stripes
from hpcrl.weights.snapshot import Snapshot
from hpcrl.weights.transfer import Transfer

__all__ = ["PublishResult", "Publisher"]

log = logging.getLogger(__name__)

_SETTLE_S = 0.02
"""How long a wave waits for more replicas once the first is ready."""
_IDLE_S = 0.2
"""How often trainer 0 looks for late refusals between publishes."""


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What became of one version. Ranks are those of the world; ``refused`` maps them to reasons. Durations in seconds.

    ``transfer_s`` is the time chunks were moving, ``total_s`` runs from the hand-over to the last replica's answer.
    """

    version: str
    digest: str
    nbytes: int
    verified: tuple[int, ...]
    refused: dict[int, str]
    capture_s: float
    digest_s: float
    transfer_s: float
    total_s: float


@dataclass(slots=True)
class _Job:
    version: PolicyVersion
    capture_s: float
    future: Future[PublishResult]
    started: float = field(default_factory=time.monotonic)
    digest_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(slots=True)
class _Round:
    """Trainer 0's books for the version being published; ``silent`` are replicas that have not said ready or refused."""

    version: str
    silent: set[int]
    ready: set[int] = field(default_factory=set)
    receiving: set[int] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)


class Publisher:
    """One per trainer rank; all ranks publish the same versions in the same order.

    ``chunk_bytes`` is the largest message, ``window`` the messages under way per rank, ``parent`` the version published before this
    process began. ``on_manifest`` is called on trainer 0 before any replica hears of the version (tell the coordinator there).
    ``timeout_s`` bounds each wait for others, a replica's drain included.
    """

    def __init__(
        self,
        world: World,
        run: RunDir,
        snapshot: Snapshot,
        *,
        chunk_bytes: int,
        window: int,
        tokenizer_digest: str,
        model_config_digest: str,
        parent: str | None = None,
        algorithm: Literal["star", "chain", "auto"] = "auto",
        on_manifest: Callable[[Manifest], None] | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        self._world = world
        self._run = run
        self._snapshot = snapshot
        self._window = window
        self._digests = (tokenizer_digest, model_config_digest)
        self._parent = parent
        self._algorithm = algorithm
        self._on_manifest = on_manifest
        self._timeout_s = timeout_s
        self._chunks = cut(snapshot.layout.nbytes, chunk_bytes)
        self._shares = stripes(len(self._chunks), world.trainers)
        self._own = next(share for share in self._shares if share.sender == world.rank)
        self._leads = world.rank == world.trainers[0]
        self._round = _Round("", set())
        self._gathered: dict[tuple[str, int], list[str]] = {}
        self._orders: list[dict[str, Any]] = []
        self._pending: Future[PublishResult] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.refusals: dict[int, tuple[str, str]] = {}
        """Rank of a replica → (version, reason) of its last refusal (trainer 0 only)."""

    # ------------------------------------------------------------ the training thread

    def publish_async(self, version: PolicyVersion) -> Future[PublishResult]:
        """Copy the weights as ``version`` and send them in the background. Waits for the previous publish, and raises its error."""
        self.wait()
        started = time.monotonic()
        self._snapshot.capture(*self._own_range())
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="weights-publisher", daemon=True)
            self._thread.start()
        self._pending = Future()
        self._jobs.put(_Job(version, time.monotonic() - started, self._pending))
        return self._pending

    def publish(self, version: PolicyVersion) -> None:
        """:meth:`publish_async` without the future; an error shows at the next publish, :meth:`wait` or :meth:`shutdown`."""
        self.publish_async(version)

    def wait(self) -> PublishResult | None:
        """Wait for the publish under way and return its result; None when there was none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def shutdown(self) -> None:
        """Finish the publish under way, tell the replicas to stop (trainer 0), and end the thread."""
        try:
            self.wait()
        finally:
            if self._thread is None:
                self._say_goodbye()
            else:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None

    def _own_range(self) -> tuple[int, int]:
        if not self._own.count:
            return (0, 0)
        last = self._chunks[self._own.first + self._own.count - 1]
        return (self._chunks[self._own.first][0], last[0] + last[1])

    # ------------------------------------------------------------ the publisher thread

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S if self._leads else None)
            except queue.Empty:
                self._take_late_messages()
                continue
            if job is None:
                self._say_goodbye()
                return
            try:
                job.future.set_result(self._lead(job) if self._leads else self._follow(job))
            except Exception as error:  # noqa: BLE001 - the one recording point: the training thread raises it
                if self._leads:
                    self._tell_trainers({"type": "done", "version": str(job.version), "error": str(error)})
                job.future.set_exception(error)

    def _take_late_messages(self) -> None:
        try:
            while self._pump():
                pass
        except HpcrlError:
            log.exception("between two publishes")

    def _say_goodbye(self) -> None:
        if self._leads:
            for receiver in self._world.receivers:
                self._world.send_json(receiver, {"type": "shutdown"})
        if not self._world.flush():
            log.warning("some control messages were not taken by their receivers")

    def _own_digests(self, job: _Job) -> list[str]:
        started, view = time.monotonic(), self._snapshot.view
        own = self._chunks[self._own.first : self._own.first + self._own.count]
        digests = [chunk_digest(view[offset : offset + nbytes]) for offset, nbytes in own]
        job.digest_s = time.monotonic() - started
        return digests

    def _follow(self, job: _Job) -> PublishResult:
        """Any trainer but the first: send digests, then obey ``go`` until ``done``."""
        version, lead = str(job.version), self._world.trainers[0]
        self._world.send_json(lead, {"type": "digests", "version": version, "digests": self._own_digests(job)})
        while True:
            self._await(lambda: bool(self._orders), f"orders of trainer 0 for {version}")
            order = self._orders.pop(0)
            if order["version"] != version:
                raise RunError(f"trainer 0 publishes {order['version']} while this rank publishes {version}")
            if order["type"] == "go":
                self._send_wave(job, order["receivers"], order["algorithm"])
            elif order["error"]:
                raise RunError(f"publishing {version} failed on trainer 0: {order['error']}")
            else:
                refused = {int(rank): reason for rank, reason in order["refused"].items()}
                return self._result(job, order["digest"], tuple(order["verified"]), refused)

    def _lead(self, job: _Job) -> PublishResult:
        """Trainer 0: gather digests, announce, run waves until every replica has answered."""
        books = self._round = _Round(str(job.version), set(self._world.receivers))
        manifest = self._manifest(job)
        publish_text(self._run.manifests / f"{manifest.version}.json", manifest.to_json())
        if self._on_manifest is not None:
            self._on_manifest(manifest)
        for receiver in self._world.receivers:
            self._world.send_json(receiver, {"type": "publish", "manifest": manifest.to_dict()})
        while books.silent or books.ready:
            self._await(
                lambda: bool(books.ready) or not books.silent, f"replicas to take {books.version}", books.silent
            )
            self._let_settle(books)
            if books.ready:
                self._lead_wave(job, books)
        self._parent = manifest.version
        verified = tuple(sorted(books.verified))
        done = {
            "version": books.version,
            "digest": manifest.digest,
            "verified": verified,
            "refused": books.refused,
            "error": "",
        }
        self._tell_trainers({"type": "done", **done})
        return self._result(job, manifest.digest, verified, dict(books.refused))

    def _let_settle(self, books: _Round) -> None:
        until = time.monotonic() + _SETTLE_S
        self._await(lambda: not books.silent or time.monotonic() > until, "replicas")

    def _manifest(self, job: _Job) -> Manifest:
        digests = {self._world.rank: self._own_digests(job)}
        books = self._round
        for rank in self._world.trainers[1:]:
            digests[rank] = self._digests_of(rank, books.version)
        flat = [digest for share in self._shares for digest in digests[share.sender]]
        chunks = [Chunk(offset, nbytes, digest) for (offset, nbytes), digest in zip(self._chunks, flat, strict=True)]
        return Manifest.build(
            job.version,
            self._parent,
            self._snapshot.layout,
            chunks,
            tokenizer_digest=self._digests[0],
            model_config_digest=self._digests[1],
        )

    def _digests_of(self, rank: int, version: str) -> list[str]:
        self._await(lambda: (version, rank) in self._gathered, f"the digests of {version} from", {rank})
        return self._gathered.pop((version, rank))

    def _lead_wave(self, job: _Job, books: _Round) -> None:
        receivers = sorted(books.ready)
        books.ready.clear()
        books.receiving = set(receivers)
        algorithm = self._algorithm
        if algorithm == "auto":
            algorithm = choose(len(self._chunks), len(self._shares), len(receivers))
        shares = [[share.sender, share.first, share.count] for share in self._shares]
        order = {
            "type": "go",
            "version": books.version,
            "receivers": receivers,
            "algorithm": algorithm,
            "shares": shares,
        }
        self._tell_trainers(order)
        for receiver in receivers:
            self._world.send_json(receiver, order)
        self._send_wave(job, receivers, algorithm)
        self._await(lambda: not books.receiving, f"replicas to verify {books.version}", books.receiving)

    def _send_wave(self, job: _Job, receivers: list[int], algorithm: Literal["star", "chain"]) -> None:
        """Send own chunks to ``receivers``; returns when all have left the buffer."""
        started, pacer = time.monotonic(), Pacer(longest_s=0.001)
        legs = legs_of(self._world.rank, self._shares, receivers, algorithm)
        transfer = Transfer(self._world, legs, self._snapshot.view, self._chunks, self._window)
        deadline = started + self._timeout_s
        while not transfer.done:
            if transfer.step():
                pacer.progress()
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                raise InfraError("weights_stalled", f"nothing of {job.version} has moved for {self._timeout_s:.0f} s")
            else:
                pacer.pause()
        job.transfer_s += time.monotonic() - started

    # ------------------------------------------------------------ messages

    def _tell_trainers(self, message: dict[str, Any]) -> None:
        for trainer in self._world.trainers[1:]:
            self._world.send_json(trainer, message)

    def _await(self, condition: Callable[[], bool], what: str, missing: set[int] | None = None) -> None:
        """Take messages until ``condition`` holds. Raises InfraError after ``timeout_s``, naming who did not answer."""
        pacer, deadline = Pacer(), time.monotonic() + self._timeout_s
        while not condition():
            if self._pump():
                pacer.progress()
            elif time.monotonic() > deadline:
                silent = ", ".join(self._world.names[rank] for rank in sorted(missing or ()))
                raise InfraError("weights_timeout", f"waited {self._timeout_s:.0f} s for {what} {silent}".rstrip())
            else:
                pacer.pause()

    def _pump(self) -> bool:
        """Take one message, if there is one, into the books."""
        received = self._world.poll()
        if received is None:
            return False
        source, message = received
        kind, version, books = message["type"], message["version"], self._round
        if kind in ("go", "done"):
            self._orders.append(message)
        elif kind == "refused":
            self.refusals[source] = (version, message["reason"])
            log.warning("%s refused %s: %s", self._world.names[source], version, message["reason"])
        elif kind == "digests":  # possibly of the next version: other trainers may be ahead of trainer 0
            self._gathered[version, source] = message["digests"]
        if version != books.version:
            return True
        if kind == "ready":
            books.silent.discard(source)
            books.ready.add(source)
        elif kind == "verified":
            books.receiving.discard(source)
            books.verified.add(source)
        elif kind == "refused":
            books.silent.discard(source)
            books.receiving.discard(source)
            books.verified.discard(source)
            books.refused[source] = message["reason"]
        return True

    def _result(self, job: _Job, digest: str, verified: tuple[int, ...], refused: dict[int, str]) -> PublishResult:
        return PublishResult(
            version=str(job.version),
            digest=digest,
            nbytes=self._snapshot.layout.nbytes,
            verified=verified,
            refused=refused,
            capture_s=job.capture_s,
            digest_s=job.digest_s,
            transfer_s=job.transfer_s,
            total_s=time.monotonic() - job.started,
        )
