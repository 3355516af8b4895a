"""Weights over real MPI: trainers and receivers as separate processes, bytes compared, every kind of refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.weights.manifest import Manifest
from hpcrl.weights.staging import remove_leftovers

RANKS = Path(__file__).parent / "mpi_weights_ranks.py"
MIB = 1 << 20
MPIEXEC = Path(sys.executable).parent / "mpiexec"

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside this Python")]


def launch(
    directory: Path,
    scenario: str,
    *,
    ranks: int = 4,
    trainers: int = 2,
    algorithm: str = "auto",
    chunk: int = 4096,
    expected: int = 0,
) -> subprocess.CompletedProcess[str]:
    (directory / "run").mkdir()
    arguments = [scenario, str(directory), str(trainers), algorithm, str(chunk)]
    return subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, "-m", "mpi4py", str(RANKS), *arguments],
        env={**os.environ, "EXPECTED_RANKS": str(expected or ranks), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def run(directory: Path, scenario: str, **options: Any) -> list[dict[str, Any]]:
    """Run a scenario to its end; what each rank saw, trainers first."""
    outcome = launch(directory, scenario, **options)
    assert outcome.returncode == 0, outcome.stderr
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(options.get("ranks", 4))]


@pytest.mark.parametrize(
    ("algorithm", "chunk", "ranks", "trainers"),
    [("star", 1024, 4, 2), ("striped", 1024, 5, 2), ("chain", 1000, 4, 1), ("auto", 1 << 20, 3, 2)],
)
def test_replicas_hold_the_trainers_bytes(
    tmp_path: Path, algorithm: str, chunk: int, ranks: int, trainers: int
) -> None:
    seen = run(tmp_path, "plain", algorithm=algorithm, chunk=chunk, ranks=ranks, trainers=trainers)
    versions = ["0.0", "0.1", "0.2"]
    manifests = [Manifest.from_json((tmp_path / "run" / "manifests" / f"{v}.json").read_text()) for v in versions]
    assert [m.parent for m in manifests] == [None, "0.0", "0.1"]
    assert max(c.nbytes for c in manifests[0].chunks) <= chunk and len(manifests[0].chunks) >= trainers
    for rank in range(trainers):
        assert [r["verified"] for r in seen[rank]["results"]] == [list(range(trainers, ranks))] * 3
        assert [r["digest"] for r in seen[rank]["results"]] == [m.digest for m in manifests]
        assert seen[rank]["announced"] == (versions if rank == 0 else [])
    for replica in seen[trainers:]:
        assert [(s["version"], s["equal"], s["mode"]) for s in replica["seen"]] == [(v, True, 0o600) for v in versions]
        first, second, third = (s["path"] for s in replica["seen"])
        assert first == third != second  # two halves, used in turn
        assert (replica["active"], replica["active_path"]) == ("0.2", third)
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_corrupted_chunk_is_refused_and_the_old_version_stays(tmp_path: Path) -> None:
    seen = run(tmp_path, "corrupt", algorithm="chain")
    for trainer in seen[:2]:
        outcomes = [(r["verified"], sorted(r["refused"])) for r in trainer["results"]]
        assert outcomes == [([2, 3], []), ([], ["2", "3"]), ([2, 3], [])]
        assert "corrupt" in trainer["results"][1]["refused"]["2"]
    for replica in seen[2:]:
        assert [s["version"] for s in replica["seen"]] == ["0.0", "0.2"]
        assert [version for version, _ in replica["refused"]] == ["0.1"]
        assert (
            replica["seen"][0]["path"] != replica["seen"][1]["path"]
        )  # the refused bytes went to the half that 0.2 took


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("manifest_damaged", "manifest: malformed: it was changed after it was written"),
        ("manifest_of_another", "incompatible: the tokenizer differs: trainer other, replica t"),
    ],
)
def test_a_wrong_manifest_costs_one_version_and_no_replica(tmp_path: Path, scenario: str, reason: str) -> None:
    seen = run(tmp_path, scenario)
    outcomes = [(r["verified"], sorted(r["refused"])) for r in seen[0]["results"]]
    assert outcomes == [([2, 3], []), ([], ["2", "3"]), ([2, 3], [])]
    for replica in seen[2:]:
        assert [(s["version"], s["equal"]) for s in replica["seen"]] == [("0.0", True), ("0.2", True)]
        ((version, why),) = replica["refused"]
        assert version == "0.1" and reason in why


def test_a_publish_that_fails_is_heard_without_waiting_for_it(tmp_path: Path) -> None:
    seen = run(tmp_path, "not_announced")
    assert seen[0]["failed"] == "unreachable: the coordinator is away"
    assert seen[1]["failed"] == "publishing 0.1 failed on trainer 0: unreachable: the coordinator is away"
    assert [s["version"] for replica in seen[2:] for s in replica["seen"]] == ["0.0", "0.0"]


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        ("incompatible", "the model configuration differs"),
        ("tokenizer", "the tokenizer differs"),
        ("base", "the base model differs: trainer other, replica b"),
    ],
)
def test_another_model_tokenizer_or_base_is_refused_before_any_byte_moves(
    tmp_path: Path, scenario: str, reason: str
) -> None:
    seen = run(tmp_path, scenario)
    assert all(r["verified"] == [] and reason in r["refused"]["2"] for r in seen[0]["results"])
    assert seen[2]["seen"] == [] and seen[2]["active"] is None
    # The coordinator hears of a refusal only after it has heard of the version.
    assert [version for version, _ in seen[2]["refused"]] == seen[0]["announced"] == ["0.0", "0.1", "0.2"]


@pytest.mark.parametrize(
    ("scenario", "evidence"),
    [
        ("sender_dies", ""),
        ("receiver_dies", ""),
        ("receiver_hangs", "weights_timeout: nothing has moved for 3 s: inference-2"),
        ("odd_message", "KeyError: 'version'"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_step_and_its_version_is_never_visible(
    tmp_path: Path, scenario: str, evidence: str
) -> None:
    outcome = launch(tmp_path, scenario, algorithm="chain", chunk=1024)
    assert outcome.returncode != 0
    assert evidence in outcome.stderr
    assert sorted((tmp_path / "staged").read_text().splitlines()) == ["2 0.0", "3 0.0"]
    # What the dead left in memory is found and removed by whoever starts next.
    deadline = time.monotonic() + 60.0
    while list((tmp_path / "shm").iterdir()) and time.monotonic() < deadline:
        remove_leftovers(tmp_path / "shm")
        time.sleep(0.1)  # mpiexec does not wait for those that it has killed
    assert list((tmp_path / "shm").iterdir()) == []


@pytest.mark.parametrize(("trainers", "ranks"), [(2, 3), (3, 5), (4, 5)])
def test_sharded_trainers_send_their_own_rows(tmp_path: Path, trainers: int, ranks: int) -> None:
    seen = run(tmp_path, "sharded", trainers=trainers, ranks=ranks, chunk=1024)
    for replica in seen[trainers:]:
        assert [(s["version"], s["equal"]) for s in replica["seen"]] == [("0.0", True), ("0.1", True), ("0.2", True)]
    held = [trainer["part"] for trainer in seen[:trainers]]
    assert sum(held) <= seen[0]["whole"] + trainers * 8 * 64  # no rank holds another's part


def test_a_sharded_publish_needs_little_memory_beside_the_own_part(tmp_path: Path) -> None:
    seen = run(tmp_path, "sharded_big", trainers=2, ranks=3, chunk=16 * MIB)
    assert seen[2]["active"] == "0.2"
    for trainer in seen[:2]:
        assert trainer["part"] < 0.51 * trainer["whole"]
        assert (
            trainer["extra"] <= 64 * MIB + trainer["part"] / 2
        )  # two large tensors, so half a part is the largest shard


def test_a_failed_flip_is_told_and_the_old_version_stays_active(tmp_path: Path) -> None:
    seen = run(tmp_path, "flip_fails")
    assert seen[0]["refusals"] == {"2": ["0.1", "flip_failed: the engine said no"]}
    first, failed, after = seen[2]["seen"]
    assert failed["path"] == after["path"] != first["path"]  # 0.1 stayed standby, so that 0.2 overwrote it and not 0.0
    assert seen[2]["refused"] == [["0.1", "flip_failed: the engine said no"]]
    assert seen[3]["refused"] == [] and seen[3]["seen"][1]["path"] != seen[3]["seen"][2]["path"]


def test_a_replica_that_still_flips_does_not_hold_up_the_others(tmp_path: Path) -> None:
    seen = run(tmp_path, "slow_flip")
    assert all(s["equal"] for replica in seen[2:] for s in replica["seen"])
    slow, fast = ({s["version"]: s["at"] for s in replica["seen"]} for replica in seen[2:])
    assert set(slow) == set(fast) == {"0.0", "0.1", "0.2"}
    assert slow["0.1"] - slow["0.0"] > 0.9
    assert slow["0.1"] - fast["0.1"] > 0.5
    assert seen[0]["results"][0]["verified"] == [2, 3]


def test_replicas_of_one_node_share_one_copy(tmp_path: Path) -> None:
    seen = run(tmp_path, "shared_node", ranks=4, trainers=1)
    assert [r["verified"] for r in seen[0]["results"]] == [[1]] * 3  # one copy travelled
    paths = [s["path"] for s in seen[1]["seen"]]
    assert paths[0] == paths[2] != paths[1]
    for replica in seen[1:]:
        assert [(s["version"], s["equal"]) for s in replica["seen"]] == [("0.0", True), ("0.1", True), ("0.2", True)]
        assert [s["path"] for s in replica["seen"]] == paths
        assert replica["active"] == "0.2"
    assert list((tmp_path / "shm").iterdir()) == []


def test_one_of_two_replicas_of_a_node_fails_its_flip(tmp_path: Path) -> None:
    seen = run(tmp_path, "shared_node_fails", ranks=3, trainers=1)
    assert seen[0]["refusals"] == {"1": ["0.1", "flip_failed: the engine said no"]}
    assert (seen[1]["active"], seen[2]["active"]) == ("0.3", "0.3")
    for replica in seen[1:]:
        assert [s["version"] for s in replica["seen"]] == ["0.0", "0.1", "0.2", "0.3"]
        # One stayed on 0.0, one went to 0.1: while 0.2 arrived, either could have been loaded again.
        assert all(s["reloadable"] for s in replica["seen"])
        assert [s["files"] for s in replica["seen"]] == [4, 4, 5, 4]  # two each, those of the second rank stay empty
    assert seen[2]["refused"] == []


def test_a_refusal_holds_for_all_replicas_of_the_node(tmp_path: Path) -> None:
    seen = run(tmp_path, "shared_node_tokenizer", ranks=3, trainers=1)
    for replica in seen[1:]:
        assert [version for version, _ in replica["refused"]] == ["0.0", "0.1", "0.2"]
        assert replica["seen"] == []


def test_wrong_number_of_ranks_is_one_clear_error(tmp_path: Path) -> None:
    outcome = launch(tmp_path, "plain", ranks=2, trainers=1, expected=3)
    assert outcome.returncode != 0
    assert "the MPI world has size 2 but the job has 3 ranks" in outcome.stderr
    assert "srun --mpi" in outcome.stderr


def test_waiting_costs_little(tmp_path: Path) -> None:
    seen = run(tmp_path, "idle", ranks=3)
    assert seen[2]["cpu_share"] < 0.1
