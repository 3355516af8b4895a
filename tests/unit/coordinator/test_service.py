"""The service over a real database: durability, idempotency, wakes, closing, and what happens when the disk fails."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest
from coordinator_world import make_config, make_tasks

from hpcrl.clock import ManualClock
from hpcrl.coordinator.database import open_database
from hpcrl.coordinator.queue import Queue
from hpcrl.coordinator.restore import restore
from hpcrl.coordinator.service import Closing, Service
from hpcrl.coordinator.store import Store
from hpcrl.errors import EnvironmentFault
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.status import Status, StatusRequest
from hpcrl.protocol.version import PolicyVersion

anyio_test = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def open_service(path: Path, clock: ManualClock) -> Service:
    connection = open_database(path)
    queue = Queue(make_config(), make_tasks(3), [], "secret")
    restore(queue, connection, clock.now())
    service = Service(queue, Store(connection), clock)
    await service.start()
    return service


async def begin(service: Service) -> None:
    """A started run with one replica at 0.0."""
    await service.handle(
        c.REGISTER, m.ReplicaRegister(replica_id="r0", base_url="http://r0/v1", node="n"), "k-register"
    )
    await service.handle(c.START, m.TrainerStart(), "k-start")
    await service.handle(c.PUBLISHED, m.VersionPublished(version="0.0", digest="d", nbytes=1), "k-publish")
    await service.handle(c.FLIP, m.FlipRequest(replica_id="r0", version="0.0", wait_s=0), None)
    timings = {"transfer_s": 0.0, "verify_s": 0.0, "pause_s": 0.0}
    await service.handle(c.READY, m.ReplicaReady(replica_id="r0", version="0.0", digest="d", **timings), "k-ready")


def lease(n: int, wait_s: float = 0.0) -> m.LeaseRequest:
    return m.LeaseRequest(worker_id="w", n=n, wait_s=wait_s)


async def status(service: Service) -> Status:
    return Status.model_validate_json(await service.handle(c.STATUS, StatusRequest(), None))


@anyio_test
async def test_state_and_answers_survive_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    service = await open_service(tmp_path / "c.db", clock)
    await begin(service)
    first = await service.handle(c.LEASE, lease(3), "k-lease")
    assert await service.handle(c.LEASE, lease(3), "k-lease") == first
    before = await status(service)
    await service.close()
    service = await open_service(tmp_path / "c.db", clock)
    assert await status(service) == before
    assert await service.handle(c.LEASE, lease(3), "k-lease") == first
    assert await service.handle(c.START, m.TrainerStart(), "k-start") == b'{"lineage":0,"step":0}'
    assert len(m.LeaseReply.model_validate_json(await service.handle(c.LEASE, lease(3), "k-other")).leases) == 1
    await service.close()


@anyio_test
async def test_two_calls_under_one_key_at_once_are_one_call(tmp_path: Path) -> None:
    service = await open_service(tmp_path / "c.db", ManualClock(1000.0))
    await begin(service)
    replies = await asyncio.gather(*[service.handle(c.LEASE, lease(1), "k") for _ in range(5)])
    assert len(set(replies)) == 1
    assert sum((await status(service)).attempts.values()) == 1
    await service.close()


@anyio_test
async def test_a_waiting_lease_wakes_when_a_version_gets_ready(tmp_path: Path) -> None:
    service = await open_service(tmp_path / "c.db", ManualClock(1000.0))
    waiting = asyncio.create_task(service.handle(c.LEASE, lease(2, wait_s=20.0), "k"))
    await asyncio.sleep(0)
    await begin(service)
    reply = m.LeaseReply.model_validate_json(await asyncio.wait_for(waiting, timeout=2.0))
    assert len(reply.leases) == 2
    await service.close()


@anyio_test
async def test_a_replica_that_generates_is_woken_when_a_lease_expires(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    service = await open_service(tmp_path / "c.db", clock)
    await begin(service)
    leased = m.LeaseReply.model_validate_json(await service.handle(c.LEASE, lease(1), "k"))
    name = leased.leases[0].attempt_id
    asked = m.EndedRequest(replica_id="r0", attempt_ids=[name], wait_s=20.0)
    waiting = asyncio.create_task(service.handle(c.ENDED, asked, None))
    await asyncio.sleep(0)
    clock.advance(1000.0)
    reply = m.EndedReply.model_validate_json(await asyncio.wait_for(waiting, timeout=5.0))
    assert reply.ended == {name: "lease_expired"}
    await service.close()


@anyio_test
async def test_closing_sends_waiting_calls_away(tmp_path: Path) -> None:
    service = await open_service(tmp_path / "c.db", ManualClock(1000.0))
    waiting = asyncio.create_task(service.handle(c.LEASE, lease(2, wait_s=20.0), "k"))
    await asyncio.sleep(0)
    await service.close()
    with pytest.raises(Closing):
        await asyncio.wait_for(waiting, timeout=2.0)
    with pytest.raises(Closing):
        await service.handle(c.STATUS, StatusRequest(), None)


@anyio_test
async def test_many_calls_share_a_commit(tmp_path: Path) -> None:
    service = await open_service(tmp_path / "c.db", ManualClock(1000.0))
    store = service._store
    before = store.commits
    registrations = [m.ReplicaRegister(replica_id=f"r{i}", base_url="http://r/v1", node="n") for i in range(200)]
    await asyncio.gather(*[service.handle(c.REGISTER, r, r.replica_id) for r in registrations])
    assert store.commits - before < 100
    await service.close()


@anyio_test
async def test_a_database_that_fails_ends_the_service(tmp_path: Path) -> None:
    connection = open_database(tmp_path / "c.db")
    queue = Queue(make_config(), make_tasks(3), [], "secret")
    service = Service(queue, Store(connection), ManualClock(1000.0))
    await service.start()
    await service._store.call(lambda c: c.execute("DROP TABLE replicas"))
    register = m.ReplicaRegister(replica_id="r0", base_url="http://r0/v1", node="n")
    with pytest.raises(Closing):
        await service.handle(c.REGISTER, register, "k")
    assert service.failed.is_set()
    await service.close()


def test_a_database_of_another_schema_is_refused(tmp_path: Path) -> None:
    open_database(tmp_path / "c.db").close()
    connection = sqlite3.connect(tmp_path / "c.db")
    connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    connection.commit()
    connection.close()
    with pytest.raises(EnvironmentFault, match="schema 99"):
        open_database(tmp_path / "c.db")


@anyio_test
async def test_what_was_queued_before_a_write_error_is_not_committed_after_it(tmp_path: Path) -> None:
    store = Store(open_database(tmp_path / "c.db"))
    store.start()
    begun, go_on = threading.Event(), threading.Event()

    def full_disk(connection: sqlite3.Connection) -> None:
        begun.set()
        go_on.wait(5)
        connection.execute("ROLLBACK")  # as SQLite does by itself on a full disk
        raise sqlite3.OperationalError("database or disk is full")

    first = asyncio.create_task(store.call(full_disk))
    await asyncio.to_thread(begun.wait, 5)
    later = asyncio.create_task(store.call(lambda c: c.execute("INSERT INTO meta VALUES ('later', '1')")))
    await asyncio.sleep(0)
    go_on.set()
    for call in (first, later):
        with pytest.raises(EnvironmentFault, match="disk is full"):
            await call
    await store.close()
    connection = sqlite3.connect(tmp_path / "c.db")
    assert connection.execute("SELECT * FROM meta WHERE key = 'later'").fetchall() == []
    connection.close()


@anyio_test
async def test_a_row_that_cannot_be_understood_breaks_the_store_and_leaves_no_transaction(tmp_path: Path) -> None:
    store = Store(open_database(tmp_path / "c.db"))
    store.start()
    with pytest.raises(EnvironmentFault, match="not a policy version"):
        await asyncio.wait_for(store.call(lambda _: PolicyVersion.parse("x")), timeout=2.0)
    assert store.broken is not None
    assert not store._connection.in_transaction
    await store.close()


@anyio_test
async def test_a_ticker_that_dies_ends_the_service_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def tick(now: float) -> None:
        raise RuntimeError("a defect in the ticker")

    monkeypatch.setattr("hpcrl.coordinator.service.TICK_S", 0.0)
    service = await open_service(tmp_path / "c.db", ManualClock(1000.0))
    monkeypatch.setattr(service._queue, "tick", tick)
    await asyncio.wait_for(service.failed.wait(), timeout=2.0)
    assert "a defect in the ticker" in caplog.text
    await service.close()
