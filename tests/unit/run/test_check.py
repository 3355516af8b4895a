"""Every task's image is looked for before a run begins."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hpcrl.config import parse_config
from hpcrl.errors import UserError
from hpcrl.run.check import check_task_images
from hpcrl.run.sandboxes import Images


def image_directory(path: Path) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "sh").touch()
    return path


def add_task(folder: Path, name: str, toml: str = "") -> Path:
    task = folder / name
    task.mkdir(parents=True)
    (task / "instruction.md").write_text("Do it.")
    (task / "task.toml").write_text(toml)
    return task


def check(tmp_path: Path, **sandbox: str) -> None:
    """``train`` and ``eval`` below ``tmp_path``; the run's own image is not this check's business."""
    config = parse_config(
        {
            "model": {"path": "m"},
            "tasks": {"train": str(tmp_path / "train"), "eval": str(tmp_path / "eval")},
            "sandbox": {"image": "/nowhere/of-the-run", **sandbox},
        }
    )
    asyncio.run(check_task_images(config, Images(config)))


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """One task without an image and one whose image lies beside it, in both sets."""
    for name in ("train", "eval"):
        add_task(tmp_path / name, "plain")
        own = add_task(tmp_path / name, "with-image", '[environment]\nimage = "root"\n')
        image_directory(own / "root")
    return tmp_path


def test_images_that_are_there_pass(folders: Path) -> None:
    check(folders)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_image_that_nobody_has_is_named_with_its_task(folders: Path, split: str) -> None:
    task = add_task(folders / split, "with-none", '[environment]\ndocker_image = "python:3.12"\n')
    with pytest.raises(UserError) as caught:
        check(folders)
    assert str(caught.value).startswith(f"task {task}: image 'python:3.12' is neither a directory, a .sif nor a .def")
    assert "hpcrl images build docker://python:3.12" in str(caught.value)


def test_an_image_without_a_shell_is_named_with_its_task(folders: Path) -> None:
    task = add_task(folders / "train", "with-empty", '[environment]\nimage = "root"\n')
    (task / "root").mkdir()
    with pytest.raises(UserError, match=rf"task {task}: image directory .* has no /bin/sh"):
        check(folders)


def test_the_process_backend_has_no_images(folders: Path) -> None:
    add_task(folders / "train", "with-none", '[environment]\nimage = "nowhere"\n')
    check(folders, backend="process")
