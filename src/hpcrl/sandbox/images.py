"""From the name of an image to an unpacked root directory on this machine, built or unpacked once and cached.

    directory               used as it is
    FILE.sif                unpacked
    docker-archive:FILE     unpacked, of what `docker save` or `podman save` wrote
    FILE.def                Bootstrap: debootstrap → mmdebstrap with this machine's apt sources; else `apptainer build --sandbox`
    Dockerfile              see dockerfile.py; its base is an image of the site's (below), or pulled
    anything else           a name that the site has put below CACHE/images/ (`/` and `:` written as `_`)

What is built is kept in CACHE/images/ (see :func:`cache_directory`, image_cache.py). As a program: prints the directory.

    python -m hpcrl.sandbox.images containers/sandbox.def
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hpcrl.errors import EnvironmentFault, HpcrlError, UserError
from hpcrl.sandbox.apptainer import sandbox_owner
from hpcrl.sandbox.builders import apptainer_build, build_dockerfile, mmdebstrap, release, unpack_sif
from hpcrl.sandbox.definition import parse_definition
from hpcrl.sandbox.digests import combine, shape_digest, tree_digest
from hpcrl.sandbox.dockerfile import parse_dockerfile
from hpcrl.sandbox.image_cache import build_once

__all__ = ["Image", "cache_directory", "pull", "resolve"]

_ARCHIVE = "docker-archive:"
_REGISTRY = "docker://"


@dataclass(frozen=True, slots=True)
class Image:
    """``path``: unpacked root directory. ``digest`` names its content (paths, kinds, sizes)."""

    path: Path
    digest: str


_ROOTS_CACHE = Path("/var/tmp/hpcrl/cache")


def cache_directory() -> Path:
    """$HPCRL_CACHE, else .cache in the working directory, else /var/tmp/hpcrl/cache.

    The last is for root in a private directory (a clone in /root): root's sandboxes run as `nobody`, who cannot pass there.
    Raises EnvironmentFault when that directory belongs to somebody else.
    """
    chosen = os.environ.get("HPCRL_CACHE")
    if chosen:
        return Path(chosen).resolve()
    here = Path(".cache").resolve()
    if sandbox_owner() is None or all(parent.stat().st_mode & 0o001 for parent in here.parents):
        return here
    for folder in (_ROOTS_CACHE.parent, _ROOTS_CACHE):
        folder.mkdir(mode=0o755, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            raise EnvironmentFault(f"{folder} belongs to somebody else; set HPCRL_CACHE to a directory of your own")
    return _ROOTS_CACHE


def resolve(name: str, base: Path | None = None, build: bool = True) -> Image:
    """The image ``name`` (a path is relative to ``base``, else to the working directory). May take as long as a build.

    ``build`` False refuses to build or unpack. Raises UserError for a name nobody can resolve, EnvironmentFault when building
    fails or is refused.
    """
    plain = name.removeprefix(_ARCHIVE).removeprefix(_REGISTRY)
    if not plain:
        raise UserError(f"an empty image name ({name!r}): give a directory, a .sif or a .def file")
    path = _find(plain, base)
    if path is not None and path.is_file():
        path = _cached(path, build, name.startswith(_ARCHIVE))
    if path is None and (name.startswith((_ARCHIVE, "/", "./", "../")) or name.endswith((".sif", ".def"))):
        raise UserError(f"image {name!r}: there is no file or directory {plain}")
    if path is None or not path.is_dir():
        local = _local(name)
        raise UserError(
            f"image {name!r} is neither a directory, a .sif nor a .def file, and {local} does not exist; hpcrl pulls from no "
            f"registry during a run: unpack it once with `hpcrl images build docker://{name.removeprefix(_REGISTRY)}`"
        )
    # Links may be absolute, and then mean a path inside the image.
    if not os.path.lexists(path / "bin" / "sh") and not os.path.islink(path / "bin"):
        raise UserError(f"image directory {path} has no /bin/sh: it is not an unpacked root file system with a shell")
    return Image(path, _digest(path))


def pull(name: str) -> Image:
    """Unpack ``docker://NAME`` under the site's names, from where :func:`resolve` takes it. Raises as resolve does."""
    if name == _REGISTRY:
        raise UserError(f"{name} names no image; for example {_REGISTRY}python:3.12")
    build_once(_local(name), lambda target: apptainer_build(target, name, f"pulling {name}"), Path(name))
    return resolve(name)


def _local(name: str) -> Path:
    """Where the site's image of that name lies."""
    plain = name.removeprefix(_ARCHIVE).removeprefix(_REGISTRY)
    return cache_directory() / "images" / plain.replace("/", "_").replace(":", "_")


def _find(name: str, base: Path | None) -> Path | None:
    for parent in (*([base] if base is not None else []), Path.cwd()):
        if (parent / name).exists():
            return (parent / name).resolve()
    local = _local(name)
    return local if local.is_dir() else None


@lru_cache(maxsize=256)
def _digest(path: Path) -> str:
    return shape_digest(path)


def _cached(file: Path, build: bool, archive: bool) -> Path:
    """The unpacked directory of an image file."""
    registry = ""
    builder: _Builder
    if archive:
        key, builder = _content(file), lambda target: apptainer_build(target, f"{_ARCHIVE}{file}", f"unpacking {file}")
    elif file.suffix == ".sif":
        key, builder = _content(file), lambda target: unpack_sif(target, file)
    elif file.suffix == ".def":
        key, builder, registry = _defined(file)
    elif file.name == "Dockerfile" or file.name.startswith("Dockerfile.") or file.suffix == ".Dockerfile":
        key, builder, registry = _of_dockerfile(file)
    else:
        raise UserError(
            f"image file {file} must end in .def (a definition) or .sif (an image), be named Dockerfile, or be given as "
            f"{_ARCHIVE}{file.name}"
        )
    target = cache_directory() / "images" / key
    if registry and not build and not target.is_dir():
        raise UserError(
            f"image {file} is not built yet, and its base must be pulled ({registry}): run tools/build-image {file} where it can be"
        )
    return build_once(target, builder, file, build)


_Builder = Callable[[Path], None]


def _content(file: Path) -> str:
    with open(file, "rb") as stream:
        return "sha256-" + hashlib.file_digest(stream, "sha256").hexdigest()


def _defined(file: Path) -> tuple[str, _Builder, str]:
    text = file.read_bytes().decode("utf-8", "replace")
    definition = parse_definition(text, str(file))
    if definition.bootstrap == "debootstrap":
        return combine(text, release()[1]), lambda target: mmdebstrap(definition, target), ""
    return combine(text), lambda target: apptainer_build(target, str(file), f"building {file}"), definition.registry


def _of_dockerfile(file: Path) -> tuple[str, _Builder, str]:
    """The file's directory is the build's context, and part of the key with the base's content."""
    recipe = parse_dockerfile(file.read_text(encoding="utf-8", errors="replace"), str(file))
    local = _local(recipe.base)
    base = local if local.is_dir() else None
    of_base = _digest(base) if base is not None else ""
    key = combine("Dockerfile", recipe.base, of_base, recipe.script, *recipe.environment, tree_digest(file.parent))
    return (
        key,
        lambda target: build_dockerfile(target, recipe, base, file.parent, str(file)),
        "" if base else f"{_REGISTRY}{recipe.base}",
    )


def main() -> int:
    try:
        print(resolve(sys.argv[1] if len(sys.argv) > 1 else "containers/sandbox.def").path)
    except HpcrlError as error:
        print(f"build-image: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
