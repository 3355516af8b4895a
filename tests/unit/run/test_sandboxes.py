from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hpcrl.config import RunConfig, parse_config
from hpcrl.errors import EnvironmentFault, InfraError, UserError
from hpcrl.run import sandboxes
from hpcrl.run.sandboxes import Images, empty_artifact, limits_of, node_arguments, process_name
from hpcrl.sandbox.artifact import apply_artifact
from hpcrl.sandbox.images import Image, resolve
from hpcrl.sandbox.tasks import load_task


def config(**sandbox: object) -> RunConfig:
    return parse_config({"model": {"path": "m"}, "tasks": {"train": "t"}, "sandbox": sandbox})


def test_limits_are_the_configured_ones() -> None:
    limits = limits_of(
        config(memory_mib=3, disk_mib=5, command_timeout_s=7, output_bytes=9, processes=11, open_files=13)
    )
    assert limits.memory_bytes == 3 << 20 and limits.disk_bytes == limits.file_bytes == 5 << 20
    assert (limits.command_timeout_s, limits.output_bytes, limits.processes, limits.open_files) == (7, 9, 11, 13)


def test_the_empty_artifact_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        applied = apply_artifact(empty_artifact(), root, None, 1 << 20)
    finally:
        os.close(root)
    assert (applied.written, applied.deleted, applied.refused) == (0, 0, 0)
    assert os.listdir(tmp_path) == ["kept"]


def image_directory(path: Path) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "sh").touch()
    return path


def test_images_are_the_tasks_own_or_the_runs(tmp_path: Path) -> None:
    task_dir = tmp_path / "task"
    own = image_directory(task_dir / "root")
    (task_dir / "instruction.md").write_text("Do it.")
    (task_dir / "task.toml").write_text('[environment]\nimage = "root"\n')
    shared = image_directory(tmp_path / "shared")

    async def main() -> None:
        images = Images(config(image=str(shared)))
        run_image, own_image = await images.of(None), await images.of(load_task(task_dir))
        assert run_image is not None and run_image.path == shared
        assert own_image is not None and own_image.path == own
        assert await images.of(None) is run_image
        with pytest.raises(UserError, match="nowhere"):
            await Images(config(image="nowhere")).of(None)
        assert await Images(config(image="nowhere", backend="process")).of(None) is None

    asyncio.run(main())


def test_a_failed_image_fails_its_attempt_and_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    task_dir = tmp_path / "task"
    task_dir.mkdir()
    (task_dir / "instruction.md").write_text("Do it.")
    (task_dir / "task.toml").write_text("")
    task = load_task(task_dir)
    image = resolve(str(image_directory(tmp_path / "image")))
    results: list[Image | EnvironmentFault] = [EnvironmentFault("no space"), EnvironmentFault("no space"), image]

    def flaky(name: str, directory: Path | None) -> Image:
        result = results.pop(0)
        if isinstance(result, EnvironmentFault):
            raise result
        return result

    monkeypatch.setattr(sandboxes, "resolve", flaky)

    async def main() -> None:
        images = Images(config(image="some"))
        with pytest.raises(EnvironmentFault, match="no space"):  # a node that never had an image ends
            await images.of(None)
        with pytest.raises(InfraError, match="no space") as caught:
            await images.for_attempt(task)
        assert caught.value.reason == "image"
        assert await images.for_attempt(task) is image
        assert await images.for_attempt(task) is image

    asyncio.run(main())
    assert results == []


def test_names_and_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_name(3).endswith("-3") and "." not in process_name(3)
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert node_arguments("x").parse_args([]).index == 2
    assert node_arguments("x").parse_args(["--index", "1"]).index == 1
    assert process_name(3, "45") == process_name(3) + "-j45"
    assert node_arguments("x").parse_args(["--job", "45"]).job == "45"
