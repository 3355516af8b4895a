from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from hpcrl.protocol.messages import SealedItem
from hpcrl.run.sealer import Sealer
from hpcrl.trajectory import ShardCache, ShardWriter, Trajectory


def trajectory(attempt_id: str) -> Trajectory:
    return Trajectory(
        run_id="run",
        task_id="t",
        group_id="g",
        rollout_id="g-r0",
        attempt_id=attempt_id,
        split="train",
        policy_version="0.3",
        environment_version="e",
        verifier_version="v",
        token_ids=np.arange(5, dtype=np.int32),
        logprobs=np.array([0, 0, -1, -1, 0], dtype=np.float32),
        loss_mask=np.array([0, 0, 1, 1, 0], dtype=np.uint8),
        segments=np.array([0], dtype=np.int32),
        spans=np.array([[2, 4, 0, 3]], dtype=np.int32),
        reward=1.0,
        first_token_at=12.5,
    )


def seal(
    tmp_path: Path, names: list[str], seal_every: int, seal_after_s: float, alive: int = 100
) -> list[list[SealedItem]]:
    reports: list[list[SealedItem]] = []

    async def main() -> None:
        done = asyncio.Event()

        async def report(items: list[SealedItem], seal_s: float) -> None:
            assert seal_s > 0
            reports.append(items)
            if sum(map(len, reports)) == len(names):
                done.set()

        writer = ShardWriter(tmp_path / "shards", "n1-0")
        sealer = Sealer(tmp_path, writer, report, seal_every=seal_every, seal_after_s=seal_after_s, alive=lambda: alive)
        loop = asyncio.create_task(sealer.run())
        for name in names:
            sealer.add(trajectory(name))
        await asyncio.wait_for(done.wait(), 5.0)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    asyncio.run(main())
    return reports


def test_full_shards_do_not_wait_and_the_rest_waits_its_time(tmp_path: Path) -> None:
    reports = seal(tmp_path, ["a", "b", "c", "d", "e"], seal_every=2, seal_after_s=0.05)
    assert [[item.attempt_id for item in items] for items in reports] == [["a", "b"], ["c", "d"], ["e"]]


def test_reports_say_where_the_rows_are(tmp_path: Path) -> None:
    (items,) = seal(tmp_path, ["a", "b"], seal_every=8, seal_after_s=0.05)
    cache = ShardCache(tmp_path)
    for item in items:
        assert not Path(item.shard).is_absolute()
        assert cache.read(item.shard, item.row).attempt_id == item.attempt_id
    first = items[0]
    assert (first.tokens, first.trained_tokens, first.first_token_at) == (5, 2, 12.5)
    assert (first.oldest_version, first.newest_version) == ("0.3", "0.3")


def test_the_last_ones_alive_do_not_wait_for_company(tmp_path: Path) -> None:
    reports = seal(tmp_path, ["a", "b"], seal_every=8, seal_after_s=60.0, alive=2)
    assert [item.attempt_id for items in reports for item in items] == ["a", "b"]
