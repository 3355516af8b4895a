from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from hpcrl.errors import UserError
from hpcrl.quickstart import warmstart
from hpcrl.quickstart.demonstrations import demonstrate
from hpcrl.quickstart.families import draw
from hpcrl.quickstart.model import new_model


def test_learning_rate_ramps_up_and_decays() -> None:
    shares = [warmstart._rate_share(step, 200) for step in range(1, 201)]
    assert shares[0] == pytest.approx(1 / warmstart.RAMP_STEPS)
    assert max(shares) == 1.0
    assert shares[-1] == pytest.approx(warmstart.FINAL_RATE_SHARE)
    assert shares[40:140] == [1.0] * 100


def test_loss_does_not_depend_on_padding() -> None:
    rng = random.Random(2)
    model = new_model(0)
    demos = sorted((demonstrate(draw(rng, "train"), rng) for _ in range(8)), key=lambda demo: len(demo.token_ids))
    short, long = demos[0], demos[-1]
    assert len(short.token_ids) < len(long.token_ids)
    counts = [sum(demo.is_reply) for demo in (short, long)]
    alone = [warmstart._loss(model, [demo])[1] for demo in (short, long)]
    together = warmstart._loss(model, [short, long])[1]
    assert together == pytest.approx((alone[0] * counts[0] + alone[1] * counts[1]) / sum(counts), rel=1e-4)


@pytest.mark.parametrize("gentle", [False, True])
def test_every_parameter_has_one_optimizer(gentle: bool) -> None:
    model = new_model(0)
    owned = [id(p) for o in warmstart._optimizers(model, gentle) for group in o.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(parameter) for parameter in model.parameters())


def test_training_is_seeded_and_learns() -> None:
    stage = warmstart.Stage("test", 3)
    models = [new_model(0) for _ in range(2)]
    for model in models:
        warmstart.train(model, stage, random.Random(1))
    first, second = (dict(model.named_parameters()) for model in models)
    start = dict(new_model(0).named_parameters())
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)
    assert not any(torch.equal(first[name], start[name]) for name in first)


def test_existing_model_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert warmstart.main(["--out", str(tmp_path)]) == UserError.exit_code
    assert "--force" in capsys.readouterr().err
