"""Receiving a version beside a replica: an inference rank runs one :class:`Receiver` loop, which makes all its MPI calls.

    IDLE ─ publish ─▶ (fits? room?) ─ ready ─▶ OFFERED ─ go ─▶ chunks into standby, digests as they arrive
                              └─ refused ─▶ IDLE                ├─ a digest differs ─ refused ─▶ IDLE, standby is garbage
                                                                └─ verified ─▶ FLIPPING (worker thread: on_staged, then swap)
    FLIPPING ─ flipped ─▶ IDLE          active = the new version
             └ failed ── refused ─▶ IDLE    active = the old version

While a flip runs (it may drain for minutes) the loop goes on: a publish that arrives then is answered when the standby half is free.
The whole's digest is computed from the bytes received, by way of the chunks' digests (see digest.py), never taken from a message.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError, HpcrlError, InfraError
from hpcrl.weights.digest import chunk_digest, whole_digest
from hpcrl.weights.manifest import Manifest
from hpcrl.weights.mpi import Pacer, World
from hpcrl.weights.plan import Stripe, legs_of
from hpcrl.weights.staging import Staging
from hpcrl.weights.transfer import Transfer

__all__ = ["Receiver", "Staged", "Timings"]

log = logging.getLogger(__name__)


class _State(enum.Enum):
    IDLE = "idle"
    OFFERED = "offered"
    FLIPPING = "flipping"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the first posted receive to the last chunk, and the part of it spent on digests.

    ``digest`` is the whole's, computed from the bytes that arrived.
    """

    transfer_s: float
    verify_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class Staged:
    """A verified copy: its manifest and the file that holds its ``manifest.nbytes`` bytes."""

    manifest: Manifest
    path: Path


