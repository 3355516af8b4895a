"""Apptainer definition files, as far as needed to build a Debian image without debootstrap or a registry."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcrl.errors import UserError

__all__ = ["Definition", "parse_definition"]

_VARIABLE = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_HEADER = re.compile(r"(\w+)\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Definition:
    """Example: ``Definition({"bootstrap": "debootstrap", "include": "python3-minimal"}, {"post": "mkdir /work\\n"})``."""

    header: dict[str, str]
    sections: dict[str, str]

    @property
    def bootstrap(self) -> str:
        return self.header.get("bootstrap", "")

    @property
    def registry(self) -> str:
        """Where the base image must be pulled from, for example ``docker://python:3.12``; empty when it is made here."""
        pulled = self.bootstrap in ("docker", "library", "oras", "shub")
        return f"{self.bootstrap}://{self.header.get('from', '')}" if pulled else ""

    @property
    def include(self) -> list[str]:
        return self.header.get("include", "").replace(",", " ").split()


def parse_definition(text: str, where: str) -> Definition:
    """Header keys in lower case, sections by name, variables filled from ``%arguments``. Raises UserError."""
    header: dict[str, str] = {}
    sections: dict[str, str] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("%"):
            section = line[1:].split()[0] if line[1:].split() else ""
            sections.setdefault(section, "")
        elif section:
            sections[section] += line + "\n"
        elif line.strip() and not line.startswith("#"):
            match = _HEADER.fullmatch(line.strip())
            if match is None:
                raise UserError(
                    f"{where}, line {number}: expected `Key: value` before the first section, found {line!r}"
                )
            header[match[1].lower()] = match[2]
    if "bootstrap" not in header:
        raise UserError(f"{where}: an Apptainer definition starts with a `Bootstrap:` line")
    variables = dict(
        line.strip().split("=", 1)
        for line in sections.get("arguments", "").splitlines()
        if "=" in line and line.strip()[:1] != "#"
    )

    def fill(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise UserError(f"{where}: {{{{ {match[1]} }}}} has no value in %arguments")
        return variables[match[1]]

    return Definition(
        {key: _VARIABLE.sub(fill, value) for key, value in header.items()},
        {name: _VARIABLE.sub(fill, body) for name, body in sections.items()},
    )
