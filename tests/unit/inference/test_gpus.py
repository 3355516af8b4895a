"""Every replica of a node gets GPUs of its own."""

from __future__ import annotations

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.inference.gpus import given_by_slurm, own_gpus, visible_gpus


@pytest.mark.parametrize(("replicas", "per_replica"), [(1, 1), (4, 1), (2, 2), (1, 4), (8, 1), (2, 4)])
@pytest.mark.parametrize("given", [None, 8])
def test_replicas_share_no_gpu(replicas: int, per_replica: int, given: int | None) -> None:
    visible = [str(number) for number in range(8)]
    own = [own_gpus(visible, index, per_replica, given=given) for index in range(replicas)]
    assert [len(gpus) for gpus in own] == [per_replica] * replicas
    assert [gpu for gpus in own for gpu in gpus] == visible[: replicas * per_replica]


def test_what_slurm_named_is_kept_in_its_words() -> None:
    assert own_gpus(["3", "6"], 1, 1, given=2) == ["6"]
    assert own_gpus(["GPU-8f", "MIG-a/1/0"], 1, 1, given=2) == ["MIG-a/1/0"]


def test_a_process_that_was_bound_to_its_own_uses_those() -> None:
    """Under device cgroups every one of them is called 0."""
    assert [own_gpus(["0"], index, 1, given=4) for index in range(4)] == [["0"]] * 4
    assert own_gpus(["0", "1"], 1, 2, given=4) == ["0", "1"]


def test_one_gpu_is_not_shared_silently() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        own_gpus(["0"], 1, 1, given=1)
    message = str(caught.value)
    assert message.startswith(
        "replica 2 of this node needs 1 GPU(s) (inference.tensor_parallel) after the 1 of others, but only 1"
    )
    assert "--gpus-per-node" in message
    for visible, index, per_replica, given in (([], 0, 1, None), (["0", "1", "2"], 1, 2, 3), (["0"], 0, 2, 4)):
        with pytest.raises(EnvironmentFault):
            own_gpus(visible, index, per_replica, given=given)


def test_gpus_of_trainers_on_the_same_machine_are_left_to_them() -> None:
    assert [own_gpus(["0", "1", "2", "3"], index, 1, taken=2) for index in range(2)] == [["2"], ["3"]]


def test_what_can_be_seen() -> None:
    assert visible_gpus({}, 2) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}, 2) == ["2", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,9"}, 1) == ["0"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, 0) == []
    assert given_by_slurm({"SLURM_GPUS_ON_NODE": "4"}) == 4
    assert given_by_slurm({}) is None
