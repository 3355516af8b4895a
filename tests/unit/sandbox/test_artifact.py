from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.errors import DataError, PolicyError
from hpcrl.sandbox.artifact import Declared, apply_artifact, link_stays_inside, pack, restrict


@pytest.fixture
def root(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    path = tmp_path / "root"
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    yield path, descriptor
    os.close(descriptor)


@pytest.mark.parametrize(
    ("path", "target", "inside"),
    [
        ("a", "b", True),
        ("a/b", "../c", True),
        ("a/b", "../../c", False),
        ("a", "..", False),
        ("a", "b/../../c", False),
        ("a", "/etc/passwd", False),
        ("a", "./b//c", True),
        ("a", "", False),
    ],
)
def test_links(path: str, target: str, inside: bool) -> None:
    assert link_stays_inside(path, target) is inside


def test_round_trip(root: tuple[Path, int], tmp_path: Path) -> None:
    source, descriptor = root
    (source / "d").mkdir()
    (source / "d" / "f").write_bytes(b"\0\xff")
    (source / "d" / "f").chmod(0o4755)
    (source / os.fsdecode(b"odd\xff\n")).write_text("odd")
    (source / "link").symlink_to("d/f")
    (source / "out").symlink_to("/etc/passwd")
    os.mkfifo(source / "fifo")
    packed = pack(descriptor, lambda entry: True, ["gone", "d/f"], 1 << 20)
    target = tmp_path / "target"
    target.mkdir()
    (target / "gone").mkdir()
    (target / "gone" / "inner").write_text("x")
    (target / "link").mkdir()
    (target / "d").write_text("was a file")
    into = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    applied = apply_artifact(packed, into, None, 1 << 20)
    os.close(into)
    assert (applied.written, applied.deleted, applied.refused) == (4, 1, 0)
    assert sorted(os.listdir(target)) == ["d", "link", os.fsdecode(b"odd\xff\n")]
    assert (target / "d" / "f").read_bytes() == b"\0\xff" and os.readlink(target / "link") == "d/f"
    assert stat.S_IMODE((target / "d" / "f").stat().st_mode) == 0o755


def _archive(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        first = tarfile.TarInfo(".")
        first.type = tarfile.DIRTYPE
        first.pax_headers = {"HPCRL.artifact": "1", "HPCRL.deleted": '["../victim", "/etc", 3, ""]'}
        archive.addfile(first)
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return buffer.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, target, size
    return member


def test_a_hostile_archive_reaches_nothing_outside(root: tuple[Path, int], tmp_path: Path) -> None:
    path, descriptor = root
    (tmp_path / "victim").write_text("safe")
    (path / "planted").symlink_to(tmp_path)
    hostile = _archive(
        _member("../victim", size=3),
        _member(str(tmp_path / "victim"), size=3),
        _member("a/../../victim", size=3),
        _member("planted/victim", size=3),
        _member("up", tarfile.SYMTYPE, ".."),
        _member("absolute", tarfile.SYMTYPE, str(tmp_path)),
        _member("hard", tarfile.LNKTYPE, "../victim"),
        _member("device", tarfile.CHRTYPE),
        _member("fine", size=3),
    )
    applied = apply_artifact(hostile, descriptor, None, 1 << 20)
    assert (applied.written, applied.deleted, applied.refused) == (1, 0, 8)
    assert (tmp_path / "victim").read_text() == "safe" and sorted(os.listdir(path)) == ["fine", "planted"]


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 10240])
def test_no_artifact(root: tuple[Path, int], content: bytes) -> None:
    with pytest.raises(DataError) as caught:
        apply_artifact(content, root[1], None, 1 << 20)
    assert caught.value.reason == "artifact_corrupt"


def test_an_archive_of_somebody_else_or_cut_short(root: tuple[Path, int]) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        archive.addfile(_member("a"))
    for content in (plain.getvalue(), _archive(_member("big", size=5000))[:4000]):
        with pytest.raises(DataError):
            apply_artifact(content, root[1], None, 1 << 20)


def test_sizes_are_bounded(root: tuple[Path, int]) -> None:
    path, descriptor = root
    with pytest.raises(DataError, match="more than 4000 bytes"):
        apply_artifact(_archive(_member("big", size=5000)), descriptor, None, 4000)
    (path / "big").write_bytes(b"x" * 5000)
    with pytest.raises(PolicyError) as caught:
        pack(descriptor, lambda entry: True, [], 4000)
    assert caught.value.reason == "artifact_limit"


def test_an_artifact_without_changes_applies(root: tuple[Path, int]) -> None:
    packed = pack(root[1], lambda entry: False, [], 1000)
    assert apply_artifact(packed, root[1], None, 1000).written == 0


def test_only_what_was_declared_is_kept(tmp_path: Path) -> None:
    for name in ("keep/a", "keep/b.pyc", "other"):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).write_text(name)
    (tmp_path / "old" / "keep").mkdir(parents=True)
    for name in ("keep/gone", "gone"):
        (tmp_path / "old" / name).write_text("old")
    root = os.open(tmp_path / "new", os.O_RDONLY)
    whole = pack(root, lambda _: True, ("keep/gone", "gone"), 1 << 20)
    part = restrict(whole, (Declared("keep", ("*.pyc",)),))
    target = os.open(tmp_path / "old", os.O_RDONLY)
    apply_artifact(part, target, None, 1 << 20)
    found = sorted(str(path.relative_to(tmp_path / "old")) for path in (tmp_path / "old").rglob("*"))
    assert found == ["gone", "keep", "keep/a"]
    assert restrict(whole, (Declared("."),)) == whole
    with pytest.raises(DataError):
        restrict(b"none", (Declared("."),))
    os.close(root)
    os.close(target)
