"""What a trajectory is, and the layout in which a shard holds it.

A shard is one HDF5 file of flat arrays plus offsets (CSR): row ``i`` of ``token_ids`` is ``token_ids[offsets[i]:offsets[i + 1]]``.

    attribute  schema="hpcrl.trajectory", version=1, writer
    token_ids int32, logprobs float32, loss_mask uint8    | token_offsets int64
    segments int32                                         | segment_offsets int64
    spans int32 (n, 4): start, end, lineage, step          | span_offsets int64
    meta uint8: one UTF-8 JSON object per row (identities, rewards, ending, timings, requests) | meta_offsets int64
    messages uint8: one UTF-8 JSON list per row (the readable transcript)                      | messages_offsets int64
    reward float64, first_token_at float64 (seconds since the epoch)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import DataError
from hpcrl.protocol.version import PolicyVersion

__all__ = ["META_FIELDS", "SCHEMA_NAME", "SCHEMA_VERSION", "SPAN_COLUMNS", "Trajectory"]

SCHEMA_NAME = "hpcrl.trajectory"
SCHEMA_VERSION = 1
SPAN_COLUMNS = ("start", "end", "lineage", "step")

_LOGPROB_SLACK = 1e-4
"""Rounding may lift a logprob of a certain token just above 0."""

META_FIELDS = (
    "run_id",
    "task_id",
    "group_id",
    "rollout_id",
    "attempt_id",
    "split",
    "policy_version",
    "environment_version",
    "verifier_version",
    "rewards",
    "ending",
    "policy_failure",
    "timings",
    "requests",
)
"""Fields of a Trajectory that travel in the row's JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One ended and scored attempt.

    ``token_ids`` int32, ``logprobs`` float32 (natural log, after temperature; 0 where not sampled), ``loss_mask`` uint8 (1 on
    sampled tokens): all of shape (tokens,). ``segments`` int32: first index of each context, starting with 0. ``spans`` int32 of
    shape (n, 4): tokens [start, end) were sampled by version lineage.step.
    """

    run_id: str
    task_id: str
    group_id: str
    rollout_id: str
    attempt_id: str
    split: str
    policy_version: str
    """The version the attempt was bound to when it was leased."""
    environment_version: str
    verifier_version: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]
    segments: NDArray[np.int32]
    spans: NDArray[np.int32]
    reward: float
    first_token_at: float
    """When the first token was asked for, seconds since the epoch."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    ending: str = "stop"
    """Ending of the last model call."""
    policy_failure: str | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    """Name → seconds."""
    requests: Sequence[Mapping[str, Any]] = ()
    """One entry per model call: request_id, ending, sampling, token range, durations."""
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        return int(self.loss_mask.sum(dtype=np.int64))

    @property
    def tokens_without_version(self) -> int:
        """Trained tokens that no version span covers: 0 in every valid record."""
        naked = self.loss_mask.copy()
        for start, end, *_ in self.spans.tolist():
            naked[start:end] = 0
        return int(np.count_nonzero(naked))

    @property
    def oldest_version(self) -> PolicyVersion:
        """Version of the oldest trained token, oldest by step; the bound version when no token is trained."""
        return min(self._trained_versions(), key=lambda version: (version.step, version.lineage))

    @property
    def newest_version(self) -> PolicyVersion:
        return max(self._trained_versions(), key=lambda version: (version.step, version.lineage))

    def _trained_versions(self) -> list[PolicyVersion]:
        trained = [
            PolicyVersion(int(lineage), int(step))
            for start, end, lineage, step in self.spans
            if self.loss_mask[start:end].any()
        ]
        return trained or [PolicyVersion.parse(self.policy_version)]

    def validate(self) -> Trajectory:
        """Check that the record is complete and consistent; returns itself. Raises DataError naming the attempt."""
        self._validate_tokens()
        self._validate_segments()
        self._validate_spans()
        for name, reward in [("reward", self.reward), *self.rewards.items()]:
            if not math.isfinite(reward):
                raise self._bad("reward_not_finite", f"{name} is {reward}")
        PolicyVersion.parse(self.policy_version)
        return self

    def _bad(self, reason: str, text: str) -> DataError:
        return DataError(reason, f"attempt {self.attempt_id}: {text}")

    def _validate_tokens(self) -> None:
        wanted = {"token_ids": np.int32, "logprobs": np.float32, "loss_mask": np.uint8}
        for name, dtype in wanted.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise self._bad(
                    "bad_array", f"{name} is {array.dtype}{array.shape}, expected one row of {dtype.__name__}"
                )
        if not len(self.token_ids) == len(self.logprobs) == len(self.loss_mask):
            raise self._bad(
                "length_mismatch",
                f"{len(self.token_ids)} token ids, {len(self.logprobs)} logprobs, {len(self.loss_mask)} mask entries",
            )
        if not len(self.token_ids):
            raise self._bad("no_tokens", "no model call was recorded")
        # Extremes instead of masks, and without the methods around the reductions: every trajectory passes here. A NaN is in both.
        if np.minimum.reduce(self.token_ids) < 0:
            raise self._bad("bad_token", "negative token id")
        if np.maximum.reduce(self.loss_mask) > 1:
            raise self._bad("bad_mask", "the loss mask holds values other than 0 and 1")
        lowest, highest = float(np.minimum.reduce(self.logprobs)), float(np.maximum.reduce(self.logprobs))
        if not (math.isfinite(lowest) and math.isfinite(highest)):
            raise self._bad("logprob_not_finite", f"{int((~np.isfinite(self.logprobs)).sum())} logprobs are not finite")
        if highest > _LOGPROB_SLACK:
            raise self._bad("logprob_positive", f"largest logprob is {highest}")

    def _validate_segments(self) -> None:
        if self.segments.ndim != 1 or not len(self.segments) or self.segments[0] != 0:
            raise self._bad("bad_segments", "segment starts must be one row that begins with 0")
        starts = self.segments.tolist()
        if any(after <= before for before, after in pairwise(starts)) or starts[-1] >= self.tokens:
            raise self._bad("bad_segments", f"segment starts {starts} do not rise within {self.tokens} tokens")
        if any(self.loss_mask[start] for start in starts):
            raise self._bad("bad_segments", "the first token of a segment is marked as sampled: it has no context")

    def _validate_spans(self) -> None:
        if self.spans.ndim != 2 or self.spans.shape[1] != len(SPAN_COLUMNS):
            raise self._bad(
                "bad_spans", f"version spans have shape {self.spans.shape}, expected (n, {len(SPAN_COLUMNS)})"
            )
        end_before = 0
        for start, end, lineage, step in self.spans.tolist():
            if not (end_before <= start < end <= self.tokens) or lineage < 0 or step < 0:
                raise self._bad(
                    "bad_spans", f"version span [{start}, {end}) of {lineage}.{step} is out of order or range"
                )
            end_before = end
        naked = self.tokens_without_version
        if naked:
            raise self._bad("no_version", f"{naked} trained tokens are covered by no version span")
