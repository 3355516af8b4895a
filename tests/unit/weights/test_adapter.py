"""An adapter on its way: manifest, directory in PEFT's format, the place where it lies, the base it belongs to."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcrl.errors import DataError, EnvironmentFault, InfraError, UserError
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.adapter import peft_config, peft_name, read_adapter, write_adapter
from hpcrl.weights.adapter_store import AdapterStore
from hpcrl.weights.digest import base_digest, chunk_digest
from hpcrl.weights.manifest import Adapter, Chunk, Manifest, cut
from hpcrl.weights.snapshot import Snapshot
from hpcrl.weights.staging import remove_leftovers

CONFIG = peft_config("/models/base", 3, 6.0, ["q", "v"])


def published(version: str = "0.1", dtype: torch.dtype = torch.float32) -> tuple[Manifest, memoryview]:
    """Manifest and flat copy of random A (3, 5) and B (7, 3) on two layers' q and v."""
    torch.manual_seed(0)
    shapes = {"A": (3, 5), "B": (7, 3)}
    tensors = {
        peft_name(f"layers.{layer}.{module}", matrix): torch.randn(shapes[matrix]).to(dtype)
        for layer in (0, 1)
        for module in ("q", "v")
        for matrix in ("A", "B")
    }
    snapshot = Snapshot(lambda: tensors.items())
    snapshot.capture()
    pieces = cut(snapshot.layout.nbytes, 100)
    chunks = [Chunk(start, size, chunk_digest(snapshot.view[start : start + size])) for start, size in pieces]
    manifest = Manifest.build(
        PolicyVersion.parse(version),
        None,
        snapshot.layout,
        chunks,
        tokenizer_digest="t",
        model_config_digest="c",
        adapter=Adapter(CONFIG, "b"),
    )
    return manifest, snapshot.view


def test_a_manifest_says_that_it_is_an_adapter_and_of_what() -> None:
    manifest, _ = published()
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.adapter is not None
    assert (again.adapter.base_digest, again.adapter.config["r"]) == ("b", 3)
    whole = json.loads(replace(manifest, adapter=None).to_json())
    assert Manifest.from_dict(whole).adapter is None
    whole["adapter"] = {"config": {}}
    with pytest.raises(DataError, match="base_digest"):
        Manifest.from_dict(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_directory_holds_what_was_published(tmp_path: Path, dtype: torch.dtype) -> None:
    manifest, flat = published(dtype=dtype)
    write_adapter(manifest, flat, tmp_path / "0.1")
    assert json.loads((tmp_path / "0.1/adapter_config.json").read_text()) == CONFIG
    tensors = read_adapter(manifest, tmp_path / "0.1")
    assert len(tensors) == 8
    found = tensors["base_model.model.layers.1.v.lora_B.weight"]
    assert (found.dtype, tuple(found.shape)) == (dtype, (7, 3))
    entry = next(entry for entry in manifest.tensors if entry.name.endswith("layers.1.v.lora_B.weight"))
    assert bytes(found.view(torch.uint8).numpy().data) == bytes(flat[entry.offset : entry.offset + entry.nbytes])


def test_a_directory_that_differs_from_the_manifest(tmp_path: Path) -> None:
    manifest, flat = published()
    changed = bytearray(flat)
    changed[2] ^= 1
    write_adapter(manifest, memoryview(changed), tmp_path / "bytes")
    with pytest.raises(DataError, match=r"the tensors in .* differ from the manifest"):
        read_adapter(manifest, tmp_path / "bytes")
    write_adapter(manifest, flat, tmp_path / "config")
    (tmp_path / "config/adapter_config.json").write_text(json.dumps(CONFIG | {"lora_alpha": 7}))
    with pytest.raises(DataError, match=r"adapter_config\.json differs from the manifest"):
        read_adapter(manifest, tmp_path / "config")
    fewer = replace(manifest, tensors=(replace(manifest.tensors[0], name="x"), *manifest.tensors[1:]))
    write_adapter(fewer, flat, tmp_path / "names")
    with pytest.raises(DataError, match=r"layers\.0\.q\.lora_A\.weight is not in"):
        read_adapter(manifest, tmp_path / "names")
    with pytest.raises(DataError, match="cannot read"):
        read_adapter(manifest, tmp_path / "none")
    with pytest.raises(DataError, match=r"version 0\.1 is not an adapter"):
        write_adapter(replace(manifest, adapter=None), flat, tmp_path / "whole")


def test_the_store_keeps_each_version_until_it_is_told(tmp_path: Path) -> None:
    with AdapterStore("run/1", "replica0", tmp_path) as store:
        for version in ("0.1", "0.2"):
            manifest, flat = published(version)
            (tmp_path / "staging").write_bytes(bytes(flat) + b"of a larger version before")
            directory = store.write(manifest, tmp_path / "staging")
            (tmp_path / "staging").unlink()
            assert len(read_adapter(manifest, directory)) == 8
        assert store.root.name == "hpcrl-run_1-replica0.adapters"
        store.remove("0.1")
        assert [path.name for path in store.root.iterdir()] == ["0.2"]
        with pytest.raises(InfraError, match="adapter_files: cannot write the adapter"):
            store.write(manifest, tmp_path / "gone")
        with pytest.raises(EnvironmentFault, match="belongs to a process that is still running"):
            AdapterStore("run/1", "replica0", tmp_path)
        assert remove_leftovers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_adapters_of_a_dead_replica_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from hpcrl.weights.adapter_store import AdapterStore;"
        "s = AdapterStore('dead', 'r0', pathlib.Path(sys.argv[1])); (s.root / '0.1').mkdir(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert [path.name for path in tmp_path.iterdir()] == ["hpcrl-dead-r0.adapters"]
    assert [path.name for path in remove_leftovers(tmp_path)] == ["hpcrl-dead-r0.adapters"]
    assert list(tmp_path.iterdir()) == []


def test_the_base_is_told_by_the_content_of_its_weight_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-1.safetensors").write_bytes(b"one")
        (tmp_path / name / "model-2.safetensors").write_bytes(b"two")
    (tmp_path / "b/config.json").write_text("{}")
    assert base_digest(tmp_path / "a") == base_digest(tmp_path / "b")
    (tmp_path / "b/model-2.safetensors").write_bytes(b"twp")
    assert base_digest(tmp_path / "a") != base_digest(tmp_path / "b")
    with pytest.raises(UserError, match="holds no weights"):
        base_digest(tmp_path)
