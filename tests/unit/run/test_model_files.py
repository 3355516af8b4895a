"""The model on the node's own disk: one copy for all, whole or not there."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from hpcrl.config import RunConfig, parse_config
from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.run import model_files
from hpcrl.run.model_files import on_this_node


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = tmp_path / "model"
    (model / "more").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(os.urandom(3 << 20))
    (model / "more" / "vocab.txt").write_text("a")
    return parse_config({"model": {"path": str(model), "stage": str(tmp_path / "disk")}, "tasks": {"train": "t"}})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copies(config: RunConfig) -> list[Path]:
    return [path for path in Path(config.model.stage or "").glob("*/*") if path.is_dir()]


def test_without_the_key_nothing_changes(config: RunConfig) -> None:
    plain = config.model_copy(update={"model": config.model.model_copy(update={"stage": None})})
    assert on_this_node(plain) is plain


def test_all_processes_of_a_node_share_one_copy(config: RunConfig) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = {local.model.path for local in pool.map(on_this_node, [config] * 8)}
    assert [Path(path) for path in found] == copies(config)
    assert contents(copies(config)[0]) == contents(Path(config.model.path))
    assert on_this_node(config).model_copy(update={"model": config.model}) == config
    assert copies(config)[0].parent.stat().st_mode & 0o077 == 0


def test_a_changed_model_is_another(config: RunConfig) -> None:
    first = on_this_node(config).model.path
    (Path(config.model.path) / "config.json").write_text("[]")
    second = on_this_node(config).model.path
    os.utime(Path(config.model.path) / "model.safetensors", (1.0, 1.0))
    assert len({first, second, on_this_node(config).model.path}) == 3


def test_what_a_killed_copy_left_is_never_read(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(model_files.shutil, "copyfile", killed)
        on_this_node(config)
    assert [path.name.startswith(".") for path in copies(config)] == [True]
    local = on_this_node(config)
    assert copies(config) == [Path(local.model.path)]


def test_too_little_room_and_bad_places(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def placed(stage: str) -> RunConfig:
        return config.model_copy(update={"model": config.model.model_copy(update={"stage": stage})})

    for stage in ("relative", "$NO_SUCH_VARIABLE/x"):
        with pytest.raises(UserError, match="must be an absolute path"):
            on_this_node(placed(stage))
    monkeypatch.setenv("LOCAL_DISK", str(tmp_path / "other"))
    assert on_this_node(placed("$LOCAL_DISK")).model.path.startswith(str(tmp_path / "other"))
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"cannot copy .*: Not a directory; choose a directory"):
        on_this_node(placed(str(tmp_path / "file")))
    usage = model_files.shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(model_files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(EnvironmentFault, match=r"has 1 MiB free, the model in .* 3 MiB; make room"):
        on_this_node(config)
