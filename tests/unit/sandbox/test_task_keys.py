from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hpcrl.sandbox.task_keys import misspelt

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[agent]\ntimout_sec = 5", "unknown key [agent] timout_sec; did you mean timeout_sec?"),
        ("[enviroment]\nworkdir = '/app'", "unknown key enviroment; did you mean environment?"),
        ("[environment]\nmemory_mib = 5", "unknown key [environment] memory_mib; did you mean memory_mb?"),
        ("[environment]\nworkDir = '/app'", "unknown key [environment] workDir; did you mean workdir?"),
        ("[verifier]\ntimeout-sec = 5", "unknown key [verifier] timeout-sec; did you mean timeout_sec?"),
        ("timeout_sec = 5", "timeout_sec has no effect here; timeout_sec belongs to [agent] or"),
        ("[agent]\nmemory_mb = 5", "[agent] memory_mb has no effect here; memory_mb belongs to [environment]"),
        (
            "[environment]\ntimeout_sec = 5",
            "[environment] timeout_sec has no effect here; timeout_sec belongs to [agent] or [verifier]",
        ),
    ],
)
def test_a_slip_is_told_with_what_was_meant(text: str, line: str) -> None:
    [found] = misspelt(tomllib.loads(text))
    assert found.startswith(line)


@pytest.mark.parametrize(
    "text",
    [
        "",
        'version = "1.0"\n[metadata]\ntimout_sec = 5\nanything = {a = 1}',
        '[task]\nname = "org/x"\n[[steps]]\nname = "a"\n[environment]\ncpus = 1\nallow_internet = false\nmemory = "2G"',
        '[environment]\nsome_new_thing = 1\n[environment.healthcheck]\ncommand = "true"',
        "[new_section]\ntimeout_sec = 1",
    ],
)
def test_harbors_own_and_new_keys_are_left_alone(text: str) -> None:
    assert misspelt(tomllib.loads(text)) == []


def test_the_shipped_tasks_have_none() -> None:
    found = sorted(ROOT.glob("tasks/*/*/*/task.toml"))[::50] or sorted(ROOT.glob("tasks/**/task.toml"))[::50]
    assert found
    assert [line for path in found for line in misspelt(tomllib.loads(path.read_text()))] == []
