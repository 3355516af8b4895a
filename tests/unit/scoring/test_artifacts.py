from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.errors import DataError
from hpcrl.protocol.rundir import RunDir
from hpcrl.scoring.artifacts import digest_of, load_artifact, store_artifact


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_equal_artifacts_are_stored_once_and_read_back(run_dir: RunDir) -> None:
    path, digest = store_artifact(run_dir, b"content")
    assert store_artifact(run_dir, b"content") == (path, digest)
    assert digest == digest_of(b"content") and path == f"artifacts/{digest}"
    assert load_artifact(run_dir, path, digest) == b"content"
    assert [file.name for file in run_dir.artifacts.iterdir()] == [digest]


def test_what_was_changed_or_lost_is_a_data_error(run_dir: RunDir) -> None:
    path, digest = store_artifact(run_dir, b"content")
    (run_dir.root / path).write_bytes(b"contents")
    with pytest.raises(DataError) as caught:
        load_artifact(run_dir, path, digest)
    assert caught.value.reason == "artifact_corrupt"
    (run_dir.root / path).unlink()
    with pytest.raises(DataError) as caught:
        load_artifact(run_dir, path, digest)
    assert caught.value.reason == "artifact_missing"


@pytest.mark.parametrize("path", ["../token", "/etc/passwd"])
def test_only_paths_inside_the_run_directory(run_dir: RunDir, path: str) -> None:
    with pytest.raises(DataError):
        load_artifact(run_dir, path, "sha256-0")
