"""Receiving a version beside a replica: an inference rank runs one :class:`Receiver` loop, which makes all its MPI calls.

    IDLE ─ publish ─▶ (fits? room?) ─ ready ─▶ OFFERED ─ go ─▶ chunks into standby, digests as they arrive ─▶ RECEIVED
                              └─ refused ─▶ IDLE
    RECEIVED ─ all digests taken, and manifest here ─┬─ a digest or the manifest is wrong ─ refused ─▶ IDLE, standby is garbage
                                                     └─ verified ─▶ FLIPPING (flip thread: on_staged, then swap)
    FLIPPING ─ flipped ─▶ IDLE          active = the new version
             └ failed ── refused ─▶ IDLE    active = the old version

    first of a node ─ staged | unstaged ─▶ the node's other replicas ─ left(version) ─▶ first of the node

One replica per node receives; the others flip to its copy. A copy stays as it is until all of them have tried the next one, and
for as long as one of them holds it: a replica that failed a flip must be able to load its version again.

    digest threads    xxh3-128 of each chunk that has arrived, while the next ones travel

While a flip runs (it may drain for minutes) the loop goes on: a publish that arrives then is answered when the standby half is free.
The whole's digest is computed from the bytes received, by way of the chunks' digests (see digest.py), never taken from a message.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError, HpcrlError, InfraError
from hpcrl.weights.digest import all_done, chunk_digest, digest_threads, whole_digest
from hpcrl.weights.manifest import Manifest
from hpcrl.weights.mpi import Pacer, World, wait_until
from hpcrl.weights.plan import Piece, legs_of
from hpcrl.weights.staging import Staging
from hpcrl.weights.transfer import Transfer

__all__ = ["Receiver", "Staged", "Timings"]

log = logging.getLogger(__name__)


class _State(enum.Enum):
    IDLE = "idle"
    OFFERED = "offered"
    RECEIVED = "received"
    FLIPPING = "flipping"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the first posted receive to the last chunk, and from there to the last digest.

    ``digest`` is the whole's, computed from the bytes that arrived.
    """

    transfer_s: float
    verify_s: float
    digest: str


