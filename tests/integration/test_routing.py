"""Where new attempts go: the real coordinator, two real replicas, their proxies and reports; only vLLM is a stand-in that holds KV."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_coordinator import Coordinator, Roles, coordinator  # noqa: F401 - the fixture
from toy import END, ToyTokenizer

from hpcrl.config import RunConfig, load_config
from hpcrl.inference.replica import Replica
from hpcrl.inference.supervisor import Generated, TokenSpan
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.keyfiles import read_keys
from hpcrl.protocol.messages import Sampling
from hpcrl.run.load import report_load
from hpcrl.run.replica_reports import ReplicaReports

pytestmark = pytest.mark.timeout(300)

VERSION = "0.0"
SETTLED = 25
"""Samples after which the mean is what the last ones are."""


class Server:
    """Instead of vLLM: a generation holds its tokens' part of the KV cache until it is let go."""

    def __init__(self, capacity: int, startable: asyncio.Event) -> None:
        self.served_version, self.serving = VERSION, False
        self.asked = self.held = self.looks = 0
        self.go = asyncio.Event()
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._capacity = capacity
        self._startable = startable

    async def start(self) -> float:
        await self._startable.wait()
        self.serving = True
        return 0.0

    async def generate(
        self, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        self.asked += 1
        size = len(token_ids) + sampling.max_tokens
        self.held += size
        try:
            await self.go.wait()
        finally:
            self.held -= size
        return Generated([*b"ok", END], [-0.1] * 3, "stop", [TokenSpan(0, 3, VERSION)])

    async def kv_use(self) -> float:
        self.looks += 1
        return self.held / self._capacity

    async def wait_dead(self) -> str:
        how = await asyncio.shield(self.death)
        self.serving = False
        return how

    async def stop(self) -> None:
        self.serving = False
        if not self.death.done():
            self.death.set_result("stopped")


class Site:
    """A replica, its servers one after the other, and what it reports, as ``run/inference.py`` wires them."""

    def __init__(self, run: Coordinator, config: RunConfig, name: str, capacity: int) -> None:
        self.name, self.servers, self._capacity = name, list[Server](), capacity
        self.startable = asyncio.Event()
        self.startable.set()
        self._client = c.AsyncClient(run.run, "inference")
        self.replica = Replica(
            config,
            secret=read_keys(run.run, "inference").proxies,
            replica_id=name,
            model=Path("m"),
            initial_version=VERSION,
            log_dir=run.run.root,
            on_down=lambda: asyncio.to_thread(self.reports.down),
            on_restart=lambda version: asyncio.to_thread(self.reports.restarted),
            tokenizer=ToyTokenizer(),
            new_server=self._server,  # type: ignore[arg-type]
        )
        self.reports = ReplicaReports(c.Client(run.run, "inference"), self.replica, name)

    def _server(self, slot: int, version: str | None) -> Any:
        self.servers.append(Server(self._capacity, self.startable))
        return self.servers[-1]

    async def start(self) -> None:
        await self.replica.start()
        await asyncio.to_thread(self.reports.register, await self.replica.serve("127.0.0.1"), "node")
        self.load = asyncio.create_task(report_load(self._client, self.replica, self.name, sample_s=0.02))

    async def ready(self) -> None:
        times = {"transfer_s": 0.0, "verify_s": 0.0, "pause_s": 0.0}
        await asyncio.to_thread(
            self.reports.ready, m.ReplicaReady(replica_id=self.name, version=VERSION, digest="d", **times)
        )

    async def settled(self) -> None:
        """The coordinator knows of the present KV use."""
        until = self.servers[-1].looks + SETTLED
        while self.servers[-1].looks < until:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self.load.cancel()
        await self.replica.stop()
        await self._client.close()


class Harnesses:
    """Leases attempts as a worker does; each makes a long call at once."""

    def __init__(self, roles: Roles, session: aiohttp.ClientSession, sites: list[Site]) -> None:
        self._roles, self._session, self._sites = roles, session, sites
        self.calls: list[asyncio.Task[int]] = []

    async def new(self, count: int) -> list[str]:
        """Lease so many, one after the other; the replicas they went to. Returns when their calls generate, and that is known."""
        went = []
        for _ in range(count):
            (lease,) = await asyncio.to_thread(self._roles.lease, 1)
            asked = [sum(server.asked for server in site.servers) for site in self._sites]
            self.calls.append(asyncio.create_task(self._call(lease)))
            async with asyncio.timeout(30):
                while [sum(server.asked for server in site.servers) for site in self._sites] == asked:
                    await asyncio.sleep(0.005)
                await asyncio.gather(*(site.settled() for site in self._sites if site.replica.serving))
            went.append(lease.replica_id)
        return went

    async def _call(self, lease: m.Lease) -> int:
        body = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 50}
        headers = {"Authorization": f"Bearer {lease.api_key}"}
        async with self._session.post(f"{lease.base_url}/chat/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status


async def story(run: Coordinator, roles: Roles) -> None:
    config = load_config(run.run.config)
    sites = [Site(run, config, "r0", 4000), Site(run, config, "r1", 8000)]
    small, large = sites
    for site in sites:
        await site.start()
    await asyncio.to_thread(roles.trainer.call, c.START, m.TrainerStart())
    published = m.VersionPublished(version=VERSION, digest="d", nbytes=1)
    await asyncio.to_thread(roles.trainer.call, c.PUBLISHED, published)
    try:
        async with aiohttp.ClientSession() as session:
            harnesses = Harnesses(roles, session, sites)
            await small.ready()  # the other one is registered and serves, but has not said READY
            assert await harnesses.new(4) == ["r0"] * 4
            await large.ready()
            # Each attempt holds twice the share of the small cache: 4 there weigh as much as 8 here. By their number it were 6 and 2.
            assert await harnesses.new(8) == ["r1"] * 8
            assert (small.servers[0].asked, large.servers[0].asked) == (4, 8)
            # Its generations end, their attempts live on with their tools: what counts is what is held.
            large.servers[0].go.set()
            small.servers[0].go.set()
            assert await asyncio.gather(*harnesses.calls) == [200] * 12
            small.servers[0].go.clear()
            await large.settled()
            await small.settled()

            large.startable.clear()
            large.servers[0].death.set_result("killed")
            while large.replica.serving or len(large.servers) < 2:
                await asyncio.sleep(0.005)
            assert await harnesses.new(4) == ["r0"] * 4
            assert large.servers[1].asked == 0
            large.startable.set()
            while not large.replica.serving:
                await asyncio.sleep(0.005)
            await _told(roles, large)
            assert await harnesses.new(2) == ["r1"] * 2
            for server in (small.servers[0], large.servers[1]):
                server.go.set()
            assert await asyncio.gather(*harnesses.calls[12:]) == [200] * 6
    finally:
        for site in sites:
            await site.stop()


async def _told(roles: Roles, site: Site) -> None:
    """The coordinator has heard that the replica is back."""
    while True:
        status = await asyncio.to_thread(roles.status)
        if VERSION in status.replicas[site.name]:
            return
        await asyncio.sleep(0.02)


def test_new_attempts_go_where_most_kv_is_free_and_only_to_ready_replicas(
    coordinator: Coordinator,  # noqa: F811
) -> None:
    coordinator.end(signal.SIGTERM)
    text = coordinator.run.config.read_text()
    for old, new in (
        ("group_size: 2", "group_size: 8"),
        ("groups_per_step: 2", "groups_per_step: 8"),
        ("replicas: 1", "replicas: 2"),
    ):
        assert old in text
        text = text.replace(old, new)
    coordinator.run.config.write_text(text)
    coordinator.start()
    asyncio.run(story(coordinator, Roles(coordinator.run)))
