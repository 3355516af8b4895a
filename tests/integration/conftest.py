"""What several integration tests share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hetjobs import LAYOUT, Jobs

from hpcrl.devcluster import Cluster


@pytest.fixture(scope="session")
def slurm_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster for the session; removed with all its jobs whatever happens."""
    if os.geteuid() != 0 or shutil.which("slurmd", path="/usr/sbin:/sbin:/usr/bin") is None:
        pytest.skip("needs root and slurmd")
    part = request.config.getoption("part")
    layout = LAYOUT if part is None else LAYOUT.model_copy(update={"name": f"{LAYOUT.name}-{part}"})
    cluster = Cluster(layout.name)
    cluster.down()
    try:
        cluster.up(layout)
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def jobs(slurm_cluster: Cluster) -> Iterator[Jobs]:
    """Submits to the session's cluster; run directories lie where all nodes see them and go with the test."""
    slurm_cluster.up()
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-e2e-", dir="/var/tmp"))
    found = Jobs(slurm_cluster, folder)
    try:
        yield found
    finally:
        found.cancel_all()
        shutil.rmtree(folder)
