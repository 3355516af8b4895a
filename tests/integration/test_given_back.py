"""Batches that the real trainer gives back to the real coordinator: an altered shard, and trajectories too far from its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_stack import running, train

from hpcrl.config import load_config
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.history import HistoryRequest, RolloutHistory
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.states import State
from hpcrl.protocol.status import Status, StatusRequest
from hpcrl.trainer.feed import Coordinator

pytestmark = pytest.mark.timeout(900)
ROLLOUTS = {f"g{group:06d}-r{index}" for group in range(12) for index in range(4)}


class Overheard:
    """A client that remembers the batch given out last for each version; ``on_batch`` may act before the trainer sees it."""

    def __init__(self, client: Coordinator) -> None:
        self._client = client
        self.batches: dict[str, list[m.TrajectoryRef]] = {}
        self.given_back: list[m.Message] = []

    def call(self, endpoint: c.Endpoint[Any, Any], request: Any) -> Any:
        reply = self._client.call(endpoint, request)
        if endpoint in (c.BAD_SHARD, c.OFF_POLICY):
            self.given_back.append(request)
        elif endpoint is c.BATCH and reply.groups is not None:
            refs = [reference for group in reply.groups for reference in group.trajectories]
            self.on_batch(reply.version, refs)
            self.batches[reply.version] = refs
        return reply

    def on_batch(self, version: str, refs: list[m.TrajectoryRef]) -> None:
        """Nothing by default."""


def trained_once_each(run: RunDir, overheard: Overheard) -> Status:
    """What the batches held that were trained is every rollout of the run once, and the coordinator's books say the same."""
    trained = [reference.rollout_id for refs in overheard.batches.values() for reference in refs]
    assert sorted(trained) == sorted(ROLLOUTS)
    admin = c.Client(run, "admin")
    try:
        status = admin.call(c.STATUS, StatusRequest())
    finally:
        admin.close()
    assert (status.step, status.duplicates, status.consumed) == (6, 0, len(ROLLOUTS))
    return status


def history(run: RunDir, rollout_id: str) -> RolloutHistory:
    admin = c.Client(run, "admin")
    try:
        return admin.call(c.HISTORY, HistoryRequest(rollout_id=rollout_id))
    finally:
        admin.close()


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [alter, truncate, Path.unlink])
def test_a_damaged_shard_is_named_put_aside_and_its_samples_are_trained_all_the_same(
    tmp_path: Path, damage: Any
) -> None:
    damaged: list[list[m.TrajectoryRef]] = []

    class Vandal(Overheard):
        """Damages a sealed shard that the trainer has not read yet, when the batch with it is given out."""

        def on_batch(self, version: str, refs: list[m.TrajectoryRef]) -> None:
            before = {reference.shard for earlier in self.batches.values() for reference in earlier}
            fresh = [reference for reference in refs if reference.shard not in before]
            if version in ("0.2", "0.3") and fresh and len(damaged) < 1:
                damage(run.root / fresh[0].shard)
                damaged.append([reference for reference in refs if reference.shard == fresh[0].shard])

    with running(tmp_path) as run:
        config = load_config(run.config)
        overheard: list[Overheard] = []
        result = train(run, config, 0.0, lambda client: overheard.append(Vandal(client)) or overheard[0])
        assert result["version"] == "0.6"
        status = trained_once_each(run, overheard[0])
        [lost] = damaged
        [told] = overheard[0].given_back
        assert isinstance(told, m.BadShard) and told.shard == lost[0].shard and lost[0].shard in told.reason
        kept = [path.name for path in (run.shards / "quarantine").iterdir()]
        assert kept == ([] if damage is Path.unlink else [Path(told.shard).name])
        assert not (run.root / told.shard).exists()
        assert status.failures["data:bad_shard"] >= len(lost)
        assert set(status.failures) == {"data:bad_shard"}
        for reference in lost:
            attempts = {attempt.attempt_id: attempt for attempt in history(run, reference.rollout_id).attempts}
            assert attempts[reference.attempt_id].state is State.INFRA_FAILED
            [again] = [attempt for attempt in attempts.values() if attempt.state is State.CONSUMED]
            assert again.shard != told.shard


def run_with_bound(tmp_path: Path, bound: float | None) -> tuple[Status, Overheard]:
    with running(tmp_path, staleness={"max_ratio_dev": bound}) as run:
        config = load_config(run.config)
        overheard: list[Overheard] = []
        train(run, config, 0.2, lambda client: overheard.append(Overheard(client)) or overheard[0])
        return trained_once_each(run, overheard[0]), overheard[0]


def test_what_deviates_too_far_is_never_trained_and_drawn_again(tmp_path: Path) -> None:
    free, without = run_with_bound(tmp_path / "free", None)
    assert not without.given_back and "ratio" not in free.cancelled
    assert any(lag > 0 for lag in free.lag_histogram)
    status, overheard = run_with_bound(tmp_path / "bound", 1e-4)
    told = [request for request in overheard.given_back if isinstance(request, m.OffPolicy)]
    assert told and all(value > 1e-4 for request in told for value in request.deviations.values())
    far = {attempt_id for request in told for attempt_id in request.deviations}
    trained = {reference.attempt_id for refs in overheard.batches.values() for reference in refs}
    assert not far & trained
    assert status.cancelled["ratio"] == len(far)
    # At this learning rate one step moves every trajectory past the bound: only those of the present weights are left.
    assert status.lag_histogram == {0: len(ROLLOUTS)}
