"""The sections of the run configuration. Every field's docstring gives its meaning and unit.

What holds between sections is checked by RunConfig (schema.py).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from hpcrl.config.values import (
    Beta,
    Count,
    Environment,
    Line,
    MpiPlugin,
    Positive,
    Seconds,
    Seed,
    SrunArguments,
    Text,
    VllmArguments,
    WholeDistribution,
)

# fmt: off
__all__ = [
    "CoordinatorSection",
    "EvalSection",
    "HarnessSection",
    "InferenceSection",
    "LimitsSection",
    "LoraSection",
    "Message",
    "ModelSection",
    "OptimizerSection",
    "RolloutSection",
    "RunSection",
    "SandboxSection",
    "ScoringSection",
    "Section",
    "SlurmSection",
    "StalenessSection",
    "TasksSection",
    "TrainerSection",
    "WeightsSection",
    "WorkerSection",
]
# fmt: on


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError(
                "takes no true or false (YAML reads yes, no, on and off as such; quote them if they are meant)"
            )
        return value


class RunSection(Section):
    name: str = "run"
    """Prefix of the run id (`NAME-DATE-TIME-xxxx`)."""
    dir: Line = "runs"
    """Where run directories go; must be on a file system that all nodes of the job share. Relative: to the working directory."""
    seed: Seed = 0
    """Seed of everything random: task order, sampling, minibatches."""
    restarts: Count = 3
    """How often the coordinator, the MPI world, or the workers or scorers of a node are started again without progress between,
    before the run ends with the first cause."""

    @field_validator("name")
    @classmethod
    def _part_of_a_path(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise ValueError(
                "must be 1 to 64 letters, digits, dots, dashes and underscores, beginning with a letter or digit"
            )
        return name


class ModelSection(Section):
    path: Line
    """Directory of the start weights: config.json, safetensors, tokenizer with chat template."""
    stage: Line | None = None
    """Directory on each node's own disk (variables such as `$SLURM_TMPDIR` are filled in there) into which trainer and inference nodes
    copy `path` once, and read it from then on; None: they read the shared file system each time."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the trainer's weights, of what travels, and of what is served."""
    tool_calls: Literal["auto", "hermes", "llama3", "mistral"] = "auto"
    """How the model writes tool calls (see inference/toolcalls.py); auto: by the marks in its chat template."""


class TasksSection(Section):
    train: Line
    """Directory of Harbor task directories to train on."""
    eval: Line | None = None
    """Directory of held-out Harbor task directories; None: no evaluation."""


class RolloutSection(Section):
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts per group (one draw of a task). A group is judged by how its rewards differ: from groups of 1 nothing is learned."""
    min_group: Annotated[int, Field(ge=2)] | None = None
    """A group may be trained with so many accepted rollouts once `straggler_grace_s` are over; those still under way follow in a later
    batch as latecomers of their group. None: a group waits for all of its rollouts."""
    straggler_grace_s: Seconds = 60.0
    """Wait for the rest of a group after its `min_group`-th accepted rollout."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature. Recorded logprobs are those after temperature, and the trainer computes the same."""
    top_p: WholeDistribution = 1.0
    """Only 1, the whole distribution: the one whose probabilities the trainer computes."""
    max_tokens: Positive = 512
    """Sampled tokens per model call, at most."""
    max_turns: Positive = 8
    """Model calls per attempt, at most. A program of `harness.command` is told (HPCRL_MAX_TURNS) and must keep to it itself."""
    context_tokens: Positive = 4096
    """Longest sequence of an attempt, prompt and tool output included."""
    attempt_timeout_s: Seconds = 300.0
    """Total wall clock of an attempt, from lease to artifact."""


class StalenessSection(Section):
    max_policy_lag: Count = 0
    """Largest (current step − step of the oldest trained token) of a consumed trajectory. 0 is fully synchronous."""
    max_age_s: Seconds | None = None
    """Largest wall-clock age since the first generated token when a trajectory is consumed; None: no bound."""
    max_ratio_dev: Annotated[float, Field(gt=0)] | None = None
    """Largest mean of |π_now/π_behaviour − 1| over a trajectory's trained tokens under the weights that are about to be trained (0:
    the same policy; its expectation is twice the total variation between the two). What deviates more is drawn again. One more
    forward pass per step; None: no bound, no cost."""


