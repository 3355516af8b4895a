"""Packing: every trained token once, the same logprobs as one sequence at a time, tool tokens nowhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import micro_batches, record_logprobs, tiny_model, trajectory

from hpcrl.errors import DataError, UserError
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer import model as model_module
from hpcrl.trainer.batch import sequences_of
from hpcrl.trainer.model import Policy
from hpcrl.trainer.plan import balanced

LENGTHS = [(40,), (12,), (9,), (25, 14), (8, 8, 30), (33,)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(tiny_model(), temperature=0.7)


@pytest.mark.parametrize("max_tokens", [1, 40, 90, 10_000])
@pytest.mark.parametrize("logit_elements", [1 << 26, 64 * 3])
def test_packed_logprobs_equal_those_of_single_sequences(
    policy: Policy, max_tokens: int, logit_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "_LOGIT_ELEMENTS", logit_elements)
    samples = [record_logprobs(policy, trajectory(i, lengths=sizes)) for i, sizes in enumerate(LENGTHS)]
    batches = micro_batches(samples, [0.0] * len(samples), max_tokens)
    assert sum(len(batch.target) for batch in batches) == sum(sample.trained_tokens for sample in samples)
    assert all(batch.input_ids.numel() <= max_tokens or len(batch.input_ids) == 1 for batch in batches)
    for batch in batches:
        logprobs, entropy = policy.logprobs(batch)
        assert (logprobs - batch.behaviour).abs().max() <= 1e-5
        assert torch.isfinite(entropy).all()


def test_mixed_lengths_share_rows_and_similar_ones_do_not() -> None:
    mixed = micro_batches([trajectory(i, lengths=(n,)) for i, n in enumerate([60, 20, 20, 15])], [0.0] * 4, 10_000)
    assert len(mixed) == 1
    assert mixed[0].input_ids.shape[0] == 2
    similar = micro_batches([trajectory(i, lengths=(40 + i,)) for i in range(8)], [0.0] * 8, 10_000)
    assert similar[0].input_ids.shape[0] == 8
    assert all((row.diff() == 1).all() for row in similar[0].position_ids)


@given(sizes=st.lists(st.integers(8, 60), min_size=1, max_size=30), max_tokens=st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_every_trained_token_is_packed_exactly_once(sizes: list[int], max_tokens: int) -> None:
    samples = [trajectory(i, lengths=(size,)) for i, size in enumerate(sizes)]
    batches = micro_batches(samples, [float(i) for i in range(len(sizes))], max_tokens)
    packed: dict[float, list[float]] = {}
    for batch in batches:
        assert len(set(batch.source.tolist())) == len(batch.source)
        for value, logprob in zip(batch.advantage.tolist(), batch.behaviour.tolist(), strict=True):
            packed.setdefault(value, []).append(logprob)
    for index, sample in enumerate(samples):
        assert packed[float(index)] == sample.logprobs[sample.loss_mask == 1].tolist()


def test_tool_tokens_enter_neither_loss_nor_denominator() -> None:
    sample = trajectory(1, lengths=(30,))
    (before,) = sequences_of(sample, 1.0, PolicyVersion(0, 0))
    assert before.trained_tokens == int(sample.loss_mask.sum())
    changed = sample.logprobs.copy()
    changed[sample.loss_mask == 0] = -9
    (batch,) = micro_batches([replace(sample, logprobs=changed)], [1.0], 100)
    assert (batch.behaviour > -9).all()
    assert batch.target.tolist() == sample.token_ids[sample.loss_mask == 1].tolist()


def test_a_trained_token_without_version_is_refused() -> None:
    sample = trajectory(1, lengths=(30,))
    with pytest.raises(DataError, match=r"g000000-r1-a0: \d+ trained tokens have no policy version"):
        sequences_of(replace(sample, spans=sample.spans[1:]), 1.0, PolicyVersion(0, 0))


def test_current_marks_tokens_of_exactly_this_version() -> None:
    sample = trajectory(1, lengths=(30,))
    spans = sample.spans.copy()
    spans[1, 3] = 4
    (sequence,) = sequences_of(replace(sample, spans=spans), 1.0, PolicyVersion(0, 4))
    assert np.flatnonzero(sequence.current).tolist() == list(range(spans[1, 0], spans[1, 1]))


def test_ranks_get_equal_loads_and_everything_once() -> None:
    sizes = [200, 190, 10, 10, 180, 30, 20]
    shares = balanced(sizes, 3)
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= 10
    assert balanced([5], 3) == [[0], [], []]


def test_models_that_change_logits_after_the_head_are_refused() -> None:
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, args, output: output)  # harmless
    Policy(model, 1.0)
    forward = model.forward

    def scaled(**kwargs: object) -> object:
        output = forward(**kwargs)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    with pytest.raises(UserError, match="changes logits after its output layer"):
        Policy(model, 1.0)
