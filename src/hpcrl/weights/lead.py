"""Trainer 0's part of a publish: it keeps the books of a version, and tells the others what to do. Used by its publisher thread.

    ─ begin(chunk size) ─▶ trainers       ─ publish(pieces, compatibility) ─▶ replicas
    ◀─ ready | refused ─ replicas         (a replica that still flips the previous version answers later)
    ─ go(receivers) ─▶ trainers, receivers: chunks flow        one wave for all that are ready by then
    meanwhile, in threads: own digests;  ◀─ digests ─ trainers;  manifests/L.S.json, on_manifest;  ─ manifest ─▶ replicas
    ◀─ verified | refused ─ receivers;  the next wave while replicas are left;  ─ done ─▶ trainers

"Replicas" are here the first ones of their nodes: one copy per node travels, and the others of the node take it from its memory.

The manifest follows the bytes: digests are taken while chunks travel, and a receiver compares when it has both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import all_done
from hpcrl.weights.manifest import Adapter, Chunk, Layout, Manifest
from hpcrl.weights.mpi import World, wait_until
from hpcrl.weights.outgoing import Outgoing
from hpcrl.weights.plan import Algorithm, LinkRate, Piece

__all__ = ["Announcement", "Books", "Lead"]

log = logging.getLogger(__name__)

_SETTLE_S = 0.02
"""How long a wave waits for more replicas once the first is ready."""
_PINGS = 5
_PROBE_BYTES = 4 << 20


@dataclass(slots=True)
class Books:
    """The version being published; ``silent`` are replicas that have not said ready or refused."""

    version: str
    silent: set[int]
    ready: set[int] = field(default_factory=set)
    receiving: set[int] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What is said of every version: where its manifest goes, which tokenizer, configuration and base it is for, who is told of it."""

    run: RunDir
    layout: Layout
    tokenizer_digest: str
    model_config_digest: str
    adapter: Adapter | None
    on_manifest: Callable[[Manifest], None] | None

    def write(
        self, version: PolicyVersion, parent: str | None, pieces: Sequence[Piece], digests: list[str]
    ) -> Manifest:
        """Write the manifest and tell of it; ``digests`` belong to ``pieces``."""
        chunks = [Chunk(piece.offset, piece.nbytes, digest) for piece, digest in zip(pieces, digests, strict=True)]
        manifest = Manifest.build(
            version,
            parent,
            self.layout,
            chunks,
            tokenizer_digest=self.tokenizer_digest,
            model_config_digest=self.model_config_digest,
            adapter=self.adapter,
        )
        publish_text(self.run.manifests / f"{manifest.version}.json", manifest.to_json())
        if self.on_manifest is not None:
            self.on_manifest(manifest)
        return manifest


