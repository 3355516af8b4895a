"""A run directory → ``RunData`` (everything the report shows) → the summary. Reads files only; works on unfinished and failed runs.

metrics/*.jsonl      one file per process: values by metric name, whoever wrote them
status.final.json    the coordinator's last Status, saved by the launcher
config.resolved.yaml the configuration
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrl.config import RunConfig, load_config
from hpcrl.errors import UserError
from hpcrl.metrics import read_metrics
from hpcrl.protocol.messages import EvalResult
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.status import Status
from hpcrl.protocol.version import PolicyVersion

__all__ = ["Point", "RunData", "Stage", "collect", "percentile", "read_status", "save_summary", "stages", "summarize"]

_STAGES = (
    ("sandbox start", "sandbox_start_s"),
    ("attempt: model calls", "model_s"),
    ("attempt: of these, queued", "queue_s"),
    ("attempt: of these, generating", "generate_s"),
    ("attempt: commands", "commands_s"),
    ("attempt: artifact", "artifact_s"),
    ("attempt: record", "record_s"),
    ("attempt, whole", "attempt_s"),
    ("waiting for the score", "score_wait_s"),
    ("scoring", "scoring_s"),
    ("scored to sealed", "seal_wait_s"),
    ("trainer: waiting for the batch", "batch_wait_s"),
    ("trainer: reading shards", "read_s"),
    ("trainer: training", "train_s"),
    ("trainer: publishing", "publish_s"),
    ("trainer: whole step", "step_s"),
    ("trainer: checkpoint", "checkpoint_s"),
    ("trainer: evaluation", "eval_s"),
    ("weights: transfer", "transfer_s"),
    ("weights: verify", "verify_s"),
    ("weights: flip pause", "flip_pause_s"),
)
"""What the report shows of time, in the order an attempt meets it."""


@dataclass(frozen=True, slots=True)
class Point:
    """One reading: when (seconds since the epoch), at which training step if any, in which process, and the value."""

    t: float
    step: int | None
    process: str
    value: float


@dataclass(frozen=True, slots=True)
class Stage:
    """How long one kind of thing took. Seconds."""

    label: str
    count: int
    p50: float
    p90: float
    p99: float
    total: float


@dataclass(slots=True)
class RunData:
    """What a run left behind. ``series`` holds numbers, ``counts`` the sums of histogram metrics, both by metric name."""

    run: RunDir
    config: RunConfig | None = None
    status: Status | None = None
    end: dict[str, Any] = field(default_factory=dict)
    series: dict[str, list[Point]] = field(default_factory=dict)
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def values(self, name: str) -> list[float]:
        """All readings of a metric, in the order written per process."""
        return [point.value for point in self.series.get(name, [])]

    def by_step(self, name: str) -> list[tuple[int, float]]:
        """Readings of a per-step metric in step order. A step that was done again after a resume counts once, as last done."""
        latest: dict[int, Point] = {}
        for point in self.series.get(name, []):
            if point.step is not None and (point.step not in latest or latest[point.step].t <= point.t):
                latest[point.step] = point
        return [(step, latest[step].value) for step in sorted(latest)]

    def counter(self, name: str) -> float:
        """Total of a counter over all processes; a process that was started again begins at 0 and is added."""
        total = 0.0
        last: dict[str, float] = {}
        for point in self.series.get(name, []):
            before = last.get(point.process, 0.0)
            total += point.value - before if point.value >= before else point.value
            last[point.process] = point.value
        return total

    def evaluations(self) -> list[tuple[int, EvalResult]]:
        """(step, result) of finished evaluations, in the order of their versions."""
        finished = [result for result in (self.status.eval if self.status else []) if result.success is not None]
        ordered = sorted(finished, key=lambda result: PolicyVersion.parse(result.version))
        return [(PolicyVersion.parse(result.version).step, result) for result in ordered]


def collect(root: Path | str) -> RunData:
    """Read a run directory. Raises UserError when it is none."""
    run = RunDir(Path(root))
    if not run.config.is_file() and not run.metrics.is_dir():
        raise UserError(f"{run.root} is not a run directory: it has neither {run.config.name} nor metrics/")
    data = RunData(run, load_config(run.config) if run.config.is_file() else None, read_status(run), _read_end(run))
    for path in sorted(run.metrics.glob("*.jsonl")):
        for line in read_metrics(path):
            _add(data, path.stem, line)
    return data


def read_status(run: RunDir) -> Status | None:
    """The last Status of the coordinator, or None when the run has not ended. Raises UserError for a damaged file."""
    path = run.final_status
    try:
        return Status.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())[:300]}") from error


def _read_end(run: RunDir) -> dict[str, Any]:
    try:
        end = json.loads(run.end.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{run.end} is damaged: {error}") from error
    return end if isinstance(end, dict) else {}


def _add(data: RunData, process: str, line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if name in ("t", "step"):
            continue
        if isinstance(value, Mapping):
            counts = data.counts.setdefault(name, Counter())
            counts.update({str(key): part for key, part in value.items() if isinstance(part, int | float)})
        elif isinstance(value, int | float):
            data.series.setdefault(name, []).append(Point(line["t"], line.get("step"), process, float(value)))


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of the values do not exceed; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def stages(data: RunData) -> list[Stage]:
    """Time per stage, for the stages that were measured."""
    found = []
    for label, name in _STAGES:
        values = data.values(name)
        p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
        if p50 is not None and p90 is not None and p99 is not None:
            found.append(Stage(label, len(values), p50, p90, p99, sum(values)))
    return found


def summarize(data: RunData) -> dict[str, Any]:
    """The summary (``summary.json``). What the run did not get to is None. Seconds, tokens, shares of 1."""
    status = data.status
    evaluations = data.evaluations()
    versions = status.versions if status else []
    pauses = data.values("flip_pause_s") or _numbers(versions, "pause_s")
    return {
        "run_id": data.run.run_id,
        "state": data.end.get("state"),
        "reason": data.end.get("reason") or None,
        "seed": data.config.run.seed if data.config else None,
        "steps": status.step if status else _last_step(data),
        "success_before": evaluations[0][1].success if evaluations else None,
        "success_after": evaluations[-1][1].success if len(evaluations) > 1 else None,
        "attempts": {str(state): count for state, count in status.attempts.items()} if status else {},
        "trajectories_trained": status.consumed if status else int(sum(v for _, v in data.by_step("trajectories"))),
        "duplicates": status.duplicates if status else None,
        "max_lag": max((lag for lag, count in status.lag_histogram.items() if count), default=None) if status else None,
        "versions_published": len(versions) if status else None,
        "publish_s_p50": percentile(_numbers(versions, "publish_s"), 0.5),
        "flip_pause_s_p50": percentile(pauses, 0.5),
        "wall_s": _wall_s(data),
        "tokens_generated": int(data.counter("tokens_generated") or sum(data.values("tokens_sampled"))),
        "tokens_trained": int(sum(value for _, value in data.by_step("tokens_trained"))),
        "digests_equal": _digests_equal(versions),
        "digests_missing": _digests_missing(versions, len(status.replicas) if status else 0),
        "logprob_gap_max_lag0": max((value for _, value in data.by_step("logprob_gap_max_lag0")), default=None),
        "pool_hits": int(data.counter("pool_hits")),
        "pool_misses": int(data.counter("pool_misses")),
        "skipped_updates": int(data.counter("skipped_updates")),
        "evaluations": [_evaluation(result) for _, result in evaluations],
        "lag_histogram": {str(lag): count for lag, count in sorted(status.lag_histogram.items())} if status else {},
        "failures": dict(status.failures) if status else dict(data.counts.get("failures", {})),
        "policy_failures": dict(data.counts.get("policy_failures", {})),
        "cancelled": dict(status.cancelled) if status else {},
        "rejected_reports": dict(status.rejected_reports) if status else {},
    }


def _evaluation(result: EvalResult) -> dict[str, Any]:
    return {"version": result.version, "success": result.success, "scored": result.done, "failed": result.failed}


def _numbers(entries: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    return [float(entry[key]) for entry in entries if isinstance(entry.get(key), int | float)]


def _last_step(data: RunData) -> int | None:
    steps = [step for step, _ in data.by_step("train_s")]
    return steps[-1] if steps else None


def _wall_s(data: RunData) -> float | None:
    """The launcher's start and end; without them, from the first to the last thing any process measured."""
    started, ended = data.end.get("started_at"), data.end.get("ended_at")
    if started is None or ended is None:
        times = [point.t for points in data.series.values() for point in points]
        if not times:
            return None
        started, ended = min(times), max(times)
    return round(ended - started, 3)


def _digests_equal(versions: Iterable[Mapping[str, Any]]) -> bool | None:
    """Whether every replica held, for every version, exactly the bytes that the trainer published; None when nothing was."""
    compared = [
        digest == entry.get("digest")
        for entry in versions
        if isinstance(entry.get("digests"), Mapping)
        for digest in entry["digests"].values()
    ]
    return all(compared) if compared else None


def _digests_missing(versions: Iterable[Mapping[str, Any]], replicas: int) -> int:
    """(version, replica) pairs without a digest: the replica refused the version, skipped it for a newer one, or the run ended."""
    return sum(replicas - len(entry.get("digests") or {}) for entry in versions)


def save_summary(data: RunData, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` into the run directory."""
    publish_text(data.run.summary, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
