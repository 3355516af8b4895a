"""Digests of weights, tokenizer and model configuration: xxh3-128 in hex (integrity against faults, not against attackers).

The digest of a whole copy is the xxh3-128 of its chunks' raw digests in order (a two-level Merkle tree): trainer ranks can then
share the hashing, and a receiver computes it again from the bytes it holds, never from digests it was told.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from hpcrl.errors import UserError

__all__ = [
    "all_done",
    "base_digest",
    "chunk_digest",
    "digest_threads",
    "model_config_digest",
    "tokenizer_digest",
    "whole_digest",
]

_MOST_THREADS = 8
"""One thread takes some 10 GB/s; the fastest links bring 50 GB/s."""

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_READ_BYTES = 16 << 20
_CONFIG_NOISE = frozenset({"_name_or_path", "transformers_version"})
"""Keys of config.json that say where a model came from, not what it is."""


def chunk_digest(data: bytes | memoryview) -> str:
    """xxh3-128 of some bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_threads() -> ThreadPoolExecutor:
    """Threads that take digests beside a transfer: hashing a chunk does not hold the interpreter's lock. At most half the CPUs."""
    usable = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(max(1, min(_MOST_THREADS, usable // 2)), thread_name_prefix="weights-digest")


def all_done(digests: Sequence[Future[str]]) -> bool:
    """Whether all digests are there, in the order in which they were asked for; while they are not, the last one says so."""
    return not digests or (digests[-1].done() and all(digest.done() for digest in digests))


def whole_digest(chunk_digests: Iterable[str]) -> str:
    """Digest of a whole copy from the hex digests of its chunks, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(digest) for digest in chunk_digests))


def tokenizer_digest(model_dir: Path | str) -> str:
    """Digest over names and contents of the tokenizer's files. Raises UserError when there are none."""
    found = [path for name in _TOKENIZER_FILES if (path := Path(model_dir) / name).is_file()]
    if not found:
        raise UserError(f"{model_dir} holds no tokenizer: expected one of {', '.join(_TOKENIZER_FILES)}")
    state = xxhash.xxh3_128()
    for path in found:
        content = path.read_bytes()
        state.update(f"{path.name}\0{len(content)}\0".encode())
        state.update(content)
    return state.hexdigest()


def base_digest(model_dir: Path | str) -> str:
    """Digest over names and contents of the weight files (``*.safetensors``), read once, several at a time.

    Raises UserError when there are none or one cannot be read.
    """
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise UserError(f"{model_dir} holds no weights: expected *.safetensors")
    with digest_threads() as threads:
        try:
            digests = list(threads.map(_file_digest, files))
        except OSError as error:
            raise UserError(f"cannot read the weights in {model_dir}: {error}") from error
    named = "".join(f"{file.name}\0{digest}\0" for file, digest in zip(files, digests, strict=True))
    return xxhash.xxh3_128_hexdigest(named.encode())


def _file_digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()


def model_config_digest(model_dir: Path | str) -> str:
    """Digest of config.json, independent of key order and of provenance keys. Raises UserError when it cannot be read."""
    path = Path(model_dir) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the model configuration {path}: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object")
    kept = {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
    return xxhash.xxh3_128_hexdigest(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())
