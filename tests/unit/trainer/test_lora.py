"""The adapter: what it computes, what is trained, saved, published and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from samples import config_for, micro_batches, save_model, tiny_model, trajectory
from torch.distributed.checkpoint import FileSystemReader

from hpcrl.config.sections import LoraSection
from hpcrl.errors import DataError, UserError
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.checkpoint import Checkpoints
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.lora import LoraLinear, adapter_tensors, add_adapters, export_adapter, merged_state
from hpcrl.trainer.model import Policy, export_hf
from hpcrl.trainer.update import Updater, make_optimizer
from hpcrl.weights.snapshot import Snapshot

ALONE = Ranks(0, 1, torch.device("cpu"))
LORA = LoraSection(rank=4, alpha=8.0, target_modules=["q_proj", "down_proj"])
IDS = torch.arange(12)[None]


def adapted(seed: int = 0, *, started: bool = False) -> Any:
    """The tiny model with adapters; ``started``: B is no longer zero."""
    model = tiny_model().eval()
    add_adapters(model, LORA, seed)
    if started:
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in adapter_tensors(model):
            if ".lora_B." in name:
                tensor.data.normal_(generator=generator)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def flat(model: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for _, tensor in adapter_tensors(model)])


def test_it_starts_as_the_base_and_computes_what_the_merged_model_does() -> None:
    assert torch.equal(logits(adapted()), logits(tiny_model().eval()))
    model = adapted(started=True)
    plain = tiny_model().eval()
    plain.load_state_dict(merged_state(model))
    assert not torch.allclose(logits(plain), logits(adapted()), atol=1e-2)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


def test_the_matrices_are_used_as_they_are_published() -> None:
    """Float32 while they are trained, in the model's type where they are used."""
    layer = LoraLinear(torch.nn.Linear(8, 6).bfloat16(), 2, 1.0, torch.Generator().manual_seed(0))
    layer.lora_B.data.normal_()
    rounded = LoraLinear(layer, 2, 1.0, torch.Generator())
    for name in ("lora_A", "lora_B"):
        assert getattr(layer, name).dtype == torch.float32
        setattr(rounded, name, torch.nn.Parameter(getattr(layer, name).detach().bfloat16().float()))
    x = torch.randn(3, 8).bfloat16()
    assert torch.equal(layer(x), rounded(x))
    assert torch.equal(layer.merged_weight(), rounded.merged_weight())
    layer(x).sum().backward()
    assert layer.lora_B.grad is not None


def test_ranks_draw_the_same_adapter_whatever_was_drawn_before() -> None:
    first = adapted(seed=3)
    torch.rand(5)
    assert torch.equal(flat(first), flat(adapted(seed=3)))
    assert not torch.equal(flat(first), flat(adapted(seed=4)))


def test_only_the_adapter_is_trained() -> None:
    policy = Policy(adapted(), 1.0)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    config = config_for(Path("unused"))
    updater = Updater(policy, make_optimizer(policy, config.trainer), ALONE, config.trainer)
    updater.set_learning_rate(1)
    sample = trajectory(0, lengths=(20,))
    for first in (True, False):
        result = updater.minibatch(micro_batches([sample], [1.0], 100), sample.trained_tokens, first=first)
        assert not result.skipped
    changed = {name for name, tensor in policy.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.endswith(("lora_A", "lora_B"))}
    assert len(changed) == 2 * 2 * 2  # layers, targets, matrices
    assert len(updater.optimizer.state) == len(changed)


def test_an_unknown_target_is_named_with_what_there_is() -> None:
    model = tiny_model(tie_word_embeddings=False)
    message = r"lora\.target_modules: Qwen3ForCausalLM has no linear layer qq_proj, lm_head; it has down_proj, gate_proj, .*, v_proj"
    with pytest.raises(UserError, match=message):
        add_adapters(model, LoraSection(target_modules=["q_proj", "qq_proj", "lm_head"]), 0)