@dataclass(slots=True)
class _Offer:
    """A version on its way here: what trainer 0 said of it, and what has arrived."""

    version: str
    nbytes: int
    pieces: tuple[Piece, ...]
    transfer_s: float = 0.0
    arrived: float = 0.0
    digests: dict[int, Future[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Staged:
    """A verified copy: its manifest and the file that holds its ``manifest.nbytes`` bytes."""

    manifest: Manifest
    path: Path


class Receiver:
    """One per inference rank. ``staging`` must outlive :meth:`run`.

    ``on_staged(manifest, path, timings)`` makes the replica serve the copy (the flip) and raises an HpcrlError when it could not; it
    runs in a worker thread and may take long. ``on_refused(version, reason)`` (same thread) hears of every version that this replica
    will not serve. ``tokenizer_digest`` and ``model_config_digest`` are those of the model directory the replica was started from;
    ``base_digest`` is that of its weights where adapters to them are expected, None: whole models are.
    """

    def __init__(
        self,
        world: World,
        staging: Staging,
        *,
        window: int,
        tokenizer_digest: str,
        model_config_digest: str,
        base_digest: str | None = None,
        on_staged: Callable[[Manifest, Path, Timings], None],
        on_refused: Callable[[str, str], None] | None = None,
        timeout_s: float = 900.0,
        grace_s: float = 10.0,
    ) -> None:
        self._world = world
        self._staging = staging
        self._window = window
        self._expected = {
            "tokenizer": tokenizer_digest,
            "model configuration": model_config_digest,
            "base model": base_digest,
        }
        self._on_staged = on_staged
        self._on_refused = on_refused
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        node = next(node for node in world.nodes if world.rank in node)
        self._first = node[0]
        self._others = [rank for rank in node if rank != world.rank] if self._first == world.rank else []
        self._flipping: set[int] = set()
        self._flipped: set[int] = set()
        self._state = _State.IDLE
        self._offer: _Offer | None = None
        self._waiting: dict[str, Any] | None = None
        self._announced = ""
        self._manifest: Manifest | DataError | None = None
        self._unfit: tuple[str, str] | None = None
        self._active: Staged | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weights-flip")
        self._digester = digest_threads()
        self._flip: Future[None] | None = None
        self._target: Staged | None = None
        self._reports: list[Future[None]] = []

    @property
    def active(self) -> Staged | None:
        """The last version that was flipped to (reload from it after an engine died); None before the first."""
        return self._active

    def run(self) -> None:
        """Serve until the trainer shuts down; a flip that is under way then gets ``grace_s`` to end."""
        pacer = Pacer()
        try:
            while True:
                received = self._world.poll()
                if received is not None:
                    pacer.progress()
                    if received[1]["type"] == "shutdown":
                        self._finish_flips()
                        return
                    self._take(*received)
                elif self._after_flip() or self._offer_waiting() or self._verify():
                    pacer.progress()
                else:
                    pacer.pause()
        finally:
            self._world.flush()
            for threads in (self._worker, self._digester):
                threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ messages

    def _take(self, source: int, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "publish":
            self._waiting = message  # a newer publish replaces one that was never answered
        elif kind == "go":
            if self._state is not _State.OFFERED or self._offer is None or self._offer.version != message["version"]:
                raise DataError(
                    "control_message", f"go for {message['version']}, which this replica did not offer to take"
                )
            self._receive(self._offer, message)
        elif kind == "manifest":
            self._announced, self._manifest = message["version"], self._read(message)
            if self._unfit is not None and self._unfit[0] == self._announced:
                self._tell_refused(*self._unfit)
        elif kind == "probe":
            self._probed(message["nbytes"])
        elif kind == "staged":
            timings = Timings(**message["timings"])
            self._begin_flip(Manifest.from_dict(message["manifest"]), Path(message["path"]), timings)
        elif kind == "unstaged":
            self._tell_refused(message["version"], message["reason"])
        elif kind == "left":
            self._leave(source, message["flipped"])
        else:
            raise DataError("control_message", f"a replica does not know {kind!r}")

    def _probed(self, nbytes: int) -> None:
        """Trainer 0 measures the link."""
        request = self._world.irecv(memoryview(bytearray(nbytes)), self._world.trainers[0], 0)
        wait_until(lambda: bool(request.Test()), lambda: False, self._timeout_s, lambda: "trainer 0 sends no probe")
        self._reply({"type": "probed", "version": ""})

    def _offer_waiting(self) -> bool:
        if self._waiting is None or self._state is _State.FLIPPING:
            return False
        message, self._waiting = self._waiting, None
        self._state, self._offer = _State.IDLE, None
        version = str(message["version"])
        try:
            self._check_fits(message["tokenizer_digest"], message["model_config_digest"], message["base_digest"])
            self._staging.standby(message["nbytes"])
        except HpcrlError as error:
            self._refuse(version, str(error))
            return True
        pieces = tuple(Piece(*piece) for piece in message["pieces"])
        self._state, self._offer = _State.OFFERED, _Offer(version, message["nbytes"], pieces)
        self._reply({"type": "ready", "version": version})
        return True

    def _read(self, message: dict[str, Any]) -> Manifest | DataError:
        """The manifest, or why the version of the message cannot be served: it is refused then, and the replica goes on."""
        try:
            manifest = Manifest.from_dict(message["manifest"])
            if manifest.version != message["version"]:
                raise DataError("manifest", f"it is that of {manifest.version}")
            base = None if manifest.adapter is None else manifest.adapter.base_digest
            self._check_fits(manifest.tokenizer_digest, manifest.model_config_digest, base)
        except DataError as error:
            return error
        return manifest

    def _check_fits(self, *digests: str | None) -> None:
        """``digests`` of tokenizer, model configuration and base model. Raises DataError for a version of others."""
        for (what, expected), sent in zip(self._expected.items(), digests, strict=True):
            if sent != expected:
                raise DataError("incompatible", f"the {what} differs: trainer {sent}, replica {expected}")

    def _reply(self, message: dict[str, Any]) -> None:
        self._world.send_json(self._world.trainers[:1], message)

    def _refuse(self, version: str, reason: str) -> None:
        log.warning("refused %s: %s", version, reason)
        self._reply({"type": "refused", "version": version, "reason": reason})
        if self._announced == version:
            self._tell_refused(version, reason)
        else:
            self._unfit = (version, reason)  # nobody else has heard of the version before its manifest

    def _tell_refused(self, version: str, reason: str) -> None:
        """No replica of the node will have a copy of this version."""
        self._unfit = None
        self._world.send_json(self._others, {"type": "unstaged", "version": version, "reason": reason})
        self._report(version, reason)

    def _report(self, version: str, reason: str) -> None:
        if self._on_refused is not None:
            self._reports.append(self._worker.submit(self._on_refused, version, reason))

    # ------------------------------------------------------------ chunks

    def _receive(self, offer: _Offer, order: dict[str, Any]) -> None:
        """Take all chunks into the standby half; each is digested as soon as it is here."""
        started = time.monotonic()
        buffer = self._staging.standby(offer.nbytes)

        def bytes_of(number: int) -> memoryview:
            piece = offer.pieces[number]
            return buffer[piece.offset : piece.offset + piece.nbytes]

        def on_piece(number: int, data: memoryview) -> None:
            offer.digests[number] = self._digester.submit(chunk_digest, data)

        legs = legs_of(self._world.rank, offer.pieces, order["receivers"], order["algorithm"])
        transfer = Transfer(self._world, legs, bytes_of, self._window, on_piece)

        def complaint() -> str:
            return f"{offer.version} from or to {', '.join(self._world.names[rank] for rank in sorted(transfer.waits_for))}"

        wait_until(lambda: transfer.done, transfer.step, self._timeout_s, complaint)
        offer.arrived = time.monotonic()
        offer.transfer_s = offer.arrived - started
        self._state = _State.RECEIVED

    def _verify(self) -> bool:
        """Compare what has arrived with the manifest, and begin the flip when every digest is right."""
        offer, manifest = self._offer, self._manifest
        if self._state is not _State.RECEIVED or offer is None or manifest is None or self._announced != offer.version:
            return False
        if not all_done(list(offer.digests.values())):
            return False
        if isinstance(manifest, DataError):
            self._state, self._offer = _State.IDLE, None
            self._refuse(offer.version, str(manifest))
            return True
        digests = [offer.digests[number].result() for number in range(len(offer.pieces))]
        timings = Timings(offer.transfer_s, time.monotonic() - offer.arrived, whole_digest(digests))
        expected = [chunk.digest for chunk in manifest.chunks]
        if digests != expected or timings.digest != manifest.digest:
            wrong = [number for number, (a, b) in enumerate(zip(digests, expected, strict=False)) if a != b]
            self._state, self._offer = _State.IDLE, None
            self._refuse(
                manifest.version,
                f"corrupt: {len(wrong)} of {len(digests)} chunks have another digest, first {wrong[:1]}",
            )
            return True
        self._reply({"type": "verified", "version": manifest.version})
        self._begin_flip(manifest, self._staging.standby_path, timings)
        return True

    # ------------------------------------------------------------ the flip

    def _begin_flip(self, manifest: Manifest, path: Path, timings: Timings) -> None:
        """Flip this replica in the worker thread, and the others of the node; the staging is left alone until all are done."""
        copy = {
            "version": manifest.version,
            "manifest": manifest.to_dict(),
            "path": str(path),
            "timings": asdict(timings),
        }
        self._world.send_json(self._others, {"type": "staged", **copy})
        self._flipping, self._flipped = {self._world.rank, *self._others}, set()
        self._state, self._target = _State.FLIPPING, Staged(manifest, path)
        self._flip = self._worker.submit(self._on_staged, manifest, path, timings)

    def _after_flip(self) -> bool:
        """Take the outcome of a finished flip; errors that are not hpcrl's end the loop."""
        for report in [report for report in self._reports if report.done()]:
            self._reports.remove(report)
            report.result()
        if self._flip is None or not self._flip.done() or self._target is None:
            return False
        flip, target = self._flip, self._target
        self._flip = self._target = None
        try:
            flip.result()
        except HpcrlError as error:
            self._reply({"type": "refused", "version": target.manifest.version, "reason": str(error)})
            self._report(target.manifest.version, str(error))
            self._leave(self._world.rank, flipped=False)
        else:
            self._active = target
            self._leave(self._world.rank, flipped=True)
        return True

    def _leave(self, rank: int, flipped: bool) -> None:
        """A replica of the node has tried the new copy; after the last one the copies that nobody holds may be overwritten."""
        self._flipping.discard(rank)
        if flipped:
            self._flipped.add(rank)
        if self._first != self._world.rank:
            self._world.send_json([self._first], {"type": "left", "flipped": flipped})
            self._state = _State.IDLE
        elif not self._flipping:
            self._staging.flipped(self._flipped)
            self._state, self._offer = _State.IDLE, None

    def _finish_flips(self) -> None:
        """At the end: let flips under way end, the other replicas' too, whose copy is ours."""

        def turn() -> bool:
            received = self._world.poll()
            if received is not None:
                self._take(*received)
            return self._after_flip() or received is not None

        with suppress(InfraError):
            wait_until(lambda: self._state is not _State.FLIPPING, turn, self._grace_s, lambda: "a flip at the end")
