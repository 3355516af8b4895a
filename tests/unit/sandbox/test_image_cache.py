"""One build for many, and no removal of what is used; across processes, since that is what locks are for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.sandbox.image_cache import build_once, cached_images, prune

KEY = "sha256-aa"
_USER = """
import sys, time
from pathlib import Path
from hpcrl.sandbox.image_cache import build_once
def build(target):
    time.sleep(0.05)
    target.mkdir()
    (target / "file").write_text("x")
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
build_once(Path(sys.argv[1]), build, Path("x.def"))
print("there", flush=True)
sys.stdin.read()
"""


def user(target: Path, log: Path) -> subprocess.Popen[str]:
    """A process that needs the image, and keeps it until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", _USER, str(target), str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end(process: subprocess.Popen[str]) -> None:
    process.communicate()
    assert process.returncode == 0


def test_processes_build_once_and_keep_an_image_from_being_removed(tmp_path: Path) -> None:
    target = tmp_path / "images" / KEY
    users = [user(target, tmp_path / "log") for _ in range(3)]
    for one in users:
        assert one.stdout is not None and one.stdout.readline() == "there\n"
    assert (tmp_path / "log").read_text() == "built\n"
    [image] = cached_images(tmp_path)
    assert (image.key, image.source, image.in_use) == (KEY, "x.def", True) and image.size >= 0
    for one in users[1:]:
        end(one)
    assert prune(tmp_path, 0) == [] and target.is_dir()
    end(users[0])
    assert prune(tmp_path, 3600) == []  # used just now
    assert [image.key for image in prune(tmp_path, 0, dry_run=True)] == [KEY] and target.is_dir()
    assert prune(tmp_path, 0, ("sha256-bb",)) == [] and target.is_dir()
    assert [image.key for image in prune(tmp_path, 0)] == [KEY]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [KEY + ".lock"]


def test_an_image_of_this_process_is_in_use(tmp_path: Path) -> None:
    target = tmp_path / "images" / KEY
    build_once(target, Path.mkdir, Path("x.sif"))
    assert prune(tmp_path, 0) == [] and target.is_dir()
    target.rmdir()  # by hand: it is built again
    build_once(target, Path.mkdir, Path("x.sif"))
    assert target.is_dir()


def test_a_failed_build_leaves_nothing_and_the_next_one_builds(tmp_path: Path) -> None:
    target = tmp_path / "images" / KEY

    def fail(new: Path) -> None:
        new.mkdir()
        raise EnvironmentFault("no space")

    with pytest.raises(EnvironmentFault, match="no space"):
        build_once(target, fail, Path("x.def"))
    assert [path.name for path in target.parent.iterdir()] == [KEY + ".lock"]
    with pytest.raises(EnvironmentFault, match="is not built yet"):
        build_once(target, fail, Path("x.def"), build=False)
    assert build_once(target, Path.mkdir, Path("x.def")).is_dir()


def test_what_a_dead_builder_left_is_removed_but_not_what_is_being_built(tmp_path: Path) -> None:
    images = tmp_path / "images"
    left = images / f".{KEY}.0000.new"
    left.mkdir(parents=True)
    building, go_on = threading.Event(), threading.Event()

    def slow(new: Path) -> None:
        new.mkdir()
        building.set()
        go_on.wait(10)

    thread = threading.Thread(target=build_once, args=(images / "sha256-bb", slow, Path("y.def")))
    thread.start()
    assert building.wait(10)
    prune(tmp_path, 0)
    assert not left.exists() and list(images.glob(".sha256-bb.*.new"))
    go_on.set()
    thread.join()
    assert (images / "sha256-bb").is_dir()
    assert cached_images(tmp_path)[0].used_at <= time.time()


def test_directories_that_the_site_named_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "images" / "python_3.12").mkdir(parents=True)
    assert cached_images(tmp_path) == [] and prune(tmp_path, 0) == []
    assert (tmp_path / "images" / "python_3.12").is_dir()
