"""Commands that look at a run: a wrong place or file is one line and a code that is not 0; nothing is replaced unasked."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.coordinator.database import create_tables
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.trajectory import ShardWriter, Trajectory

RUNNER = CliRunner()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that ended, with one shard of two trajectories (3 trained tokens each) and an empty database."""
    found = RunDir(tmp_path / "runs" / "r")
    found.create()
    publish_text(found.config, yaml.safe_dump({"model": {"path": "m"}, "tasks": {"train": "t"}}))
    issue_keys(found)
    end = {"state": "success", "reason": "", "started_at": 1.0, "ended_at": 2.0}
    publish_text(found.end, json.dumps(end))
    publish_text(found.metrics / "trainer-0.jsonl", '{"t": 1.5, "step": 1, "reward_mean": 0.5}\n')
    with ShardWriter(found.shards, "w") as writer:
        for index in range(2):
            writer.append(trajectory(index))
        writer.seal()
    with closing(sqlite3.connect(found.database)) as database:
        create_tables(database)
        database.commit()
    return found


def trajectory(index: int) -> Trajectory:
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    return Trajectory(
        run_id="r",
        task_id="t",
        group_id="g000000",
        rollout_id=f"g000000-r{index}",
        attempt_id=f"g000000-r{index}-a0",
        split="train",
        policy_version="0.3",
        environment_version="e",
        verifier_version="v",
        token_ids=np.arange(5, dtype=np.int32),
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        loss_mask=mask,
        segments=np.array([0], np.int32),
        spans=np.array([[2, 5, 0, 3]], np.int32),
        reward=0.5,
        first_token_at=1.5,
        messages=[{"role": "user", "content": "x"}],
    )


def refused(*argv: str | Path, code: tuple[int, ...] = (2, 3)) -> str:
    result = RUNNER.invoke(app, [str(part) for part in argv])
    assert result.exit_code in code, result.output
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("hpcrl: ")
    return f"{result.stdout}{line}"


def accepted(*argv: str | Path) -> str:
    result = RUNNER.invoke(app, [str(part) for part in argv])
    assert result.exit_code == 0, result.output
    return result.stdout


COMMANDS = {
    "status": (["status"], []),
    "follow": (["status", "--follow"], []),
    "rollout": (["status", "rollout", "g000000-r0", "--run-dir"], []),
    "report": (["report"], []),
    "db": (["db", "check"], []),
    "ls": (["shards", "ls"], []),
    "show": (["shards", "show"], ["g000000-r0-a0"]),
    "verify": (["shards", "verify"], []),
    "export": (["shards", "export"], ["--out", "OUT"]),
    "compare": (["compare", "SVG"], []),
    "resume": (["run", "--resume"], []),
}


def line_of(name: str, place: str | Path, tmp_path: Path) -> list[str]:
    head, tail = COMMANDS[name]
    places = {"OUT": str(tmp_path / "out.jsonl"), "SVG": str(tmp_path / "out.svg")}
    middle = f"label={place}" if name == "compare" else str(place)
    return [places.get(part, part) for part in [*head, middle, *tail]]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "follow"])
