"""The vLLM server's command line and environment, as pure functions of the configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import LoraSection
from hpcrl.errors import ConfigError
from hpcrl.weights.vllm_engine import BACKEND

__all__ = ["SERVED_MODEL", "check_context", "server_arguments", "server_environment"]

SERVED_MODEL = "policy"
"""The model's name in the API."""

_STRIPPED_PREFIXES = ("PMI_", "PMIX_", "PMI2_", "OMPI_", "MPI_", "MPIR_", "HYDRA_", "HYDI_", "SLURM_", "PRTE_")
_STRIPPED = frozenset(
    {"PMI", "PMIX", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)
_GIB = 1 << 30
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows as ``--max-lora-rank``."""
_ADAPTER_WORKER = "hpcrl.weights.vllm_adapter.AdapterWorker"
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in the engine's process. vLLM's own choice on CPUs is a worker process, with both sides spinning on shared memory
while they wait for each other; it makes it because it sets OpenMP's variables there, but ours are set before anything starts. (The
short name ``uni`` would be overruled.) Measured with 32 callers on two busy cores: 29 instead of 48 ms of engine CPU per call."""
_BLOCK = 32
"""Tokens per KV block on CPUs: a prefix is found in whole blocks, and with vLLM's choice of 128 each turn of a dialogue would compute
up to 127 tokens again."""
_BATCHED_TOKENS = 2048
"""vLLM's own choice on CPUs."""


def server_arguments(config: RunConfig, model: Path, socket: Path, *, gpu: bool) -> list[str]:
    """The command that serves ``model`` on the Unix socket ``socket``.

    Only our own user reaches it: vLLM's control routes (pause, weight update) have no authentication. Logprobs are the processed
    ones: of the distribution that was sampled. The model's own generation_config.json must not change sampling.
    """
    section = config.inference
    arguments = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model)),
        *("--served-model-name", SERVED_MODEL),
        *("--uds", str(socket)),
        *("--dtype", config.model.dtype),
        *("--seed", str(config.run.seed)),
        *("--max-model-len", str(config.rollout.context_tokens)),
        *("--max-num-seqs", str(section.max_num_seqs)),
        *("--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--enable-scale-out", "--enable-prefix-caching"),
        *("--disable-uvicorn-access-log", "--disable-fastapi-docs"),
    ]
    if config.lora is None:
        arguments += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    else:
        arguments += _adapter_arguments(config.lora, config.slots)
    if section.tensor_parallel > 1:
        arguments += ["--tensor-parallel-size", str(section.tensor_parallel)]
    if section.enforce_eager:
        arguments += ["--enforce-eager"]
    if not gpu and section.tensor_parallel == 1:
        arguments += ["--distributed-executor-backend", _ONE_PROCESS]
    if gpu:
        arguments += ["--gpu-memory-utilization", str(section.gpu_memory_utilization / config.engines)]
    else:
        arguments += ["--kv-cache-memory-bytes", str(int(section.kv_cache_gib * _GIB))]
        arguments += ["--block-size", str(_BLOCK), *_whole_prompts(config)]
    return [*arguments, *section.extra_args]


def _whole_prompts(config: RunConfig) -> list[str]:
    """Prompts are computed in one piece each, and a step has room for the longest beside all that decode.

    For a request with a seed, vLLM takes back the random numbers of a piece that ended within the prompt, which torch's generator on
    CPUs cannot do ("CPU Generator does not use offset"): the engine would end, for everybody.
    """
    room = config.rollout.context_tokens + config.inference.max_num_seqs
    return ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(_BATCHED_TOKENS, room))]


def _adapter_arguments(lora: LoraSection, adapters: int) -> list[str]:
    """Every adapter that is held has its place in the layers, so that one batch may mix them and none is evicted."""
    return [
        "--enable-lora",
        *("--max-loras", str(adapters), "--max-cpu-loras", str(adapters)),
        *("--max-lora-rank", str(next(rank for rank in _RANKS if rank >= lora.rank))),
        *("--lora-target-modules", *lora.target_modules),
        *("--worker-extension-cls", _ADAPTER_WORKER),
    ]


def server_environment(environ: Mapping[str, str], config: RunConfig, *, gpu: bool) -> dict[str, str]:
    """The child's environment: ours without MPI's and Slurm's variables, with vLLM's switches.

    vLLM starts worker processes and its own process groups: an inherited PMI or torchrun variable would make them join ours.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _STRIPPED and not name.startswith(_STRIPPED_PREFIXES)
    }
    kept |= {
        "VLLM_SERVER_DEV_MODE": "1",  # opens pause, weight update and resume
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOG_STATS_INTERVAL": "60",
        "HF_HUB_OFFLINE": environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if config.lora is not None:
        kept |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if not gpu:
        threads = str(config.inference.threads)
        kept |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        kept.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override --kv-cache-memory-bytes
    return kept


def check_context(model_config: Mapping[str, Any], context_tokens: int) -> None:
    """Raise ConfigError when the model has fewer positions than ``rollout.context_tokens``.

    Models whose positions are rescaled (YaRN and the like) are left to vLLM's own check.
    """
    inner = model_config.get("text_config", model_config)
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    positions = inner.get("max_position_embeddings")
    rescaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    if positions is not None and not rescaled and context_tokens > positions:
        raise ConfigError(
            f"rollout.context_tokens is {context_tokens} but the model has only {positions} positions "
            "(max_position_embeddings in its config.json); set rollout.context_tokens to at most that"
        )
