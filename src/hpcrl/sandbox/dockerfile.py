"""A Dockerfile → what builds the same directory without Docker, pure: a base image, files to copy, one script, an environment.

Handled      FROM (one stage), RUN (shell and exec form), COPY and ADD of files and directories of the context, ENV, ARG with a default,
             WORKDIR, SHELL
No effect    LABEL, MAINTAINER, EXPOSE, VOLUME, STOPSIGNAL, HEALTHCHECK, CMD, ENTRYPOINT, USER root: nothing in a sandbox reads them
Refused      by name and line: everything else. An image is built as written, or not at all.

Steps keep their order: what is copied is staged at /.hpcrl-build/N first, and the script puts it in place when its turn comes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from hpcrl.errors import UserError

__all__ = ["STAGE", "Recipe", "last_workdir", "parse_dockerfile"]

STAGE = "/.hpcrl-build"

_IGNORED = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "CMD", "ENTRYPOINT"})
_FROM = re.compile(r"(\S+)(?:\s+[Aa][Ss]\s+\S+)?")
_SETTING = re.compile(r"""([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|(?:[^\s"'\\]|\\ )*)(?:\s+|$)""")
_ARCHIVE = re.compile(r"\.(tar|tar\.(gz|bz2|xz|zst)|tgz|tbz2|txz)$")


@dataclass(slots=True)
class Recipe:
    """Example: ``Recipe(base="python:3.12", script="…", copies=[("files/", "0")], environment=['export A="1"'])``.

    ``copies``: (path in the context, name of its stage). ``script`` is for ``/bin/sh -eu`` in the base image.
    """

    base: str = ""
    script: str = ""
    copies: list[tuple[str, str]] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)


def parse_dockerfile(text: str, where: str) -> Recipe:
    """Raises UserError naming the line and the instruction that cannot be built here."""
    return _Parser(where).parse(text)


def last_workdir(text: str) -> str | None:
    """The last absolute WORKDIR of a Dockerfile: where its image's commands start. None when there is none, or it has variables."""
    found = [rest.strip() for _, word, rest in _instructions(text) if word == "WORKDIR"]
    return found[-1] if found and found[-1].startswith("/") and "$" not in found[-1] else None


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line number, INSTRUCTION, the rest) with continued lines joined and comments left out."""
    found: list[tuple[int, str, str]] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (parts and not line.strip()):
            continue
        if not parts:
            start = number
        goes_on = line.rstrip().endswith("\\")
        parts.append(line.rstrip()[:-1] if goes_on else line)
        if not goes_on:
            _add(found, start, parts)
            parts = []
    if parts:
        _add(found, start, parts)
    return found


def _add(found: list[tuple[int, str, str]], number: int, parts: list[str]) -> None:
    word, _, rest = " ".join(parts).strip().partition(" ")
    if word:
        found.append((number, word.upper(), rest.strip()))


class _Parser:
    def __init__(self, where: str) -> None:
        self._where = where
        self._line = 0
        self._recipe = Recipe()
        self._lines: list[str] = []
        self._directory = "/"
        self._shell = ["/bin/sh", "-c"]
        self._handlers: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._add,
            "ENV": self._env,
            "ARG": self._arg,
            "WORKDIR": self._workdir,
            "SHELL": self._set_shell,
            "USER": self._user,
        }

    def parse(self, text: str) -> Recipe:
        for line in text.splitlines():
            if not line.startswith("#"):
                break
            if re.match(r"#\s*escape\s*=", line, re.IGNORECASE):
                raise UserError(f"{self._where}: another escape character is not supported; use \\")
        for self._line, word, rest in _instructions(text):
            if word in _IGNORED:
                continue
            handler = self._handlers.get(word)
            if handler is None:
                self._refuse(word, "is not supported")
            elif not self._recipe.base and word not in ("FROM", "ARG"):
                self._refuse(word, "stands before FROM")
            else:
                handler(rest)
        if not self._recipe.base:
            raise UserError(f"{self._where}: has no FROM")
        self._recipe.script = "\n".join(self._lines) + "\n"
        return self._recipe

    def _refuse(self, what: str, why: str) -> None:
        raise UserError(
            f"{self._where}, line {self._line}: {what} {why}, so this Dockerfile is not built here. Build the image elsewhere "
            "and name it: `docker save` gives a docker-archive, `apptainer build` a .sif"
        )

    def _from(self, rest: str) -> None:
        if self._recipe.base:
            self._refuse("a second FROM (multi-stage build)", "is not supported")
        match = _FROM.fullmatch(rest)
        if match is None or "$" in rest or match[1] == "scratch" or match[1][0] in "/.":
            self._refuse(f"FROM {rest}", "is not supported (one image name, without variables, not scratch, no path)")
        else:
            self._recipe.base = match[1]

    def _run(self, rest: str) -> None:
        if rest.startswith("--"):
            self._refuse(f"RUN {rest.split()[0]}", "is not supported")
        if "<<" in rest:
            self._refuse("RUN with a here-document", "is not supported")
        words = self._words(rest)
        command = shlex.join(words if words is not None else [*self._shell, rest])
        self._lines.append(f"( cd {shlex.quote(self._directory)} && exec {command} )")

    def _words(self, rest: str) -> list[str] | None:
        """The JSON array of an exec form; None for anything else."""
        try:
            words = json.loads(rest)
        except ValueError:
            return None
        if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
            return words
        return None

    def _add(self, rest: str) -> None:
        for source in rest.split()[:-1]:
            if "://" in source or _ARCHIVE.search(source) or source.startswith("git@"):
                self._refuse(
                    f"ADD {source}", "is not supported (only files and directories; unpack and download with RUN)"
                )
        self._transfer("ADD", rest)

    def _copy(self, rest: str) -> None:
        self._transfer("COPY", rest)

    def _transfer(self, word: str, rest: str) -> None:
        if rest.startswith("--"):
            self._refuse(f"{word} {rest.split()[0]}", "is not supported")
        if "<<" in rest:
            self._refuse(f"{word} with a here-document", "is not supported")
        names = self._words(rest) or rest.split()
        if len(names) < 2:
            self._refuse(f"{word} {rest}", "needs a source and a destination")
        *sources, target = names
        for name in names:
            if re.search(r"[*?\[\]$\"']", name) or ".." in PurePosixPath(name).parts:
                self._refuse(f"{word} {name}", "is not supported (no wildcards, variables, quotes or `..`)")
        into = target.endswith("/") or target == "." or len(sources) > 1
        path = str(PurePosixPath(self._directory) / target)
        for source in sources:
            stage = str(len(self._recipe.copies))
            self._recipe.copies.append((source, stage))
            self._lines += _place(f"{STAGE}/{stage}", path, into)

    def _env(self, rest: str) -> None:
        for line in self._settings("ENV", rest):
            self._recipe.environment.append(line)
            self._lines.append(line)

    def _arg(self, rest: str) -> None:
        if "=" not in rest:
            self._refuse(f"ARG {rest}", "has no default")
        self._lines += self._settings("ARG", rest)

    def _settings(self, word: str, rest: str) -> list[str]:
        """``export NAME=value`` lines for the shell, which expands variables in it as Docker does."""
        if re.fullmatch(r"[A-Za-z_]\w*\s+\S.*", rest):
            name, value = rest.split(None, 1)
            pairs = [(name, value if value[0] in "\"'" else f'"{value}"')]
        else:
            pairs = [(match[1], match[2]) for match in _SETTING.finditer(rest)]
            if "".join(match[0] for match in _SETTING.finditer(rest)) != rest:
                self._refuse(f"{word} {rest}", "cannot be read")
        lines = []
        for name, value in pairs:
            if not value.startswith("'") and ("`" in value or "$(" in value):
                self._refuse(f"{word} {name}", "has ` or $( in its value, which a shell would run")
            quoted = value if value[:1] in ("'", '"') else f'"{value}"'.replace("\\ ", " ")
            lines.append(f"export {name}={quoted}")
        return lines

    def _workdir(self, rest: str) -> None:
        if re.search(r"[$\"'\\]", rest) or ".." in PurePosixPath(rest).parts:
            self._refuse(f"WORKDIR {rest}", "is not supported (a plain path, without variables)")
        self._directory = str(PurePosixPath(self._directory) / rest)
        self._lines.append(f"mkdir -p {shlex.quote(self._directory)}")

    def _set_shell(self, rest: str) -> None:
        words = self._words(rest)
        if words is None:
            self._refuse(f"SHELL {rest}", "must be a JSON list of words")
        else:
            self._shell = words

    def _user(self, rest: str) -> None:
        if rest.split(":")[0] not in ("root", "0"):
            self._refuse(f"USER {rest}", "is not supported (sandboxes have one ordinary user)")


def _place(stage: str, target: str, into: bool) -> list[str]:
    """Shell lines that put a staged file or directory where COPY would: a directory's content, a file under its own or a new name.

    A stage holds ``file/NAME`` or ``tree/`` with the directory's content. Files are replaced, not written into: a library may be in
    use.
    """
    quoted, parent = shlex.quote(target), shlex.quote(str(PurePosixPath(target).parent))
    copy = "cp -a --remove-destination"
    own_name = f"mkdir -p {quoted}; {copy} {stage}/file/. {quoted}"
    new_name = f"mkdir -p {parent}; {copy} {stage}/file/* {quoted}"
    return [
        f"if [ -d {stage}/tree ]; then mkdir -p {quoted}; {copy} {stage}/tree/. {quoted}",
        f"elif {'true' if into else f'[ -d {quoted} ]'}; then {own_name}",
        f"else {new_name}; fi",
    ]
