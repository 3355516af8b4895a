"""Publishing from the trainer: every trainer rank has a :class:`Publisher`, whose thread makes all MPI calls of that process.

    training thread      publish_async(v): wait for the previous publish ─ copy own rows ─ hand over ─ train on
    publisher thread     trainer 0: lead.py;  others: obey begin, go, done of trainer 0
    digest threads       digests of the own bytes while they travel; on trainer 0 then the manifest

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
from typing import Any

from hpcrl.errors import RunError
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import all_done, digest_threads
from hpcrl.weights.lead import Announcement, Lead
from hpcrl.weights.manifest import Adapter, Manifest
from hpcrl.weights.mpi import World, wait_until
from hpcrl.weights.outgoing import Outgoing
from hpcrl.weights.plan import Algorithm, LinkRate, best_chunk, choose, cut_spans
from hpcrl.weights.snapshot import Snapshot

__all__ = ["PublishResult", "Publisher"]

log = logging.getLogger(__name__)

_IDLE_S = 0.2
"""How often trainer 0 looks for late refusals between publishes."""
_UNKNOWN_LINK = LinkRate(1e9, 1e-4)
"""Without a replica there is nothing to measure, and nothing to send."""


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What became of one version. Ranks are those of each node's first replica; ``refused`` maps them to reasons. Durations in seconds.

    ``transfer_s`` is the time chunks were moving, ``total_s`` runs from the hand-over to the last replica's answer.
    """

    version: str
    digest: str
    nbytes: int
    verified: tuple[int, ...]
    refused: dict[int, str]
    capture_s: float
    transfer_s: float
    total_s: float


@dataclass(slots=True)
class _Job:
    version: PolicyVersion
    capture_s: float
    future: Future[PublishResult]
    started: float = field(default_factory=time.monotonic)


