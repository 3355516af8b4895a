from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.bench.files import FileServer, drop_cache, fetch
from hpcrl.bench.model import parse_size, shape_for
from hpcrl.bench.weights import WeightsBench, summarise
from hpcrl.errors import InfraError, UserError

KEYS = "raw_s transfer_verify_s total_s pause_s load_only_s snapshot_s blocked_s gloo_s file_total_s file_pause_s rss_growth"


def bench(**options: object) -> WeightsBench:
    values: dict[str, object] = {"nbytes": 1 << 20, "dtype": "bfloat16", "senders": 1, "receivers": 1, "link": "none"}
    return WeightsBench(**(values | {"algorithm": "auto", "repeats": 5, "cluster": "hpcrl-t"} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"), [("256MiB", 256 << 20), ("1G", 1 << 30), ("1.5 KiB", 1536), ("4096", 4096), ("64mb", 64 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "12 TB", "-1G", "1e999"])
def test_impossible_sizes_are_named(text: str) -> None:
    with pytest.raises(UserError, match="expected a number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("nbytes", [16 << 20, 64 << 20, 256 << 20, 1 << 30])
def test_a_model_is_as_large_as_asked_for_and_of_usual_shape(nbytes: int) -> None:
    width, layers = shape_for(nbytes, "bfloat16")
    assert 16 <= layers <= 70
    assert layers * 13 * width * width * 2 == pytest.approx(nbytes, rel=0.05)


def test_medians_leave_out_the_first_round_and_take_the_slowest_rank() -> None:
    def row(n: int, rank: int) -> dict[str, float]:
        values = {"raw": n, "gloo": 10 * n, "write": 2.0, "read": 3.0, "rss": 100.0 + n, "began": 50.0}
        values |= {"transfer_verify_s": 5.0 * n, "snapshot_s": n + rank, "blocked_s": 1.0 - rank / 2}
        return values | {"flipped": 60.0 + rank, "pause_s": 0.5, "load_only_s": 0.4, "file_pause_s": 9.0}

    result = summarise([[row(n, rank) for n in (99, 1, 2, 30)] for rank in range(4)], senders=2)
    assert set(result) == set(KEYS.split())
    assert (result["raw_s"], result["transfer_verify_s"], result["gloo_s"]) == (2, 10, 20)
    assert (result["snapshot_s"], result["blocked_s"]) == (3, 1)
    assert (result["total_s"], result["file_total_s"], result["pause_s"]) == (13, 5, 0.5)
    assert result["rss_growth"] == round(130 / 101 - 1, 4)


def test_without_an_engine_its_measures_are_none() -> None:
    row = {"raw": 1.0, "transfer_verify_s": 1.0, "began": 0.0, "snapshot_s": 1.0, "blocked_s": 1.0, "gloo": 1.0}
    row |= {"write": 1.0, "read": 1.0, "rss": 1.0, "flipped": 2.0}
    result = summarise([[row, row], [row, row]], senders=1)
    assert [key for key, value in result.items() if value is None] == [
        *("pause_s", "load_only_s", "file_total_s", "file_pause_s")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "tree"}, "--algo tree: allowed are auto, star, chain"),
        ({"dtype": "int4"}, "--dtype int4: allowed are"),
        ({"receivers": 0}, "at least 1"),
        ({"receivers": 9999}, "at most 200 nodes together"),
        ({"link": "fast"}, "--link fast: expected a rate as tc takes it"),
        ({"link": "0mbit"}, "--link 0mbit: expected a rate"),
        ({"model": Path("/nowhere")}, "/nowhere holds no model.safetensors"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench(**options).run(lambda line: None)


def test_a_file_crosses_a_socket(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(json.dumps(list(range(100_000))).encode())
    drop_cache(source)
    server = FileServer("127.0.0.1", source)
    fetch(server.address, target, source.stat().st_size)
    assert target.read_bytes() == source.read_bytes()
    with pytest.raises(InfraError, match="of 9999999 bytes"):
        fetch(server.address, target, 9_999_999)
