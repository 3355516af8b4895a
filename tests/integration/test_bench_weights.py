"""The whole benchmark, small: cluster, links, ranks, engine, baselines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HPCRL = Path(sys.executable).parent / "hpcrl"
KEYS = {
    *("raw_s", "transfer_verify_s", "total_s", "pause_s", "load_only_s", "snapshot_s", "blocked_s", "gloo_s"),
    *("file_total_s", "file_pause_s", "receiver_bytes", "bytes", "receivers", "senders", "link", "algo", "rss_growth"),
}

pytestmark = [
    *(pytest.mark.slurm, pytest.mark.mpi, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)),
    pytest.mark.skipif(os.geteuid() != 0, reason="the development cluster needs root"),
]


def test_one_line_with_every_measure_and_links_that_limit() -> None:
    options = ["--size", "16MiB", "--senders", "2", "--receivers", "2", "--link", "200mbit", "--repeat", "1"]
    done = subprocess.run(
        [HPCRL, "bench", "weights", *options, "--name", "hpcrl-bench-t", "--json"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert set(result) == KEYS
    assert (result["senders"], result["receivers"], result["link"], result["algo"]) == (2, 2, "200mbit", "auto")
    # A bucket of 25 MB/s lets nothing through faster: both ways of moving the bytes must feel it.
    least = 0.8 * result["bytes"] / 25e6
    assert result["raw_s"] > least and result["transfer_verify_s"] > least
    assert result["total_s"] >= result["transfer_verify_s"]
    assert all(result[key] > 0 for key in KEYS if key.endswith("_s"))
