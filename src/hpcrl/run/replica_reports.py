"""What a replica tells the coordinator: REGISTER, READY, REFUSED, in an order that is always true.

    flip thread    ready, refused ──────────┐
                                            ├── one lock: look at the engine, then report
    event loop     broken, down, restarted ─┘   (in a thread each)

Without the lock a READY could overtake the news that the engine died after it, and the coordinator would go on leasing to it.
"""

from __future__ import annotations

import threading
from typing import Protocol, TypeVar

from hpcrl.protocol import client as api
from hpcrl.protocol import messages as m

__all__ = ["ReplicaReports"]

Req = TypeVar("Req", bound=m.Message)
Rep = TypeVar("Rep", bound=m.Message)


class Coordinator(Protocol):
    """What is needed of ``protocol.client.Client``."""

    def call(self, endpoint: api.Endpoint[Req, Rep], request: Req) -> Rep: ...


class Engine(Protocol):
    """What is needed of ``inference.replica.Replica``; read from any thread."""

    @property
    def served_version(self) -> str | None: ...

    @property
    def serving(self) -> bool: ...


class ReplicaReports:
    """One per replica. Blocking, may be called from any thread. All methods raise InfraError when the report cannot be made."""

    def __init__(self, client: Coordinator, engine: Engine, replica_id: str) -> None:
        self._client = client
        self._engine = engine
        self._id = replica_id
        self._lock = threading.Lock()
        self._registration: m.ReplicaRegister | None = None
        self._ready: m.ReplicaReady | None = None

    def register(self, base_url: str, node: str) -> None:
        """The replica is there and serves nothing yet."""
        with self._lock:
            self._registration = m.ReplicaRegister(replica_id=self._id, base_url=base_url, node=node)
            self._client.call(api.REGISTER, self._registration)

    def ready(self, ready: m.ReplicaReady) -> None:
        """A flip succeeded. If the engine died since, this is told once it is back."""
        with self._lock:
            self._ready = ready
            if self._engine.serving:
                self._client.call(api.READY, ready)

    def refused(self, version: str, reason: str) -> None:
        """A version will not be served by this replica; the old one is, if the engine still holds it."""
        with self._lock:
            # First what goes on: a trainer that hears of the refusal alone would take the replica for lost, and end.
            self._still_ready()
            self._client.call(api.REFUSED, m.ReplicaRefused(replica_id=self._id, version=version, reason=reason))

    def broken(self, version: str, reason: str) -> None:
        """The flip to ``version`` left nothing to serve: nothing is leased to the replica until the old version was verified again."""
        with self._lock:
            self._client.call(api.REFUSED, m.ReplicaRefused(replica_id=self._id, version=version, reason=reason))

    def down(self) -> None:
        """The engine is dead: attempts bound to it are lost, nothing is leased to it."""
        with self._lock:
            if self._registration is not None:
                self._client.call(api.REGISTER, self._registration)

    def restarted(self) -> None:
        """The engine is back with the last verified version."""
        with self._lock:
            self._still_ready()

    def _still_ready(self) -> None:
        last = self._ready
        if last is not None and self._engine.serving and self._engine.served_version == last.version:
            again = last.model_copy(update={"transfer_s": 0.0, "verify_s": 0.0, "pause_s": 0.0})
            self._client.call(api.READY, again)
