"""An attempt whose lease expires, and one that is failed, stop generating in vLLM although their clients wait."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import aiohttp
import pytest
from replicas import Client, never_ending_model
from test_coordinator import Coordinator, Roles, coordinator  # noqa: F401 - the fixture

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import InferenceSection, ModelSection, RolloutSection, TasksSection
from hpcrl.inference.replica import Replica
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.keyfiles import read_keys
from hpcrl.protocol.record import AttemptRecord
from hpcrl.run.unwanted import drop_unwanted

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

_TOKENS = 8000
"""More than the engine samples before the lease ends."""


async def running(session: aiohttp.ClientSession) -> int:
    """Requests that vLLM computes now."""
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")))


async def story(run: Coordinator, roles: Roles, model: Path, folder: Path) -> list[AttemptRecord]:
    config = RunConfig(
        model=ModelSection(path=str(model)),
        tasks=TasksSection(train="unused"),
        rollout=RolloutSection(context_tokens=8192, max_tokens=_TOKENS),
        inference=InferenceSection(enforce_eager=True, kv_cache_gib=0.25, start_timeout_s=400),
    )
    secret = read_keys(run.run, "inference").proxies
    replica = Replica(config, secret=secret, replica_id="r0", model=model, initial_version="0.0", log_dir=folder)
    await replica.start()
    url = await replica.serve("127.0.0.1")
    client = c.AsyncClient(run.run, "inference")
    watch = asyncio.create_task(drop_unwanted(client, replica, "r0"))
    try:
        connector = aiohttp.UnixConnector(str(replica.engine_socket))
        async with aiohttp.ClientSession("http://vllm", connector=connector) as session:
            records: list[AttemptRecord] = []
            for end in ("failed", "expires"):
                lease = (await asyncio.to_thread(roles.lease, 1))[0]
                harness = Client(url, lease.attempt_id, secret=secret)
                assert harness.key == lease.api_key
                call = asyncio.create_task(harness.chat([{"role": "user", "content": "x"}]))
                while not await running(session):
                    await asyncio.sleep(0.02)
                if end == "failed":
                    failed = m.FailureItem(attempt_id=lease.attempt_id, kind="infra", reason="sandbox_dead")
                    report = m.FailureReport(reporter_id="w", items=[failed])
                    await asyncio.to_thread(roles.worker.call, c.FAILED, report)
                while sum((await asyncio.to_thread(roles.status)).failures.values()) == len(records):
                    await asyncio.sleep(0.02)
                began = time.monotonic()
                while await running(session):
                    await asyncio.sleep(0.02)
                print(f"{end}: vLLM runs nothing {time.monotonic() - began:.2f} s after the attempt had ended")
                status, _ = await call
                assert status == 499
                assert (await harness.chat([{"role": "user", "content": "x"}]))[0] == 409
                records.append(await harness.record())
            return records
    finally:
        watch.cancel()
        await client.close()
        await replica.stop()


def test_generations_of_ended_attempts_stop(
    coordinator: Coordinator,  # noqa: F811
    tmp_path: Path,
) -> None:
    coordinator.end(signal.SIGTERM)
    text = coordinator.run.config.read_text()
    coordinator.run.config.write_text(
        text.replace("lease_s: 20.0", "lease_s: 1.0").replace("heartbeat_s: 5.0", "heartbeat_s: 0.4")
    )
    coordinator.start()
    roles = Roles(coordinator.run)
    roles.begin()
    records = asyncio.run(story(coordinator, roles, never_ending_model(tmp_path / "model"), tmp_path))
    assert [[request.ending for request in record.requests] for record in records] == [["client_cancelled"]] * 2
    assert [record.token_ids for record in records] == [[], []]