class Lead:
    """Lives as long as trainer 0's publisher. ``refusals``: rank of a replica → (version, reason) of its last refusal."""

    def __init__(
        self, world: World, announcement: Announcement, executor: Executor, parent: str | None, timeout_s: float
    ) -> None:
        self._world = world
        self._nodes = tuple(node[0] for node in world.nodes)
        self._announcement = announcement
        self._executor = executor
        self._timeout_s = timeout_s
        self._books = Books("", set())
        self._gathered: dict[int, list[str]] = {}
        self._probed = 0
        self._announcing: Future[Manifest] | None = None
        self._sent: list[Manifest] = []
        self.parent = parent
        self.refusals: dict[int, tuple[str, str]] = {}

    # ------------------------------------------------------------ the link

    def measure(self) -> LinkRate:
        """The link to the first replica's node: half a round trip of small messages, and the rate of a large one."""
        peer, probe = self._nodes[0], memoryview(bytearray(_PROBE_BYTES))
        self._probe(peer, probe)  # the first message pays for the connection
        pings = [self._probe(peer, probe[:1]) for _ in range(_PINGS)]
        whole = self._probe(peer, probe)
        link = LinkRate(_PROBE_BYTES / max(whole - min(pings), 1e-6), min(pings) / 2)
        log.info("link: %.0f MB/s, %.0f µs per hop", link.bytes_per_s / 1e6, link.latency_s * 1e6)
        return link

    def _probe(self, peer: int, data: memoryview) -> float:
        started, before = time.monotonic(), self._probed
        self._world.send_json([peer], {"type": "probe", "version": "", "nbytes": len(data)})
        request = self._world.isend(data, peer, 0)
        self._until(lambda: self._probed > before, lambda: f"{self._world.names[peer]} takes no message")
        self._until(lambda: bool(request.Test()), lambda: f"{self._world.names[peer]} takes no message")
        return time.monotonic() - started

    # ------------------------------------------------------------ one version

    def publish(
        self,
        version: PolicyVersion,
        outgoing: Outgoing,
        algorithm: Callable[[int], Algorithm],
    ) -> tuple[Manifest, Books]:
        """Publish; returns when every replica has answered. ``algorithm(receivers)`` chooses a wave's."""
        books = self._books = Books(str(version), set(self._nodes))
        self._gathered, self._announcing, self._sent = {}, None, []
        own = outgoing.digest(self._executor)

        def announce() -> bool:
            return self._announce(version, own, outgoing.pieces)

        self._offer(version, outgoing.pieces)
        while books.silent or books.ready:
            self._until(
                lambda: bool(books.ready) or not books.silent, lambda: self._silence("answer", books.silent), announce
            )
            self._let_settle(books, announce)
            if books.ready:
                self._wave(books, outgoing, algorithm, announce)
        self._until(lambda: bool(self._sent), lambda: self._silence("send digests", self._late()), announce)
        self.parent = books.version
        return self._sent[0], books

    def _offer(self, version: PolicyVersion, pieces: Sequence[Piece]) -> None:
        said = self._announcement
        offer = {
            "type": "publish",
            "version": str(version),
            "nbytes": said.layout.nbytes,
            "tokenizer_digest": said.tokenizer_digest,
            "model_config_digest": said.model_config_digest,
            "base_digest": None if said.adapter is None else said.adapter.base_digest,
            "pieces": [[piece.offset, piece.nbytes, piece.sender] for piece in pieces],
        }
        self._world.send_json(self._nodes, offer)

    def _let_settle(self, books: Books, announce: Callable[[], bool]) -> None:
        until = time.monotonic() + _SETTLE_S
        self._until(lambda: not books.silent or time.monotonic() > until, lambda: "", announce)

    def _wave(
        self,
        books: Books,
        outgoing: Outgoing,
        algorithm: Callable[[int], Algorithm],
        announce: Callable[[], bool],
    ) -> None:
        receivers = sorted(books.ready)
        books.ready.clear()
        books.receiving = set(receivers)
        chosen = algorithm(len(receivers))
        order = {"type": "go", "version": books.version, "receivers": receivers, "algorithm": chosen}
        self._world.send_json([*self._world.trainers[1:], *receivers], order)
        outgoing.send(receivers, chosen, lambda: self.pump() | announce(), self._timeout_s)
        self._until(lambda: not books.receiving, lambda: self._silence("verify", books.receiving), announce)

    def _announce(self, version: PolicyVersion, own: list[Future[str]], pieces: Sequence[Piece]) -> bool:
        """Make and send the manifest as soon as all digests are known; True when it was sent now."""
        if self._sent:
            return False
        if self._announcing is None:
            if all_done(own) and not self._late():
                digests = {rank: iter(found) for rank, found in self._gathered.items()}
                digests[self._world.rank] = iter([digest.result() for digest in own])
                flat = [next(digests[piece.sender]) for piece in pieces]
                self._announcing = self._executor.submit(self._announcement.write, version, self.parent, pieces, flat)
            return False
        if not self._announcing.done():
            return False
        manifest = self._announcing.result()
        message = {"type": "manifest", "version": manifest.version, "manifest": manifest.to_dict()}
        self._world.send_json(self._nodes, message)
        self._sent.append(manifest)
        return True

    # ------------------------------------------------------------ messages

    def _late(self) -> set[int]:
        """Trainers whose digests are not here yet."""
        return set(self._world.trainers[1:]) - self._gathered.keys()

    def _silence(self, what: str, ranks: set[int]) -> str:
        return f"{', '.join(self._world.names[rank] for rank in sorted(ranks))} did not {what}"

    def _until(
        self,
        condition: Callable[[], bool],
        complaint: Callable[[], str],
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> None:
        wait_until(condition, lambda: self.pump() | meanwhile(), self._timeout_s, complaint)

    def pump(self) -> bool:
        """Take one message, if there is one, into the books."""
        received = self._world.poll()
        if received is None:
            return False
        source, message = received
        kind, version, books = message["type"], message["version"], self._books
        if kind == "probed":
            self._probed += 1
        elif kind == "refused":
            self.refusals[source] = (version, message["reason"])
            log.warning("%s refused %s: %s", self._world.names[source], version, message["reason"])
        if version != books.version:
            return True
        if kind == "digests":
            self._gathered[source] = message["digests"]
        elif kind == "ready":
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
