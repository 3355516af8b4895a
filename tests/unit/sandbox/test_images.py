from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.sandbox import images
from hpcrl.sandbox.definition import parse_definition
from hpcrl.sandbox.images import resolve

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _image(path: Path) -> Path:
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "sh").symlink_to("/bin/busybox-of-the-image")
    return path


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    image = resolve("image", base=_image(tmp_path / "image").parent)
    assert image.path == tmp_path / "image" and image.digest.startswith("sha256-")


def test_a_name_the_site_has_unpacked(cache: Path) -> None:
    path = _image(cache / "images" / "python_3.12")
    assert resolve("python:3.12").path == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("python:3.13", "python_3.13"),
        ("", "empty"),
        ("docker://", "empty"),
        ("docker-archive:none.tar", "there is no file or directory none.tar"),
        ("none.sif", "there is no file or directory none.sif"),
        ("/none", "there is no file or directory /none"),
    ],
)
def test_an_unknown_name_says_what_to_do(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(name)


def test_files_of_other_kinds_and_empty_directories(tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_text("")
    with pytest.raises(UserError, match=r"must end in \.def"):
        resolve("image.tar", base=tmp_path)
    with pytest.raises(UserError, match="no /bin/sh"):
        resolve(str(tmp_path))


def test_building_can_be_refused() -> None:
    with pytest.raises(EnvironmentFault, match="tools/build-image"):
        resolve(str(ROOT / "containers/sandbox.def"), build=False)


def test_the_shipped_definition() -> None:
    path = ROOT / "containers/sandbox.def"
    definition = parse_definition(path.read_text(), str(path))
    assert definition.bootstrap == "debootstrap" and "python3-minimal" in definition.include
    assert "/logs/verifier" in definition.sections["post"] and definition.header["osversion"] == "stable"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Bootstrap: docker\nnonsense\n", "line 2"),
        ("From: x\n", "Bootstrap"),
        ("Bootstrap: {{ X }}\n", "has no value"),
    ],
)
def test_bad_definitions(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_definition(text, "x.def")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes run as somebody else")
def test_root_in_a_private_directory_caches_where_nobody_can_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPCRL_CACHE", raising=False)
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(images, "_ROOTS_CACHE", tmp_path / "roots" / "cache")
    assert images.cache_directory() == tmp_path / "roots" / "cache"
    monkeypatch.chdir("/var/tmp")
    assert images.cache_directory() == Path("/var/tmp/.cache")
