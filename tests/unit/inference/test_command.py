from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.config.schema import (
    InferenceSection,
    LoraSection,
    ModelSection,
    RolloutSection,
    RunConfig,
    TasksSection,
    WeightsSection,
)
from hpcrl.errors import ConfigError
from hpcrl.inference.command import check_context, server_arguments, server_environment


def config(**inference: object) -> RunConfig:
    return RunConfig(
        model=ModelSection(path="m", dtype="bfloat16"),
        tasks=TasksSection(train="t"),
        rollout=RolloutSection(context_tokens=2048),
        inference=InferenceSection(**inference),  # type: ignore[arg-type]
    )


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_arguments_on_cpus() -> None:
    arguments = server_arguments(config(kv_cache_gib=0.5, enforce_eager=True), Path("/m"), Path("/run/http"), gpu=False)
    assert value(arguments, "--uds") == "/run/http"
    assert "--port" not in arguments
    assert value(arguments, "--model") == "/m"
    assert value(arguments, "--dtype") == "bfloat16"
    assert value(arguments, "--max-model-len") == "2048"
    assert value(arguments, "--logprobs-mode") == "processed_logprobs"
    assert value(arguments, "--generation-config") == "vllm"
    assert value(arguments, "--weight-transfer-config") == '{"backend": "hpcrl"}'
    assert value(arguments, "--kv-cache-memory-bytes") == str(1 << 29)
    assert "--enforce-eager" in arguments
    assert "--gpu-memory-utilization" not in arguments
    assert "--tensor-parallel-size" not in arguments
    assert value(arguments, "--distributed-executor-backend").endswith(".UniProcExecutor")
    assert value(arguments, "--block-size") == "32"
    assert "--no-enable-chunked-prefill" in arguments  # a seed would end an engine that computes a prompt in pieces
    assert value(arguments, "--max-num-batched-tokens") == str(2048 + 64)
    two = server_arguments(config(tensor_parallel=2), Path("/m"), Path("s"), gpu=False)
    assert "--distributed-executor-backend" not in two


def test_arguments_on_gpus_and_further_ones_last() -> None:
    arguments = server_arguments(
        config(tensor_parallel=2, gpu_memory_utilization=0.7, extra_args=["--swap-space", "0"]),
        Path("/m"),
        Path("s"),
        gpu=True,
    )
    assert value(arguments, "--tensor-parallel-size") == "2"
    assert value(arguments, "--gpu-memory-utilization") == "0.7"
    assert "--kv-cache-memory-bytes" not in arguments
    assert "--distributed-executor-backend" not in arguments
    assert "--no-enable-chunked-prefill" not in arguments
    assert "--enforce-eager" not in arguments
    assert arguments[-2:] == ["--swap-space", "0"]


def test_adapters_have_a_place_each_and_the_next_rank_that_vllm_knows() -> None:
    lora = config().model_copy(
        update={"lora": LoraSection(rank=17, target_modules=["q_proj", "o_proj"]), "weights": WeightsSection(slots=5)}
    )
    arguments = server_arguments(lora, Path("/m"), Path("s"), gpu=True)
    assert "--weight-transfer-config" not in arguments
    assert value(arguments, "--max-loras") == value(arguments, "--max-cpu-loras") == "5"
    assert value(arguments, "--max-lora-rank") == "32"
    at = arguments.index("--lora-target-modules")
    assert arguments[at + 1 : at + 4] == ["q_proj", "o_proj", "--worker-extension-cls"]
    assert value(arguments, "--gpu-memory-utilization") == "0.85"
    assert server_environment({}, lora, gpu=True)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in server_environment({}, config(), gpu=True)


def test_environment_loses_mpi_and_slurm_and_keeps_the_rest() -> None:
    ours = {
        "PATH": "/bin",
        "PMI_RANK": "1",
        "PMIX_NAMESPACE": "x",
        "OMPI_COMM_WORLD_RANK": "1",
        "SLURM_JOB_ID": "7",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "CUDA_VISIBLE_DEVICES": "2",
        "VLLM_CPU_KVCACHE_SPACE": "9",
    }
    child = server_environment(ours, config(threads=3), gpu=False)
    assert not {name for name in child if name.startswith(("PMI", "OMPI", "SLURM")) or name in ("RANK", "WORLD_SIZE")}
    assert child["PATH"] == "/bin"
    assert child["CUDA_VISIBLE_DEVICES"] == "2"
    assert child["VLLM_SERVER_DEV_MODE"] == "1"
    assert child["OMP_NUM_THREADS"] == "3"
    assert "VLLM_CPU_KVCACHE_SPACE" not in child
    assert "OMP_NUM_THREADS" not in server_environment(ours, config(threads=3), gpu=True)


def test_context_must_fit_the_model() -> None:
    check_context({"max_position_embeddings": 512}, 512)
    check_context({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn"}}, 4096)
    check_context({}, 4096)
    with pytest.raises(ConfigError, match=r"context_tokens is 513 .* 512 positions"):
        check_context({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}, 513)
    with pytest.raises(ConfigError):
        check_context({"text_config": {"max_position_embeddings": 512}}, 513)
