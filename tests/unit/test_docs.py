"""What the documentation promises can be followed: commands parse, links lead somewhere, every file has its line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpcrl.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("README.md")])
PACKAGES = sorted(path.parent for path in (ROOT / "src" / "hpcrl").glob("*/__init__.py"))


def _commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split("  #")[0].strip()
                if command and not command.startswith("#"):
                    found.append((page.name, command))
    return found


@pytest.mark.parametrize(("page", "command"), _commands())
def test_a_command_in_the_docs_exists_and_its_options_parse(page: str, command: str) -> None:
    words = shlex.split(command)
    if words[0] in (".venv/bin/hpcrl", "hpcrl"):
        # --help is acted on only after all options have been recognised.
        arguments = words[1 : words.index("--")] if "--" in words else words[1:]
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0, result.output
    elif words[0].startswith("tools/") or words[0] == "sbatch":
        assert (ROOT / next(word for word in words if "/" in word)).is_file()
    for word in words:
        if word.startswith(("configs/", "slurm/", "containers/")):
            assert (ROOT / word).exists(), f"{page}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_readme_has_a_line_for_each_file(package: Path) -> None:
    text = (package / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert files - set(re.findall(r"`(\w+\.py)`", text)) == set()