class OptimizerSection(Section):
    name: Literal["adam", "adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate after warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Count = 0
    """Linear warm-up, in training steps."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class LoraSection(Section):
    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's product is scaled by alpha / rank."""
    target_modules: Annotated[list[Annotated[str, Field(pattern=r"^\w+$")]], Field(min_length=1)] = [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]
    """Linear layers that get an adapter, by the last part of their names; the output head cannot be one."""
    dropout: Annotated[float, Field(ge=0, le=0)] = 0.0
    """Always 0: the policy that is trained must be the one that was sampled."""


class TrainerSection(Section):
    ranks: Positive = 2
    """Processes of the trainer group (one per GPU)."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """torch.distributed backend. nccl needs one GPU per rank."""
    threads: Positive = 1
    """Compute threads per rank."""
    steps: Positive = 100
    """Training steps of the run; each consumes one batch."""
    groups_per_step: Positive = 16
    """Groups per batch."""
    minibatches: Positive = 1
    """Optimizer steps per batch."""
    max_tokens_per_pack: Positive = 8192
    """Packed micro-batch size: tokens per forward pass and rank."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratio clip: 1 − clip_low … 1 + clip_high."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    normalize_advantages: bool = True
    """Divide group advantages by the group's standard deviation (GRPO)."""
    shuffle_rewards: bool = False
    """Control experiment: permute rewards within each batch, so that there is nothing to learn."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints; the last step is always one."""
    keep_checkpoints: Positive = 2
    """Older checkpoints are removed."""
    optimizer: OptimizerSection = OptimizerSection()


class EvalSection(Section):
    every: Count = 0
    """Steps between evaluations; 0: only before the first and after the last step. Without `tasks.eval` there are none."""
    samples: Positive = 1
    """Rollouts per held-out task."""


class InferenceSection(Section):
    replicas: Positive = 1
    """vLLM servers; each is one MPI rank with its proxy."""
    tensor_parallel: Positive = 1
    """GPUs per replica."""
    threads: Positive = 1
    """Compute threads per replica (CPU serving)."""
    max_num_seqs: Positive = 64
    """Sequences decoded at once."""
    kv_cache_gib: Annotated[float, Field(ge=1 / 1024, le=1 << 20)] = 1.0
    """KV cache per replica on CPUs, GiB (on GPUs vLLM takes what `gpu_memory_utilization` allows)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.85
    enforce_eager: bool = False
    """No graph capture or compilation (faster start, slower decode; right for small models on CPUs)."""
    start_timeout_s: Seconds = 600.0
    """From starting vLLM to its first answer."""
    request_timeout_s: Seconds = 120.0
    """One generation, queueing included."""
    extra_args: VllmArguments = []
    """More arguments for the vLLM server, as on its command line. What hpcrl sets itself is refused."""


class WeightsSection(Section):
    chunk_mib: Annotated[float, Field(ge=1 / 1024, le=1024)] = 16.0
    """Largest piece of one MPI message, MiB; at most 1024 (MPI libraries fail with larger ones)."""
    chunks_in_flight: Positive = 4
    """Messages under way per sender."""
    pin: Literal["trajectory", "turn", "token"] = "trajectory"
    """What one version serves from start to end: a whole attempt (its replica is drained before it changes), one model call, or one
    token (the change comes in the middle of a generation; its KV is computed again). Evaluations are always pinned as a whole."""
    slots: Annotated[int, Field(ge=1, le=16)] | None = None
    """Versions that a replica serves side by side. Full weights: engines, 1 (None) or 2; with 2 a standby engine takes the next version
    while the other goes on and nothing is drained, at twice the memory and, on GPUs, half of `gpu_memory_utilization` each; only with
    `pin: trajectory`. With `lora`: adapters in one engine, at least 2; None: `staleness.max_policy_lag` + 2, at most 8. A new one
    waits for a place only while attempts are still bound to as many older ones."""
    quorum: Positive | None = None
    """Replicas that must serve a version before new attempts are bound to it; None: one is enough to begin (rolling)."""
    drain_timeout_s: Seconds = 600.0
    """Longest wait for a replica's attempts before a flip; what still runs then is cancelled as stale."""


class WorkerSection(Section):
    per_node: Positive = 1
    """Worker processes per sandbox node."""
    concurrency: Positive = 16
    """Attempts at once per worker."""
    seal_every: Positive = 16
    """Trajectories per shard, at most."""
    seal_after_s: Seconds = 1.0
    """Longest wait of a finished trajectory before its shard is sealed."""


class Message(Section):
    role: Literal["user", "assistant"]
    content: Text


class HarnessSection(Section):
    kind: Literal["bash", "tools", "command"] = "bash"
    """Who acts: `bash`, one command per turn in a fenced block; `tools`, OpenAI tool calls (bash, read_file, write_file; the chat
    template must know tools); `command`, any program that speaks OpenAI's API (see `command`)."""
    command: list[str] = []
    """For `kind: command`: the program and its arguments. It is run on the worker, with OPENAI_BASE_URL and OPENAI_API_KEY, the task's
    instruction in the file $HPCRL_INSTRUCTION, and `$HPCRL_EXEC 'COMMAND'` to run a command in the attempt's sandbox."""
    system_prompt: Text | None = None
    """First message of every attempt; tells an instruct model how to act (one fenced bash block per turn). None: there is none."""
    examples: list[Message] = []
    """Worked dialogue shown between the system prompt and the instruction (few-shot): user and assistant in turn. Prompt only,
    never trained on; it counts against `rollout.context_tokens`."""
    show_exit_code: bool = False
    """Append a command's exit code to its output when it is not 0."""

    @model_validator(mode="after")
    def _has_a_program(self) -> HarnessSection:
        if (self.kind == "command") != bool(self.command):
            raise ValueError(
                f"harness.kind is {self.kind} and harness.command is {self.command}: kind: command needs a program, "
                "the others take none"
            )
        if self.kind == "command" and (self.system_prompt is not None or self.examples):
            raise ValueError(
                "harness.system_prompt and harness.examples are for kind: bash and tools; a program has its own"
            )
        return self

    @field_validator("examples")
    @classmethod
    def _in_turn(cls, examples: list[Message]) -> list[Message]:
        for number, message in enumerate(examples):
            expected = ("user", "assistant")[number % 2]
            if message.role != expected:
                raise ValueError(
                    f"message {number + 1} is from '{message.role}' where '{expected}' is due; begin with user and take turns"
                )
        if len(examples) % 2:
            raise ValueError("the last message is from the user; end with the assistant's answer")
        return examples

    def opening(self) -> list[dict[str, str]]:
        """The chat messages that stand before every instruction."""
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return system + [{"role": message.role, "content": message.content} for message in self.examples]


class SandboxSection(Section):
    backend: Literal["apptainer", "process"] = "apptainer"
    """`process` isolates nothing: for tests of hpcrl itself only."""
    image: Line = "containers/sandbox.def"
    """Image for tasks that name none: a definition file, an unpacked directory or a .sif."""
    start_concurrency: Positive = 4
    """Container starts at once per worker."""
    warm: Annotated[int, Field(ge=0, le=1024)] = 8
    """Sandboxes started ahead of the attempts that will take them, at most, per worker and per scorer: a lease then finds one ready.
    How many there are is measured: as many as were asked for within one start's time, at the busiest. 0: none."""
    command_timeout_s: Seconds = 30.0
    """One command of the agent."""
    output_bytes: Positive = 16384
    """What is kept of a command's output; head and tail remain, with a marker."""
    memory_mib: Positive = 1024
    disk_mib: Positive = 256
    """Largest file and work directory growth."""
    processes: Positive = 64
    open_files: Positive = 256


class LimitsSection(Section):
    strict: bool = False
    """Refuse to start where a limit of a sandbox is not enforced (`hpcrl doctor` names what is not, and the remedy). A limit that is
    kept about a second late, as that of disk space, is no reason."""


class ScoringSection(Section):
    per_node: Positive = 1
    """Scorer processes per sandbox node."""
    concurrency: Positive = 8
    """Attempts scored at once per scorer."""
    lease_s: Seconds = 900.0
    """Longest scoring of one attempt, sandbox start and the verifier's timeout included; a scorer that has not reported by then
    is given up, and the attempt is scored again."""


class CoordinatorSection(Section):
    lease_s: Seconds = 30.0
    """An attempt whose worker has not been heard of for so long is given up and tried again."""
    heartbeat_s: Seconds = 5.0
    """Between two signs of life of a worker; at most half of `lease_s`, so that a late one ends no lease."""
    infra_retries: Count = 3
    """New attempts per rollout after infrastructure failures."""
    data_retries: Count = 3
    """New attempts per rollout after data failures (a record incomplete or corrupt, a damaged shard)."""
    redraws: Count = 3
    """How often samples of a group that became too old are drawn again; past that the group is closed and another takes its place."""
    failed_groups: Positive = 8
    """So many groups failed one after the other, none completed between them, for at least `failed_after_s`: the run ends with the
    reasons of their failures."""
    failed_after_s: Seconds = 120.0
    """A disturbance shorter than this does not end the run, however many groups it costs."""


class SlurmSection(Section):
    requeues: Count = 1
    """How often a job that comes near its time limit is put back into the queue, to go on from the checkpoint it then writes."""
    mpi: MpiPlugin = "pmi2"
    """srun --mpi of the combined step, one of `srun --mpi=list`."""
    srun_args: SrunArguments = []
    """More arguments for every srun."""
    env: Environment = {}
    """More environment for every role (for example UCX_TLS); numbers must be quoted."""
