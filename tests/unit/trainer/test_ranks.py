"""Real gloo ranks: equal gradients for any division, no step for anybody when one rank is not finite, one cause for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import worlds

from hpcrl.errors import EnvironmentFault
from hpcrl.trainer.distributed import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return worlds.run_world(list(worlds.SCENARIOS), 2, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    return worlds.gradient(ALONE, [list(range(worlds.SAMPLES))], 10_000)


@pytest.mark.parametrize("max_tokens", [1, 50, 120])
def test_micro_batching_does_not_change_the_gradient(reference: torch.Tensor, max_tokens: int) -> None:
    other = worlds.gradient(ALONE, [list(range(worlds.SAMPLES))], max_tokens)
    assert reference.abs().max() > 1e-3
    assert (other - reference).abs().max() <= 1e-6


def test_two_uneven_ranks_give_the_gradient_of_one(reference: torch.Tensor, pair: dict[str, list[Any]]) -> None:
    for rank_0, rank_1 in zip(*pair["gradients"], strict=True):
        assert torch.equal(rank_0, rank_1)
        assert (rank_0 - reference).abs().max() <= 1e-6


def test_nobody_steps_when_one_rank_is_not_finite(pair: dict[str, list[Any]]) -> None:
    for result in pair["non_finite"]:
        assert result["skipped"]
        assert result["unchanged"]
        assert result["stepped"]
    assert torch.equal(pair["non_finite"][0]["weights"], pair["non_finite"][1]["weights"])


def test_a_run_on_two_ranks_is_the_run_on_one(pair: dict[str, list[Any]], tmp_path: Path) -> None:
    alone = worlds.whole_run(ALONE, tmp_path)
    first, second = pair["whole_run"]
    assert torch.equal(first["weights"], second["weights"])
    assert (first["weights"] - alone["weights"]).abs().max() <= 1e-5
    assert first["told"] == alone["told"]
    assert second["told"] == []
    assert first["published"] == second["published"] == ["0.0", "0.1", "0.2", "0.3"]


def test_one_ranks_failure_is_known_to_all(pair: dict[str, list[Any]]) -> None:
    first, second = pair["failures"]
    assert first == ["trainer rank 1: bad_shard: shards/x.h5: truncated", "no such thing"]
    assert second == ["bad_shard: shards/x.h5: truncated", "trainer rank 0: no such thing"]


def test_an_unreachable_master_is_an_environment_fault() -> None:
    with pytest.raises(EnvironmentFault, match="trainer rank 1 of 2 cannot join"):
        Ranks.connect(1, 2, "127.0.0.1", 1, timeout_s=1)
