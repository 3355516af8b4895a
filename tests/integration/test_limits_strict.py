"""`limits.strict`: a run is refused before anything expensive starts where a limit is not enforced, and the reason says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpcrl.sandbox.check import gaps

pytestmark = pytest.mark.apptainer

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(all(gap.late for gap in gaps()), reason="this machine enforces all limits")
def test_a_run_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text('{"model_type": "qwen3"}')
    config = {
        "run": {"dir": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "tasks": {"train": str(ROOT / "tasks/repair/eval")},
        "limits": {"strict": True},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("hpcrl")), "run", str(tmp_path / "run.yaml")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    line = done.stderr.strip()
    assert len(line.splitlines()) == 1 and "limits.strict: not enforced on" in line
    for gap in gaps():
        assert (gap.what in line and gap.remedy in line) != gap.late
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / "coordinator.db").exists()
    reasons = [json.loads(path.read_text())["reason"] for path in (folder / "failures").glob("*.json")]
    assert len(reasons) == 1 and "limits.strict" in reasons[0]
