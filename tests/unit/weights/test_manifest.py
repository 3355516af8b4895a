from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import DataError, UserError
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import chunk_digest, whole_digest
from hpcrl.weights.manifest import ALIGNMENT, Chunk, Layout, Manifest, cut, wire_order


def make(chunk_bytes: int = 100) -> Manifest:
    layout = Layout.of(
        [
            ("model.embed.weight", "bfloat16", (3, 5)),
            ("model.layers.0.w", "float32", (7,)),
            ("model.norm", "float32", ()),
        ]
    )
    data = bytes(range(layout.nbytes))
    chunks = [Chunk(o, n, chunk_digest(data[o : o + n])) for o, n in cut(layout.nbytes, chunk_bytes)]
    return Manifest.build(PolicyVersion(1, 7), "1.6", layout, chunks, tokenizer_digest="t", model_config_digest="c")


def test_round_trip_and_keys() -> None:
    manifest = make()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert set(json.loads(manifest.to_json())) == {
        "version", "parent", "digest", "nbytes", "tensors", "chunks", "tokenizer_digest", "model_config_digest", "lineage", "step",
        "adapter", "seal",
    }  # fmt: skip
    assert (manifest.version, manifest.lineage, manifest.step, manifest.parent) == ("1.7", 1, 7, "1.6")


def test_layout_by_hand() -> None:
    layout = make()
    assert [(t.name, t.offset, t.nbytes) for t in layout.tensors] == [
        ("model.embed.weight", 0, 30),
        ("model.layers.0.w", 64, 28),
        ("model.norm", 128, 4),
    ]
    assert layout.nbytes == 132


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8))
def test_tensors_are_aligned_and_do_not_overlap(shapes: list[list[int]]) -> None:
    layout = Layout.of((f"w.{i}", "bfloat16", shape) for i, shape in enumerate(shapes))
    end = 0
    for entry in layout.tensors:
        assert entry.offset % ALIGNMENT == 0 and entry.offset >= end
        end = entry.offset + entry.nbytes
    assert layout.nbytes == end


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("nbytes",), 131),
        (("digest",), "0" * 32),
        (("version",), "1.8"),
        (("version",), "seven"),
        (("chunks", 0, "digest"), "1" * 32),
        (("chunks", 0, "digest"), "not hex"),
        (("chunks", 1, "offset"), 99),
        (("tensors", 1, "offset"), 0),
        (("tensors", 1, "offset"), 65),
        (("tensors", 1, "shape"), [8]),
        (("tensors", 1, "dtype"), "float128"),
        (("surprise",), 1),
    ],
)
def test_inconsistent_manifest_is_refused(path: tuple[Any, ...], value: Any) -> None:
    data = make().to_dict()
    node: Any = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(DataError, match="manifest"):
        Manifest.from_dict(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("parent",), "1.5"),
        (("parent",), None),
        (("tokenizer_digest",), "u"),
        (("model_config_digest",), "d"),
        (("adapter",), {"config": {}, "base_digest": "b"}),
        (("tensors", 0, "name"), "model.norm2"),
        (("tensors", 0, "dtype"), "float16"),
        (("tensors", 0, "shape"), [5, 3]),
        (("tensors", 0, "offset"), 0.0),
        (("seal",), "0" * 32),
        (("seal",), None),
    ],
)
def test_what_no_digest_of_a_chunk_would_tell_breaks_the_seal(path: tuple[Any, ...], value: Any) -> None:
    data = make().to_dict()
    node: Any = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(DataError, match="its seal is another"):
        Manifest.from_dict(data)
    del data["seal"]
    with pytest.raises(DataError, match="manifest: malformed: 'seal'"):
        Manifest.from_dict(data)


def test_names_that_have_changed_places_break_the_seal() -> None:
    layout = Layout.of([("a", "float32", (2,)), ("b", "float32", (2,))])
    data = Manifest.build(
        PolicyVersion(0, 0),
        None,
        layout,
        [Chunk(0, layout.nbytes, "0" * 32)],
        tokenizer_digest="t",
        model_config_digest="c",
    ).to_dict()
    data["tensors"][0]["name"], data["tensors"][1]["name"] = "b", "a"
    with pytest.raises(DataError, match="its seal is another"):
        Manifest.from_dict(data)


def test_chunks_must_cover_the_copy() -> None:
    data = make().to_dict()
    data["chunks"].pop()
    data["digest"] = whole_digest(chunk["digest"] for chunk in data["chunks"])
    with pytest.raises(DataError, match="chunks end at 100, the copy at 132"):
        Manifest.from_dict(data)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 3}'])
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        Manifest.from_json(text)


def test_bad_tensors_are_named() -> None:
    with pytest.raises(UserError, match=r"w appears twice"):
        Layout.of([("w", "float32", (1,)), ("w", "float32", (1,))])
    with pytest.raises(UserError, match=r"w has type complex64; allowed: bool"):
        Layout.of([("w", "complex64", (1,))])
    for size in (0, (1 << 30) + 1):
        with pytest.raises(UserError, match="chunk_mib"):
            cut(10, size)


def test_wire_order_groups_by_layer() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.10.b",
        "model.layers.2.mlp.experts.11.w",
        "model.layers.2.mlp.experts.0.w",
        "model.norm.weight",
        "visual.blocks.0.w",
        "model.layers.0.a",
        "lm_head.weight",
    ]
    assert wire_order(names) == [
        "model.embed_tokens.weight",
        "model.layers.0.a",
        "model.layers.2.mlp.experts.11.w",
        "model.layers.2.mlp.experts.0.w",
        "model.layers.10.b",
        "visual.blocks.0.w",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert wire_order(["b", "a"]) == ["b", "a"]


@given(st.integers(0, 5000), st.integers(1, 700))
def test_cut_covers_every_byte_once(nbytes: int, chunk_bytes: int) -> None:
    end = 0
    for offset, size in cut(nbytes, chunk_bytes):
        assert offset == end and 0 < size <= chunk_bytes
        end += size
    assert end == nbytes


def test_whole_digest_depends_on_every_byte_and_on_order() -> None:
    parts = [chunk_digest(b"a"), chunk_digest(b"b")]
    assert whole_digest(parts) != whole_digest(parts[::-1])
    assert whole_digest(parts) != whole_digest([parts[0], chunk_digest(b"c")])
    assert len(whole_digest([])) == 32
