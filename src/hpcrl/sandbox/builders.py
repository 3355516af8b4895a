"""How images are made: mmdebstrap, `apptainer build`, or the steps of a Dockerfile. Each writes one new directory."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.sandbox.apptainer import find_apptainer, sandbox_owner
from hpcrl.sandbox.definition import Definition
from hpcrl.sandbox.dockerfile import STAGE, Recipe
from hpcrl.sandbox.trees import remove_tree

__all__ = ["apptainer_build", "build_dockerfile", "mmdebstrap", "release", "unpack_sif"]

_BUILD_TIMEOUT_S = 3600
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def apptainer_build(target: Path, source: str, what: str) -> None:
    """`apptainer build --sandbox`: from a .def, a .sif, ``docker-archive:PATH``, ``docker://NAME``. Raises EnvironmentFault."""
    _run([find_apptainer(), "build", "--sandbox", str(target), source], what)


def unpack_sif(target: Path, file: Path) -> None:
    """A .sif as a directory. Raises EnvironmentFault.

    By root its file system is unpacked here: `apptainer build` does that in a container, for which root may lack a capability.
    """
    program = shutil.which("unsquashfs")
    if sandbox_owner() is not None and program is not None:
        listed = _run([find_apptainer(), "sif", "list", str(file)], f"reading {file}")
        system = re.search(r"\|(\d+)-\d+\s*\|FS \(Squashfs/\*System/", listed)
        if system is not None:
            _run(
                [program, "-quiet", "-no-progress", "-offset", system[1], "-dest", str(target), str(file)],
                f"unpacking {file}",
            )
            return
    apptainer_build(target, str(file), f"unpacking {file}")


def build_dockerfile(target: Path, recipe: Recipe, base: Path | None, context: Path, where: str) -> None:
    """Copy ``base`` (None: pull it), then run the recipe's script in the copy, with the network of this machine.

    Raises UserError for a file that the context does not have, EnvironmentFault when a step fails.
    """
    if base is None:
        apptainer_build(target, f"docker://{recipe.base}", f"pulling {recipe.base}, the base of {where},")
    else:
        target.mkdir()
        _run(["cp", "-a", "--reflink=auto", f"{base}/.", str(target)], f"copying {base}")  # /.: base may be a link
    stage = target / STAGE.lstrip("/")
    stage.mkdir()
    for source, name in recipe.copies:
        _stage(context, source, stage / name, where)
    (stage / "post.sh").write_text(recipe.script, encoding="utf-8")
    # Root's own user namespace maps root alone; another user becomes root in one.
    become_root = [] if sandbox_owner() is not None else ["--fakeroot"]
    flags = ["--userns", "--writable", "--cleanenv", "--no-home", "--no-mount=tmp,cwd,hostfs,bind-paths", "--pwd=/"]
    script = ["/bin/sh", "-eu", f"{STAGE}/post.sh"]
    _run(
        [find_apptainer(), "--silent", "exec", *flags, *become_root, str(target), *script],
        f"running the steps of {where}",
    )
    remove_tree(stage)
    if recipe.environment:
        environment = target / ".singularity.d" / "env"
        environment.mkdir(parents=True, exist_ok=True)
        lines = [f'export PATH="${{PATH:-{_PATH}}}"', *recipe.environment]
        (environment / "91-environment.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _stage(context: Path, source: str, stage: Path, where: str) -> None:
    path = context / source.lstrip("/")
    if not path.resolve().is_relative_to(context.resolve()) or not path.exists():
        raise UserError(f"{where}: copies {source}, which is not in {context}")
    if path.is_dir() and (context / ".dockerignore").exists():
        raise UserError(
            f"{where}: copies the directory {source}, and {context / '.dockerignore'} is not supported: remove it"
        )
    stage.mkdir()
    if path.is_dir():
        shutil.copytree(path, stage / "tree", symlinks=True)
    else:
        (stage / "file").mkdir()
        shutil.copy2(path, stage / "file" / path.name)


def release() -> tuple[str, str]:
    """(id, codename) of this machine's distribution, for example ("debian", "trixie")."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/etc/os-release").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            fields[name] = value.strip('"')
    except OSError:
        pass
    return fields.get("ID", ""), fields.get("VERSION_CODENAME", "")


def mmdebstrap(definition: Definition, target: Path) -> None:
    """A minimal Debian of this machine's own release, from the machine's own apt sources."""
    distribution, codename = release()
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
        tail = " | ".join(line for line in (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:])
        raise EnvironmentFault(f"{what} failed (status {done.returncode}): {tail}")
    return done.stdout
