"""Small real models, trajectories and batches for the trainer's tests."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcrl.config import RunConfig, parse_config
from hpcrl.protocol.messages import Batch, BatchGroup, TrajectoryRef
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.batch import pack, sequences_of
from hpcrl.trainer.model import Policy
from hpcrl.trajectory import ShardWriter, Trajectory

VOCABULARY = 64


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }
    return Qwen3ForCausalLM(Qwen3Config(**(sizes | changes))).float()


def save_model(folder: Path, seed: int = 0) -> Path:
    tiny_model(seed).save_pretrained(folder)
    return folder


def config_for(model: Path, **trainer: Any) -> RunConfig:
    optimizer = {"name": "adam", "lr": 1e-3, "warmup_steps": 2}
    section = {"ranks": 1, "steps": 3, "groups_per_step": 4, "minibatches": 2, "optimizer": optimizer}
    return parse_config(
        {"run": {"seed": 5}, "model": {"path": str(model)}, "tasks": {"train": "t"}, "trainer": section | trainer}
    )


def trajectory(
    index: int, *, version: str = "0.0", lengths: tuple[int, ...] = (), reward: float | None = None, group_size: int = 4
) -> Trajectory:
    """Segments of the given lengths (random if none), each with prompt, sampled, tool and sampled tokens."""
    rng = np.random.default_rng(index)
    sizes = lengths or (int(rng.integers(8, 40)),)
    total = sum(sizes)
    mask = np.zeros(total, np.uint8)
    starts = np.cumsum([0, *sizes[:-1]])
    for start, size in zip(starts, sizes, strict=True):
        mask[start + size // 4 : start + size // 2] = 1
        mask[start + 3 * size // 4 : start + size - 1] = 1
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int)))
    named = PolicyVersion.parse(version)
    group = index // group_size
    return Trajectory(
        run_id="run",
        task_id=f"task{group}",
        group_id=f"g{group:06d}",
        rollout_id=f"g{group:06d}-r{index % group_size}",
        attempt_id=f"g{group:06d}-r{index % group_size}-a0",
        split="train",
        policy_version=version,
        environment_version="e",
        verifier_version="v",
        token_ids=rng.integers(0, VOCABULARY, total, dtype=np.int32),
        logprobs=np.where(mask, -3 * rng.random(total), 0).astype(np.float32),
        loss_mask=mask,
        segments=starts.astype(np.int32),
        spans=np.array([[a, b, *named] for a, b in edges.reshape(-1, 2)], np.int32),
        reward=float(rng.integers(0, 2)) if reward is None else reward,
        first_token_at=1.7e9,
    )


def record_logprobs(policy: Policy, sample: Trajectory) -> Trajectory:
    """The sample with the logprobs that ``policy`` gives it, as if it had been sampled by it."""
    logprobs = sample.logprobs.copy()
    bounds = [*sample.segments.tolist(), sample.tokens]
    with torch.no_grad():
        for start, end in pairwise(bounds):
            ids = torch.from_numpy(sample.token_ids[start:end].astype(np.int64))[None]
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, :-1].float() / policy.temperature
            found = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
            trained = np.flatnonzero(sample.loss_mask[start:end])
            logprobs[start + trained] = found[trained - 1]
    return replace(sample, logprobs=np.minimum(logprobs, 0))


def write_batch(run_dir: Path, samples: list[Trajectory], version: str, writer: str = "w") -> Batch:
    """Seal the samples in shards of three and name them as the coordinator would."""
    shards = ShardWriter(run_dir / "shards", writer)
    groups: dict[str, list[TrajectoryRef]] = {}
    waiting: list[tuple[Trajectory, int]] = []
    for index, sample in enumerate(samples):
        waiting.append((sample, shards.append(sample)))
        if len(waiting) < 3 and index < len(samples) - 1:
            continue
        path, _ = shards.seal()
        for written, row in waiting:
            ref = TrajectoryRef(
                attempt_id=written.attempt_id,
                rollout_id=written.rollout_id,
                shard=f"shards/{path.name}",
                row=row,
                reward=written.reward,
                oldest_version=str(written.oldest_version),
                tokens=written.tokens,
                trained_tokens=written.trained_tokens,
            )
            groups.setdefault(written.group_id, []).append(ref)
        waiting = []
    return Batch(
        version=version,
        groups=[BatchGroup(group_id=name, task_id=name, trajectories=refs) for name, refs in groups.items()],
    )


def micro_batches(samples: list[Trajectory], advantages: list[float], max_tokens: int, version: str = "0.0") -> Any:
    named = PolicyVersion.parse(version)
    pairs = zip(samples, advantages, strict=True)
    return pack([part for sample, value in pairs for part in sequences_of(sample, value, named)], max_tokens)