def test_a_checkpoint_holds_the_adapter_and_its_optimizer_only(tmp_path: Path) -> None:
    policy = Policy(adapted(), 1.0)
    optimizer = make_optimizer(policy, config_for(Path("unused")).trainer)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoints = Checkpoints(tmp_path, ALONE, keep=1)
    saved = checkpoints.save(policy, optimizer, PolicyVersion(0, 1))
    keys = FileSystemReader(saved.path).read_metadata().state_dict_metadata
    assert {key for key in keys if key.startswith("model.")} == {
        f"model.{name}" for name in policy.model.state_dict() if name.endswith(("lora_A", "lora_B"))
    }
    other = Policy(adapted(seed=9), 1.0)
    other_optimizer = make_optimizer(other, config_for(Path("unused")).trainer)
    checkpoints.load(saved, other, other_optimizer)
    assert torch.equal(flat(other.model), flat(policy.model))
    assert torch.equal(logits(other.model), logits(policy.model))
    moments = [state["exp_avg"] for state in other_optimizer.state.values()]
    assert len(moments) == len(policy.parameters())
    assert all(moment.abs().sum() > 0 for moment in moments)
    whole = Policy(tiny_model(), 1.0)
    saved = Checkpoints(tmp_path / "whole", ALONE, keep=1).save(
        whole, make_optimizer(whole, config_for(Path("unused")).trainer), PolicyVersion(0, 1)
    )
    with pytest.raises(DataError, match="cannot be loaded into this model"):
        checkpoints.load(saved, other, other_optimizer)


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    batches = worlds.prepare(tmp_path)
    config = config_for(tmp_path / "model", checkpoint_every=1, keep_checkpoints=5)
    config = config.model_copy(update={"lora": LORA})
    _, through, _, _ = worlds.train(tmp_path, ALONE, config, batches)
    (tmp_path / "run/checkpoints/0.3/COMPLETE").unlink()
    result, resumed, _, _ = worlds.train(tmp_path, ALONE, config, batches, lineage=1)
    assert result["version"] == "1.3"
    assert torch.equal(resumed, through)


@pytest.mark.parametrize("change", ["other weights", "no adapter"])
def test_a_checkpoint_is_not_resumed_on_another_base(tmp_path: Path, change: str) -> None:
    batches = worlds.prepare(tmp_path)
    plain = config_for(tmp_path / "model", checkpoint_every=1)
    config = plain.model_copy(update={"lora": LORA})
    worlds.train(tmp_path, ALONE, config, batches)
    if change == "other weights":
        weights = tmp_path / "model/model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        plain = config
    wanted = r"0\.\d belongs to an adapter of the base weights .*, but the configuration gives .*; resume with the model\.path and lora"
    with pytest.raises(DataError, match=wanted):
        worlds.train(tmp_path, ALONE, plain, batches, lineage=1)


def test_only_the_adapter_travels() -> None:
    model = adapted(started=True)
    snapshot = Snapshot(lambda: adapter_tensors(model), "bfloat16")
    snapshot.capture()
    parameters = sum(LORA.rank * (layer.in_features + layer.out_features) for layer in layers(model))
    assert 2 * parameters <= snapshot.layout.nbytes < 2 * parameters + 64 * len(snapshot.layout.tensors)
    names = [entry.name for entry in snapshot.layout.tensors]
    assert names[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert len(names) == 8


def layers(model: Any) -> list[LoraLinear]:
    return [layer for layer in model.modules() if isinstance(layer, LoraLinear)]


def test_what_is_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = save_model(tmp_path / "source")
    model = adapted(started=True)
    export_hf(Policy(model, 1.0), source, tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)
    assert isinstance(layers(model)[0], LoraLinear)  # training could go on
    export_adapter(model, LORA, str(source), "bfloat16", tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    expected = {name: tensor.detach().bfloat16() for name, tensor in adapter_tensors(model)}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8.0, ["q_proj", "down_proj"])