def test_a_run_that_is_not_there(name: str, tmp_path: Path) -> None:
    assert "/nowhere/r" in refused(*line_of(name, "/nowhere/r", tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_in_place_of_a_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in refused(*line_of(name, tmp_path / "file", tmp_path), code=(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_an_empty_directory_in_place_of_a_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refused(*line_of(name, tmp_path / "empty", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("name", ["ls", "show", "verify", "export"])
@pytest.mark.parametrize("content", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n" + b"\0" * 64])
def test_a_file_that_is_no_shard(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_bytes(content)
    assert "x.h5" in refused(*line_of(name, tmp_path / "x.h5", tmp_path), code=(1,))
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


@pytest.mark.parametrize("name", ["report", "compare"])
@pytest.mark.parametrize(
    "content",
    [b'{"t": "x", "step": [1], "reward_mean": {}}\n', b"\xff\xfe\n", b'{"t": 1, "step_s": "a", "lag": {"0": "b"}}\n'],
)
def test_damaged_metrics_are_left_out(name: str, content: bytes, run: RunDir, tmp_path: Path) -> None:
    (run.metrics / "trainer-1.jsonl").write_bytes(content)
    accepted(*line_of(name, run.root, tmp_path))


@pytest.mark.parametrize("name", ["status", "report", "compare"])
def test_a_damaged_configuration_is_named(name: str, run: RunDir, tmp_path: Path) -> None:
    run.end.unlink()
    run.config.write_text("trainer: {setps: 3}")
    if name == "status":
        assert "no answer" in refused(*line_of(name, run.root, tmp_path), code=(1,))
    else:
        assert "unknown key trainer.setps" in refused(*line_of(name, run.root, tmp_path))


def test_verify_counts_trained_tokens_and_those_without_a_version(run: RunDir, tmp_path: Path) -> None:
    assert "6 trained tokens, 0 of them without a version" in accepted("shards", "verify", run.root)
    [shard] = run.shards.glob("*.h5")
    # A name without a digest; the reader then checks each row itself.
    bare = tmp_path / "bare.h5"
    shutil.copy(shard, bare)
    with h5py.File(bare, "r+") as file:
        file["spans"][0] = [3, 5, 0, 3]
    result = RUNNER.invoke(app, ["shards", "verify", str(bare)])
    assert result.exit_code == 1
    assert "bare.h5" in result.stdout and "1 trained tokens are covered by no version span" in result.stdout


def test_verify_names_a_shard_that_is_gone(run: RunDir) -> None:
    [shard] = run.shards.glob("*.h5")
    gone = "w-00007.0123456789abcdef0123456789abcdef.h5"
    with closing(sqlite3.connect(run.database)) as database:
        row = "INSERT INTO attempts (attempt_id, state, shard) VALUES (?, ?, ?)"
        database.executemany(row, [("a", "consumed", f"shards/{shard.name}"), ("b", "infra_failed", "shards/x.h5")])
        database.commit()
        assert "0 missing" in accepted("shards", "verify", run.root)
        database.execute(row, ("c", "consumed", f"shards/{gone}"))
        database.commit()
    result = RUNNER.invoke(app, ["shards", "verify", str(run.root)])
    assert result.exit_code == 1 and f"missing: shards/{gone}" in result.stdout
    (run.shards / "quarantine").mkdir()
    (run.shards / "quarantine" / gone).write_bytes(b"")
    assert "0 missing" in accepted("shards", "verify", run.root)
    run.end.unlink()
    (run.shards / "quarantine" / gone).unlink()
    assert "0 missing" in accepted("shards", "verify", run.root)  # a run that may go on is not asked


@pytest.fixture
def damaged(run: RunDir) -> Path:
    """A shard of the run that is one byte short, before the whole one in order."""
    [whole] = run.shards.glob("*.h5")
    path = run.shards / f"a{whole.name}"
    path.write_bytes(whole.read_bytes()[:-1])
    return path


class TestBesideADamagedShard:
    def test_the_others_are_listed_and_shown(self, run: RunDir, damaged: Path) -> None:
        assert "g000000-r1-a0" in accepted("shards", "show", run.root, "g000000-r1-a0")
        said = RUNNER.invoke(app, ["shards", "ls", str(run.root)])
        assert said.exit_code == 1 and "g000000-r1-a0" in said.stdout and damaged.name in said.stderr

    def test_an_attempt_that_may_be_in_it(self, run: RunDir, damaged: Path) -> None:
        assert damaged.name in refused("shards", "show", run.root, "g000000-r7-a0", code=(1,))

    def test_nothing_is_exported(self, run: RunDir, damaged: Path, tmp_path: Path) -> None:
        said = refused("shards", "export", run.root, "--out", tmp_path / "out.jsonl", code=(1,))
        assert str(damaged) in said and "nothing was written" in said
        assert not (tmp_path / "out.jsonl").exists()


def test_a_tokenizer_that_is_not_there(run: RunDir) -> None:
    said = RUNNER.invoke(app, ["shards", "show", str(run.root), "g000000-r1-a0"])
    assert said.exit_code == 0 and "tokens are shown as numbers: there is no m/tokenizer.json" in said.stderr
    assert "--model /nowhere: no tokenizer.json" in refused(
        "shards", "show", run.root, "g000000-r1-a0", "--model", "/nowhere"
    )


def test_a_page_cannot_be_a_directory(run: RunDir, tmp_path: Path) -> None:
    assert f"{tmp_path} is a directory" in refused("shards", "show", run.root, "g000000-r1-a0", "--html", tmp_path)


@pytest.mark.parametrize(("name", "file"), [("export", "out.jsonl"), ("compare", "out.svg")])
class TestFilesToWrite:
    def test_an_existing_one_is_kept_unless_forced(self, name: str, file: str, run: RunDir, tmp_path: Path) -> None:
        (tmp_path / file).write_text("precious")
        assert f"{tmp_path / file} exists; " in refused(*line_of(name, run.root, tmp_path))
        assert (tmp_path / file).read_text() == "precious"
        accepted(*line_of(name, run.root, tmp_path), "--force")
        assert (tmp_path / file).read_text() != "precious"

    def test_a_directory(self, name: str, file: str, run: RunDir, tmp_path: Path) -> None:
        (tmp_path / file).mkdir()
        assert f"{tmp_path / file} is a directory" in refused(*line_of(name, run.root, tmp_path), "--force")

    def test_a_place_that_cannot_be_written(self, name: str, file: str, run: RunDir, tmp_path: Path) -> None:
        (tmp_path / "blocked").write_text("")
        line = line_of(name, run.root, tmp_path)
        line = [part.replace(file, f"blocked/{file}") for part in line]
        assert "Not a directory" in refused(*line) or "File exists" in refused(*line)


def test_what_compare_takes(run: RunDir, tmp_path: Path) -> None:
    svg = tmp_path / "out.svg"
    assert "a name ending in .svg" in refused("compare", run.config, f"a={run.root}")
    assert "a is given twice" in refused("compare", svg, f"a={run.root}", f"a={run.root}")
    for bad in ("a", "a=", f"={run.root}", f"a={run.root},"):
        assert "expected LABEL=RUN_DIR" in refused("compare", svg, bad)
    assert not svg.exists()


@pytest.mark.parametrize("content", [b"", b"no database " * 1000])
def test_a_database_that_is_none(content: bytes, run: RunDir) -> None:
    run.database.write_bytes(content)
    assert "coordinator.db" in refused("db", "check", run.root, code=(1, 2, 3))


def test_a_truncated_database_is_called_damaged(run: RunDir) -> None:
    run.database.write_bytes(run.database.read_bytes()[:6000])
    for command in (["db", "check", run.root], ["status", "rollout", "g000000-r0", "--run-dir", run.root]):
        assert "coordinator.db is damaged: " in refused(*command)


def test_a_database_damaged_inside(run: RunDir) -> None:
    with open(run.database, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)
    result = RUNNER.invoke(app, ["db", "check", str(run.root)])
    assert result.exit_code in (1, 3)
    assert "malformed" in result.output or "damaged" in result.output
    assert isinstance(result.exception, SystemExit)


def test_a_reader_that_has_seen_enough_is_no_error(run: RunDir) -> None:
    hpcrl = Path(sys.executable).with_name("hpcrl")
    command = f"{{ {hpcrl} shards ls {run.root}; echo code $? >&2; }} | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr in ("code 0\n", "code 1\n")  # 0: it had written all before the reader was gone
