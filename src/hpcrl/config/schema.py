"""The run configuration: one validated object. Unknown keys are refused.

Roles read the resolved copy in the run directory, so that all of them see the same values.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hpcrl.config.sections import (
    CoordinatorSection,
    EvalSection,
    HarnessSection,
    InferenceSection,
    LimitsSection,
    LoraSection,
    ModelSection,
    RolloutSection,
    RunSection,
    SandboxSection,
    ScoringSection,
    Section,
    SlurmSection,
    StalenessSection,
    TasksSection,
    TrainerSection,
    WeightsSection,
    WorkerSection,
)

__all__ = ["RunConfig"]


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    mode: Literal["sync", "async"] = "async"
    """`sync` is `staleness.max_policy_lag: 0`."""
    model: ModelSection
    lora: LoraSection | None = None
    """Train a LoRA adapter on the frozen weights of `model.path`, and publish and serve only that; None: train all weights."""
    tasks: TasksSection
    rollout: RolloutSection = RolloutSection()
    staleness: StalenessSection = StalenessSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    inference: InferenceSection = InferenceSection()
    weights: WeightsSection = WeightsSection()
    worker: WorkerSection = WorkerSection()
    harness: HarnessSection = HarnessSection()
    sandbox: SandboxSection = SandboxSection()
    limits: LimitsSection = LimitsSection()
    scoring: ScoringSection = ScoringSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    slurm: SlurmSection = SlurmSection()

    @property
    def slots(self) -> int:
        """Versions that a replica serves side by side at most: `weights.slots`, or what its None stands for."""
        if self.weights.slots is not None:
            return self.weights.slots
        return 1 if self.lora is None else min(self.staleness.max_policy_lag + 2, 8)

    @property
    def engines(self) -> int:
        """vLLM servers per replica."""
        return self.slots if self.lora is None else 1

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.mode == "sync" and self.staleness.max_policy_lag != 0:
            raise ValueError(
                f"mode: sync means staleness.max_policy_lag: 0, but it is {self.staleness.max_policy_lag}; "
                "set it to 0 or use mode: async"
            )
        if self.weights.quorum is not None and self.weights.quorum > self.inference.replicas:
            raise ValueError(
                f"weights.quorum is {self.weights.quorum} but there are only {self.inference.replicas} replicas "
                "(inference.replicas)"
            )
        self._check_slots()
        if self.weights.drain_timeout_s < self.rollout.attempt_timeout_s:
            raise ValueError(
                f"weights.drain_timeout_s ({self.weights.drain_timeout_s:g}) must not be smaller than "
                f"rollout.attempt_timeout_s ({self.rollout.attempt_timeout_s:g}): flips would cancel long attempts"
            )
        if self.rollout.min_group is not None and self.rollout.min_group >= self.rollout.group_size:
            raise ValueError(
                f"rollout.min_group ({self.rollout.min_group}) must be smaller than rollout.group_size "
                f"({self.rollout.group_size}); leave it out to wait for whole groups"
            )
        if self.coordinator.lease_s < 2 * self.coordinator.heartbeat_s:
            raise ValueError(
                f"coordinator.lease_s ({self.coordinator.lease_s:g}) must be at least twice coordinator.heartbeat_s "
                f"({self.coordinator.heartbeat_s:g}): leases of living workers would expire"
            )
        if self.rollout.max_tokens >= self.rollout.context_tokens:
            raise ValueError(
                f"rollout.max_tokens ({self.rollout.max_tokens}) must be smaller than rollout.context_tokens "
                f"({self.rollout.context_tokens})"
            )
        return self

    def _check_slots(self) -> None:
        slots, pin = self.slots, self.weights.pin
        if self.lora is not None:
            if pin == "token":
                raise ValueError(
                    "weights.pin: token is not for lora: a generation cannot change its adapter half-way; use trajectory or turn"
                )
            if slots < 2:
                raise ValueError(
                    "weights.slots: 1 is not for lora: a new adapter is loaded beside the old one; set 2 or more, or leave it out"
                )
        elif slots > 2:
            raise ValueError(f"weights.slots: {slots} is for lora; without it a replica has 1 engine or 2")
        elif slots > 1 and pin != "trajectory":
            raise ValueError(
                f"weights.slots: 2 is for weights.pin: trajectory; with pin: {pin} nothing is drained anyway: set weights.slots: 1"
            )
