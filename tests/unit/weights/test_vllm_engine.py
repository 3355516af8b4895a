from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpcrl.errors import DataError
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import chunk_digest
from hpcrl.weights.manifest import Chunk, Layout, Manifest, cut
from hpcrl.weights.vllm_engine import StagedWeights, check_staged, update_info

TENSORS = {
    "embed.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "layers.0.w": torch.arange(5, dtype=torch.bfloat16),
    "layers.0.none": torch.empty(0, 3),
    "layers.1.scale": torch.tensor(2.5),
}


def staged(folder: Path) -> tuple[Manifest, Path]:
    layout = Layout.of((name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in TENSORS.items())
    data = bytearray(layout.nbytes)
    for entry in layout.tensors:
        flat = TENSORS[entry.name].contiguous().reshape(-1).view(torch.uint8) if entry.nbytes else torch.empty(0)
        data[entry.offset : entry.offset + entry.nbytes] = bytes(flat.tolist())
    chunks = [Chunk(o, n, chunk_digest(bytes(data[o : o + n]))) for o, n in cut(layout.nbytes, 50)]
    version = PolicyVersion(0, 3)
    manifest = Manifest.build(version, None, layout, chunks, tokenizer_digest="", model_config_digest="")
    path = folder / "staging"
    path.write_bytes(data)
    return manifest, path


def test_tensors_come_back_in_manifest_order(tmp_path: Path) -> None:
    manifest, path = staged(tmp_path)
    weights = StagedWeights.open(**update_info(manifest, path))
    for _ in range(2):
        found = list(weights)
        assert [name for name, _ in found] == [entry.name for entry in manifest.tensors]
        for name, tensor in found:
            assert tensor.dtype == TENSORS[name].dtype
            assert torch.equal(tensor, TENSORS[name])


def test_the_file_is_never_written(tmp_path: Path) -> None:
    manifest, path = staged(tmp_path)
    before = path.read_bytes()
    for _, tensor in StagedWeights(manifest, path):
        tensor.fill_(7)
    assert path.read_bytes() == before


def test_a_manifest_file_is_read(tmp_path: Path) -> None:
    manifest, path = staged(tmp_path)
    file = tmp_path / "0.3.json"
    file.write_text(json.dumps(manifest.to_dict()))
    assert StagedWeights.open(**update_info(file, path)).manifest == manifest


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    manifest, path = staged(tmp_path)
    file = tmp_path / "0.3.json"
    file.write_text(manifest.to_json())
    check_staged(file, path)
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"staged_weights: version 0\.3: the chunk at byte 50"):
        check_staged(file, path)
    with pytest.raises(DataError, match="staged_weights: cannot read the manifest"):
        check_staged(tmp_path / "absent.json", path)
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match="staged_weights"):
        check_staged(file, path)
    with pytest.raises(DataError, match="staged_weights"):
        StagedWeights(manifest, path)
    with pytest.raises(DataError, match="staged_weights"):
        StagedWeights(manifest, tmp_path / "absent")
    with pytest.raises(DataError, match="staged_weights"):
        StagedWeights.open(str(tmp_path / "absent.json"), str(path))
