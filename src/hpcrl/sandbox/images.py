"""From the name of an image to an unpacked root directory on this machine, built or unpacked once and cached.

    directory             used as it is
    FILE.sif              unpacked with `apptainer build --sandbox`
    FILE.def              Bootstrap: debootstrap → mmdebstrap with this machine's apt sources; else `apptainer build --sandbox`
    anything else         a name that the site has put below CACHE/images/ (`/` and `:` written as `_`)

The cache (see :func:`cache_directory`) holds CACHE/images/KEY, built beside and renamed, one builder at a time (flock).
An image directory is never written to again. As a program: prints the directory.

    python -m hpcrl.sandbox.images containers/sandbox.def
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hpcrl.errors import EnvironmentFault, HpcrlError, UserError
from hpcrl.sandbox.apptainer import find_apptainer, sandbox_owner
from hpcrl.sandbox.definition import Definition, parse_definition
from hpcrl.sandbox.digests import combine, shape_digest
from hpcrl.sandbox.trees import remove_tree

__all__ = ["Image", "cache_directory", "resolve"]

_BUILD_TIMEOUT_S = 3600


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
    if not name:
        raise UserError("an empty image name: give a directory, a .sif or a .def file")
    path = _find(name, base)
    if path is not None and path.is_file():
        path = _cached(path, build)
    if path is None or not path.is_dir():
        local = cache_directory() / "images" / name.replace("/", "_").replace(":", "_")
        raise UserError(
            f"image {name!r} is neither a directory, a .sif nor a .def file, and {local} does not exist; hpcrl pulls from no "
            f"registry during a run: unpack it once with `apptainer build --sandbox {local} docker://{name}`"
        )
    # Links may be absolute, and then mean a path inside the image.
    if not os.path.lexists(path / "bin" / "sh") and not os.path.islink(path / "bin"):
        raise UserError(f"image directory {path} has no /bin/sh: it is not an unpacked root file system with a shell")
    return Image(path, _digest(path))


def _find(name: str, base: Path | None) -> Path | None:
    for parent in (*([base] if base is not None else []), Path.cwd()):
        if (parent / name).exists():
            return (parent / name).resolve()
    local = cache_directory() / "images" / name.replace("/", "_").replace(":", "_")
    return local if local.is_dir() else None


@lru_cache(maxsize=256)
def _digest(path: Path) -> str:
    return shape_digest(path)


def _cached(file: Path, build: bool) -> Path:
    registry = ""
    data = file.read_bytes() if file.suffix == ".def" else None
    if data is not None:
        definition = parse_definition(data.decode("utf-8", "replace"), str(file))
        registry = definition.registry
        builder: Callable[[Path], None]
        if definition.bootstrap == "debootstrap":
            key = combine(data.decode("utf-8", "replace"), _release()[1])

            def builder(target: Path) -> None:
                _mmdebstrap(definition, target)
        else:
            key = combine(data.decode("utf-8", "replace"))

            def builder(target: Path) -> None:
                _run([find_apptainer(), "build", "--sandbox", str(target), str(file)], f"building {file}")
    elif file.suffix == ".sif":
        with open(file, "rb") as stream:
            key = "sha256-" + hashlib.file_digest(stream, "sha256").hexdigest()

        def builder(target: Path) -> None:
            _run([find_apptainer(), "build", "--sandbox", str(target), str(file)], f"unpacking {file}")
    else:
        raise UserError(f"image file {file} must end in .def (a definition) or .sif (an image)")
    target = cache_directory() / "images" / key
    if registry and not build and not target.is_dir():
        raise UserError(
            f"image {file} is not built yet, and its base must be pulled ({registry}): run tools/build-image {file} where it can be"
        )
    return _build_once(target, builder, file, build)


def _build_once(target: Path, builder: Callable[[Path], None], source: Path, build: bool) -> Path:
    if target.is_dir():
        return target
    if not build:
        raise EnvironmentFault(f"image {source} is not built yet: run tools/build-image {source}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock")):
        if target.is_dir():
            return target
        print(f"building sandbox image {source} (once)", file=sys.stderr, flush=True)
        new = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
        try:
            builder(new)
            os.chmod(new, 0o755)
            new.rename(target)
        finally:
            remove_tree(new)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _release() -> tuple[str, str]:
    """(id, codename) of this machine's distribution, for example ("debian", "trixie")."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            fields[name] = value.strip('"')
    except OSError:
        pass
    return fields.get("ID", ""), fields.get("VERSION_CODENAME", "")


def _mmdebstrap(definition: Definition, target: Path) -> None:
    """A minimal Debian of this machine's own release, from the machine's own apt sources."""
    distribution, codename = _release()
    program = shutil.which("mmdebstrap")
    if distribution != "debian" or program is None:
        raise EnvironmentFault(
            "building this image needs Debian and mmdebstrap (tools/install-apptainer installs it); elsewhere build it with "
            "`apptainer build --sandbox DIRECTORY` from the same definition and set `sandbox.image: DIRECTORY`"
        )
    listing = _run(
        [
            "apt-get",
            "indextargets",
            "--no-release-info",
            "--format",
            "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(REPO_URI) $(RELEASE) $(COMPONENT)",
            "Created-By: Packages",
        ],
        "reading the apt sources",
    )
    # Third-party sources have other keys and no place in the image.
    sources = [
        line for line in dict.fromkeys(listing.splitlines()) if line.split()[3].split("-")[0] in (codename, "stable")
    ]
    if not sources:
        raise EnvironmentFault(f"no Debian archive for {codename!r} among the configured apt sources")
    argv = [program, "--variant=minbase", '--aptopt=Acquire::Languages "none"']
    if definition.include:
        argv.append("--include=" + ",".join(definition.include))
    if definition.sections.get("post"):
        argv.append(f'--customize-hook=chroot "$1" /bin/sh -eu -c {shlex.quote(definition.sections["post"])}')
    _run([*argv, codename, str(target), "-"], "building a Debian image", "\n".join(sources) + "\n")


def _run(argv: list[str], what: str, given: str = "") -> str:
    try:
        done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{what} failed: {error}") from error
    if done.returncode != 0:
        tail = " | ".join(line for line in done.stderr.strip().splitlines()[-5:])
        raise EnvironmentFault(f"{what} failed (status {done.returncode}): {tail}")
    return done.stdout


def main() -> int:
    try:
        print(resolve(sys.argv[1] if len(sys.argv) > 1 else "containers/sandbox.def").path)
    except HpcrlError as error:
        print(f"build-image: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