class Receiver:
    """One per inference rank. ``staging`` must outlive :meth:`run`.

    ``on_staged(manifest, path, timings)`` makes the replica serve the copy (the flip) and raises an HpcrlError when it could not; it
    runs in a worker thread and may take long. ``on_refused(version, reason)`` (same thread) hears of every version that this replica
    will not serve. ``tokenizer_digest`` and ``model_config_digest`` are those of the model directory the replica was started from.
    """

    def __init__(
        self,
        world: World,
        staging: Staging,
        *,
        window: int,
        tokenizer_digest: str,
        model_config_digest: str,
        on_staged: Callable[[Manifest, Path, Timings], None],
        on_refused: Callable[[str, str], None] | None = None,
        timeout_s: float = 900.0,
        grace_s: float = 10.0,
    ) -> None:
        self._world = world
        self._staging = staging
        self._window = window
        self._expected = {"tokenizer": tokenizer_digest, "model configuration": model_config_digest}
        self._on_staged = on_staged
        self._on_refused = on_refused
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._state = _State.IDLE
        self._offer: Manifest | None = None
        self._waiting: dict[str, Any] | None = None
        self._active: Staged | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weights-flip")
        self._flip: Future[str | None] | None = None
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
                        self._finish_flip()
                        return
                    self._take(received[1])
                elif self._after_flip() or self._offer_waiting():
                    pacer.progress()
                else:
                    pacer.pause()
        finally:
            self._world.flush()
            self._worker.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ messages

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "publish":
            self._waiting = message["manifest"]  # a newer publish replaces one that was never answered
        elif message["type"] == "go":
            if self._state is not _State.OFFERED or self._offer is None or self._offer.version != message["version"]:
                raise DataError(
                    "control_message", f"go for {message['version']}, which this replica did not offer to take"
                )
            self._receive(self._offer, message)
        else:
            raise DataError("control_message", f"a replica does not know {message['type']!r}")

    def _offer_waiting(self) -> bool:
        if self._waiting is None or self._state is _State.FLIPPING:
            return False
        data, self._waiting = self._waiting, None
        self._state, self._offer = _State.IDLE, None
        try:
            manifest = Manifest.from_dict(data)
            self._check_fits(manifest)
            self._staging.standby(manifest.nbytes)
        except HpcrlError as error:
            self._refuse(str(data.get("version")), str(data.get("digest")), str(error))
            return True
        self._state, self._offer = _State.OFFERED, manifest
        self._reply({"type": "ready", "version": manifest.version, "digest": manifest.digest})
        return True

    def _check_fits(self, manifest: Manifest) -> None:
        """Raises DataError for a version of another model or tokenizer."""
        sent = {"tokenizer": manifest.tokenizer_digest, "model configuration": manifest.model_config_digest}
        for what, expected in self._expected.items():
            if sent[what] != expected:
                raise DataError("incompatible", f"the {what} differs: trainer {sent[what]}, replica {expected}")

    def _reply(self, message: dict[str, Any]) -> None:
        self._world.send_json(self._world.trainers[0], message)

    def _refuse(self, version: str, digest: str, reason: str) -> None:
        log.warning("refused %s: %s", version, reason)
        self._reply({"type": "refused", "version": version, "digest": digest, "reason": reason})
        if self._on_refused is not None:
            self._reports.append(self._worker.submit(self._on_refused, version, reason))

    # ------------------------------------------------------------ chunks

    def _receive(self, manifest: Manifest, order: dict[str, Any]) -> None:
        """Take all chunks into the standby half, and begin the flip when every digest is right."""
        started, verify_s = time.monotonic(), 0.0
        digests = [""] * len(manifest.chunks)

        def on_chunk(number: int, data: memoryview) -> None:
            nonlocal verify_s
            begun = time.monotonic()
            digests[number] = chunk_digest(data)
            verify_s += time.monotonic() - begun

        shares = [Stripe(*share) for share in order["shares"]]
        legs = legs_of(self._world.rank, shares, order["receivers"], order["algorithm"])
        buffer = self._staging.standby(manifest.nbytes)
        places = [(chunk.offset, chunk.nbytes) for chunk in manifest.chunks]
        self._drive(Transfer(self._world, legs, buffer, places, self._window, on_chunk), manifest.version)
        timings = Timings(time.monotonic() - started, verify_s, whole_digest(digests))
        wrong = [number for number, chunk in enumerate(manifest.chunks) if digests[number] != chunk.digest]
        if wrong or whole_digest(digests) != manifest.digest:
            self._state, self._offer = _State.IDLE, None
            reason = f"corrupt: {len(wrong)} of {len(digests)} chunks have another digest, first {wrong[:1]}"
            self._refuse(manifest.version, manifest.digest, reason)
            return
        self._reply({"type": "verified", "version": manifest.version, "digest": whole_digest(digests)})
        self._state = _State.FLIPPING
        self._flip = self._worker.submit(self._make_active, manifest, timings)

    def _drive(self, transfer: Transfer, version: str) -> None:
        pacer, deadline = Pacer(longest_s=0.001), time.monotonic() + self._timeout_s
        while not transfer.done:
            if transfer.step():
                pacer.progress()
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                raise InfraError("weights_stalled", f"nothing of {version} has arrived for {self._timeout_s:.0f} s")
            else:
                pacer.pause()

    # ------------------------------------------------------------ the flip

    def _make_active(self, manifest: Manifest, timings: Timings) -> str | None:
        """Worker thread; the loop leaves the staging alone meanwhile. Returns why the flip failed, or None."""
        path = self._staging.standby_path
        try:
            self._on_staged(manifest, path, timings)
        except HpcrlError as error:
            return str(error)
        self._staging.swap()
        self._active = Staged(manifest, path)
        return None

    def _finish_flip(self) -> None:
        if self._flip is not None:
            wait([self._flip], timeout=self._grace_s)
            self._after_flip()

    def _after_flip(self) -> bool:
        """Take the outcome of a finished flip; errors that are not hpcrl's end the loop."""
        for report in [report for report in self._reports if report.done()]:
            self._reports.remove(report)
            report.result()
        if self._flip is None or not self._flip.done() or self._offer is None:
            return False
        failure, manifest = self._flip.result(), self._offer
        self._flip, self._offer, self._state = None, None, _State.IDLE
        if failure is not None:
            self._refuse(manifest.version, manifest.digest, failure)
        return True
