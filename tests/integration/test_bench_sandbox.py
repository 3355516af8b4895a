"""``hpcrl bench sandbox`` as a user starts it, small: every key is there, nothing failed, nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.bench.sandbox import TARGETS

pytestmark = pytest.mark.apptainer

ROOT = Path(__file__).parents[2]
HPCRL = Path(sys.executable).parent / "hpcrl"


def test_every_part_gives_its_keys() -> None:
    done = subprocess.run(
        [HPCRL, "bench", "sandbox", "--quick", "--json", "--table"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert {key for _, key, _, _, _ in TARGETS} <= numbers.keys()
    assert (numbers["failures_64"], numbers["leftovers"], numbers["waiting"] > 0) == (0, 0, True)
    assert numbers["start_ratio"] > 0.5 and numbers["pool_hits"] > 0.3
    assert "| start without pool / plain exec | ≤ 1.15 × |" in done.stderr
