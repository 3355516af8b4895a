from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.report.tokens import Cell, Heading, cells, colour, render_page
from hpcrl.trajectory import ShardWriter, Trajectory

TIMES = {"queue_s": 0.25, "generate_s": 2.0, "engine": {"queue_s": 0.5, "prefill_s": 0.125, "decode_s": 1.25}}


def trajectory() -> Trajectory:
    call = {"ending": "tool_calls", "tool_calls": [{"id": "c", "name": "bash", "arguments": "{}"}]}
    return Trajectory(
        run_id="r",
        task_id="t",
        group_id="g0",
        rollout_id="g0-r0",
        attempt_id="g0-r0-a0",
        split="train",
        policy_version="0.3",
        environment_version="e",
        verifier_version="v",
        token_ids=np.array([60, 65, 66, 67, 60, 68], np.int32),
        logprobs=np.array([0, -0.5, -4.5, -9.0, 0, -0.1], np.float32),
        loss_mask=np.array([0, 1, 1, 1, 0, 1], np.uint8),
        segments=np.array([0, 4], np.int32),
        spans=np.array([[1, 3, 0, 3], [3, 4, 0, 4], [5, 6, 0, 4]], np.int32),
        reward=1.0,
        first_token_at=1.5,
        requests=(
            {"request_id": "q0", "segment": 0, "start": 1, "end": 4, "opens": "first", **call},
            {"request_id": "q1", "segment": 0, "start": 0, "end": 0, "ending": "client_cancelled", "opens": None},
            {"request_id": "q2", "segment": 1, "start": 5, "end": 6, "ending": "stop", "opens": "template", **TIMES},
        ),
    ).validate()


Q2 = "q2: 1 tokens, stop, version 0.4; queue 0.750 s, prefill 0.125 s, decode 1.250 s"


def test_everything_that_begins_has_a_heading_and_every_token_a_cell() -> None:
    found = list(cells(trajectory(), chr))
    shown = [one.text for one in found]
    assert shown == [
        "segment 0 (first)",
        *("<", "q0: 3 tokens, tool_calls, version 0.3, calls bash", "A", "B", "version 0.4", "C"),
        *("segment 1 (template)", "<", Q2, "D"),
    ]
    tokens = [one for one in found if isinstance(one, Cell)]
    assert [one.trained for one in tokens] == [False, True, True, True, False, True]
    assert [one.logprob is None for one in tokens] == [True, False, False, False, True, False]
    assert [one.version for one in tokens] == [None, "0.3", "0.3", "0.4", None, "0.4"]
    assert sum(isinstance(one, Heading) for one in found) == 5


def test_colours_run_from_green_to_red() -> None:
    assert colour(0.0) == colour(0.1) == "#289646"
    assert colour(-5.0) == colour(-80.0) == "#d23246"


def test_the_page_escapes_what_the_model_wrote() -> None:
    page = render_page("a<b", "x & y", cells(trajectory(), chr))
    assert page.count("<b style") == 4 and page.count("<i title") == 2
    assert "a&lt;b" in page and "x &amp; y" in page and ">&lt;</i>" in page
    assert "logprob -4.5000, version 0.3" in page


def test_the_command_prints_tokens_or_writes_a_page(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "w0")
    writer.append(trajectory())
    writer.seal()
    printed = CliRunner().invoke(app, ["shards", "show", str(tmp_path), "g0-r0-a0"])
    assert printed.exit_code == 0, printed.output
    assert "segment 1 (template)" in printed.output and "65 │66 │" in printed.output
    page = tmp_path / "page.html"
    written = CliRunner().invoke(app, ["shards", "show", str(tmp_path), "g0-r0-a0", "--html", str(page)])
    assert written.exit_code == 0, written.output
    assert "<b style" in page.read_text(encoding="utf-8")