class Publisher:
    """One per trainer rank; all ranks create it together and publish the same versions in the same order.

    ``snapshot`` is this rank's part. ``chunk_bytes`` is the largest message (the size used follows from the measured link), ``window``
    the messages under way per rank, ``adapter`` what the tensors are when they are not the whole model, ``parent`` the version
    published before this process began. ``on_manifest`` is called on trainer 0, in a digest thread, before any replica can flip to the
    version (tell the coordinator there). ``algorithm`` and ``link`` replace what is otherwise chosen and measured. ``timeout_s`` bounds
    each wait in which nothing moves, a replica's drain included. Raises DataError when the trainers' parts are not the whole model.
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
        adapter: Adapter | None = None,
        parent: str | None = None,
        algorithm: Algorithm | None = None,
        link: LinkRate | None = None,
        on_manifest: Callable[[Manifest], None] | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        self._world = world
        self._snapshot = snapshot
        self._largest = chunk_bytes
        self._window = window
        self._algorithm = algorithm
        self._timeout_s = timeout_s
        self._nbytes = snapshot.layout.nbytes
        self._spans = dict(zip(world.trainers, world.allgather_json(snapshot.spans), strict=True))
        cut_spans(self._spans, self._nbytes, chunk_bytes)  # refuse now what no publish could send
        self._digester = digest_threads()
        announcement = Announcement(
            run=run,
            layout=snapshot.layout,
            tokenizer_digest=tokenizer_digest,
            model_config_digest=model_config_digest,
            adapter=adapter,
            on_manifest=on_manifest,
        )
        self._lead = Lead(world, announcement, self._digester, parent, timeout_s)
        self._leads = world.rank == world.trainers[0]
        self._orders: list[dict[str, Any]] = []
        self._pending: Future[PublishResult] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.link = link
        """The links' rate and latency, once trainer 0 has measured them."""

    @property
    def refusals(self) -> dict[int, tuple[str, str]]:
        """Rank of a replica → (version, reason) of its last refusal (trainer 0 only)."""
        return self._lead.refusals

    # ------------------------------------------------------------ the training thread

    def publish_async(self, version: PolicyVersion) -> Future[PublishResult]:
        """Copy the weights as ``version`` and send them in the background. Waits for the previous publish, and raises its error."""
        self.wait()
        started = time.monotonic()
        self._snapshot.capture()
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="weights-publisher", daemon=True)
            self._thread.start()
        self._pending = Future()
        self._jobs.put(_Job(version, time.monotonic() - started, self._pending))
        return self._pending

    def publish(self, version: PolicyVersion) -> None:
        """:meth:`publish_async` without the future; :meth:`check`, the next one, :meth:`wait` or :meth:`shutdown` raise its error."""
        self.publish_async(version)

    def wait(self) -> PublishResult | None:
        """Wait for the publish under way and return its result; None when there was none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def check(self) -> None:
        """Raise the error of a publish that has failed; waits for nothing. For whoever waits for what only that version brings."""
        if self._failure is not None:
            raise self._failure
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def shutdown(self) -> None:
        """Finish the publish under way, tell the replicas to stop (trainer 0), and end the threads."""
        try:
            self.wait()
        finally:
            if self._thread is None:
                self._say_goodbye()
            else:
                self._jobs.put(None)
                self._thread.join()
                self._thread = None
            self._digester.shutdown(wait=False)

    # ------------------------------------------------------------ the publisher thread

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S if self._leads else None)
            except queue.Empty:
                self._failure = self._failure or self._take_late_messages()
                continue
            if job is None:
                self._say_goodbye()
                return
            try:
                if self._failure is not None:
                    raise self._failure
                job.future.set_result(self._publish(job) if self._leads else self._follow(job))
            except Exception as error:  # noqa: BLE001 - the one recording point: the training thread raises it
                job.future.set_exception(error)
                if self._leads:
                    self._tell_trainers({"type": "done", "version": str(job.version), "error": str(error)})

    def _take_late_messages(self) -> Exception | None:
        """An error here belongs to no publish: :meth:`check` and the next one raise it. The thread lives on to do that."""
        try:
            while self._lead.pump():
                pass
        except Exception as error:
            log.exception("between two publishes")
            return error
        return None

    def _say_goodbye(self) -> None:
        if self._leads:
            self._world.send_json(self._world.receivers, {"type": "shutdown"})
        if not self._world.flush():
            log.warning("some control messages were not taken by their receivers")

    def _tell_trainers(self, message: dict[str, Any]) -> None:
        self._world.send_json(self._world.trainers[1:], message)

    def _outgoing(self, chunk_bytes: int) -> Outgoing:
        pieces = cut_spans(self._spans, self._nbytes, chunk_bytes)
        return Outgoing(self._world, self._snapshot, pieces, self._window)

    def _publish(self, job: _Job) -> PublishResult:
        """Trainer 0."""
        receivers = len(self._world.nodes)
        link = self.link = self.link or (self._lead.measure() if receivers else _UNKNOWN_LINK)
        chunk_bytes = best_chunk(self._nbytes, receivers, link, self._largest)
        self._tell_trainers({"type": "begin", "version": str(job.version), "chunk_bytes": chunk_bytes})
        outgoing = self._outgoing(chunk_bytes)

        def algorithm(receivers: int) -> Algorithm:
            senders = len({self._world.names[rank] for rank in self._world.trainers})  # ranks of a node share its link
            return self._algorithm or choose(self._nbytes, chunk_bytes, senders, receivers, link)

        manifest, books = self._lead.publish(job.version, outgoing, algorithm)
        verified = tuple(sorted(books.verified))
        done = {"digest": manifest.digest, "verified": verified, "refused": books.refused, "error": ""}
        self._tell_trainers({"type": "done", "version": books.version, **done})
        return self._result(job, outgoing, manifest.digest, verified, dict(books.refused))

    def _follow(self, job: _Job) -> PublishResult:
        """Any other trainer: digests and waves until ``done``."""
        begin = self._next_order(job, lambda: False)
        if begin["type"] != "begin":
            raise RunError(f"publishing {job.version} failed on trainer 0: {begin['error']}")
        outgoing = self._outgoing(begin["chunk_bytes"])
        digests = outgoing.digest(self._digester)
        told = False

        def tell() -> bool:
            nonlocal told
            if told or not all_done(digests):
                return False
            told = True
            found = [digest.result() for digest in digests]
            self._world.send_json(
                self._world.trainers[:1], {"type": "digests", "version": begin["version"], "digests": found}
            )
            return True

        while (order := self._next_order(job, tell))["type"] == "go":
            outgoing.send(order["receivers"], order["algorithm"], tell, self._timeout_s)
        if order["error"]:
            raise RunError(f"publishing {job.version} failed on trainer 0: {order['error']}")
        refused = {int(rank): reason for rank, reason in order["refused"].items()}
        return self._result(job, outgoing, order["digest"], tuple(order["verified"]), refused)

    def _next_order(self, job: _Job, meanwhile: Callable[[], bool]) -> dict[str, Any]:
        def turn() -> bool:
            received = self._world.poll()
            if received is not None:
                self._orders.append(received[1])
            return (received is not None) | meanwhile()

        wait_until(
            lambda: bool(self._orders), turn, self._timeout_s, lambda: f"trainer 0 does not publish {job.version}"
        )
        order = self._orders.pop(0)
        if order["version"] != str(job.version):
            raise RunError(f"trainer 0 publishes {order['version']} while this rank publishes {job.version}")
        return order

    def _result(
        self, job: _Job, outgoing: Outgoing, digest: str, verified: tuple[int, ...], refused: dict[int, str]
    ) -> PublishResult:
        return PublishResult(
            version=str(job.version),
            digest=digest,
            nbytes=self._nbytes,
            verified=verified,
            refused=refused,
            capture_s=job.capture_s,
            transfer_s=outgoing.transfer_s,
            total_s=time.monotonic() - job.started,
        )
