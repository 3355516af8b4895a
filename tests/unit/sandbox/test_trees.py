from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.sandbox.trees import MAX_DEPTH, TreeTooDeep, copy_tree, open_parent, read_file, remove_tree, walk, write_file


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _deep(path: Path, levels: int) -> None:
    descriptor = _open(path)
    for _ in range(levels):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)


def test_walk_is_ordered_and_does_not_follow(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("x")
    (tmp_path / "a").write_text("a")
    (tmp_path / "c").symlink_to("/etc")
    root = _open(tmp_path)
    assert [entry.path for entry in walk(root)] == ["a", "b", "b/x", "c"]
    os.close(root)


def test_depth_is_bounded_and_removal_is_not(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    _deep(top, 1200)
    root = _open(top)
    with pytest.raises(TreeTooDeep):
        list(walk(root))
    os.close(root)
    before = len(os.listdir("/proc/self/fd"))
    remove_tree(top)
    assert not top.exists() and len(os.listdir("/proc/self/fd")) == before


def test_removal_of_a_missing_and_of_a_closed_tree(tmp_path: Path) -> None:
    remove_tree(tmp_path / "missing")
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "f").write_text("x")
    for path in (top / "a" / "b", top / "a", top):
        path.chmod(0)
    remove_tree(top)
    assert not os.path.lexists(top)


def test_removal_spares_what_links_point_to(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("x")
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(outside)
    remove_tree(top)
    assert (outside / "f").exists()


@pytest.mark.parametrize("path", ["", "/etc/passwd", "..", "a/../../b", "a\0b", "/".join("d" * (MAX_DEPTH + 1))])
def test_paths_that_leave_are_refused(tmp_path: Path, path: str) -> None:
    root = _open(tmp_path)
    with pytest.raises(ValueError), open_parent(root, path, create=True):
        pass
    os.close(root)


def test_files_replace_links_and_refuse_fifos(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("safe")
    box = tmp_path / "box"
    box.mkdir()
    (box / "link").symlink_to(victim)
    os.mkfifo(box / "fifo")
    root = _open(box)
    with pytest.raises(OSError):
        read_file(root, "link", 10)
    with pytest.raises(ValueError):
        read_file(root, "fifo", 10)
    write_file(root, "link", b"new")
    write_file(root, "fifo", b"new")
    assert victim.read_text() == "safe" and read_file(root, "link", 2) == b"ne" and read_file(root, "fifo", 9) == b"new"
    os.close(root)


def test_copy(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d").mkdir(parents=True)
    (source / "d" / "run").write_text("x")
    (source / "d" / "run").chmod(0o6755)
    (source / "link").symlink_to("d")
    target.mkdir()
    (target / "link").write_text("in the way")
    root = _open(target)
    copy_tree(source, root)
    os.close(root)
    assert os.readlink(target / "link") == "d"
    assert (target / "d" / "run").stat().st_mode & 0o7777 == 0o755
