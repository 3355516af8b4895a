"""Files of a run appear whole or not at all; secrets are the owner's alone."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.protocol.rundir import RunDir, publish, publish_text


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_failed_publication_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    publish_text(path, "old")
    with pytest.raises(RuntimeError), publish(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    with publish(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.parent == path.parent
        assert not list(path.parent.glob("*file"))
    assert path.read_text() == "new"


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    texts = {letter * 50_000 for letter in "abc"}
    publish_text(path, "a" * 50_000)
    done = threading.Event()

    def write() -> None:
        for letter in "abcabcabcabc":
            publish_text(path, letter * 50_000)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = {path.read_text()}
    while not done.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= texts


def test_a_secret_is_never_readable_by_others_not_even_while_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(os, "chmod", lambda path, _: written.append(mode(Path(path))))
    old = os.umask(0)
    try:
        publish_text(tmp_path / "token", "secret", 0o600)
        run = RunDir(tmp_path / "run")
        run.create()
        run.announce("coordinator", "http://10.0.0.1:4711")
    finally:
        os.umask(old)
    assert written == [0o600, 0o600]
    assert mode(tmp_path / "token") == 0o600
    assert mode(run.root) == 0o700
    assert mode(run.endpoints / "coordinator") == 0o600


def test_a_strict_umask_does_not_hide_files_from_their_readers(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        publish_text(tmp_path / "file", "x")
    finally:
        os.umask(old)
    assert mode(tmp_path / "file") == 0o644


def test_create_makes_the_folders_and_may_be_called_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "name")
    run.create()
    run.create()
    assert run.run_id == "name"
    folders = (run.endpoints, run.manifests, run.shards, run.checkpoints, run.metrics, run.artifacts)
    assert all(folder.is_dir() for folder in folders)


def test_endpoints_are_absent_until_announced_and_then_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.endpoint("coordinator") is None
    run.announce("coordinator", "http://10.0.0.1:1")
    run.announce("coordinator", "http://10.0.0.2:2")
    assert run.endpoint("coordinator") == "http://10.0.0.2:2"


def test_a_token_that_cannot_be_read_says_what_may_be_wrong(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="file system shared by all nodes"):
        RunDir(tmp_path).secret()


def test_the_root_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDir(Path("runs/x")).root == tmp_path.resolve() / "runs" / "x"
