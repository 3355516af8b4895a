from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from hpcrl.devcluster.layout import ClusterLayout, NodeGroup, controller_address, load_layout, node_address
from hpcrl.errors import UserError


def test_default_has_three_partitions_and_fake_gpus() -> None:
    nodes = {node.name: (node.partition, node.gpus) for node in ClusterLayout().unrolled()}
    assert nodes == {
        "train1": ("train", 2),
        "infer1": ("infer", 1),
        "infer2": ("infer", 1),
        "cpu1": ("cpu", 0),
        "cpu2": ("cpu", 0),
    }


def test_addresses_are_distinct_and_inside_the_subnet() -> None:
    subnet = IPv4Network("10.213.7.0/24")
    addresses = [node_address(subnet, node) for node in ClusterLayout().unrolled()]
    assert controller_address(subnet) == "10.213.7.1"
    assert addresses == [f"10.213.7.{number}" for number in range(10, 15)]


def test_shipped_example_is_the_default() -> None:
    assert load_layout(Path(__file__).parents[3] / "configs" / "devcluster.yaml") == ClusterLayout()


def test_name_option_replaces_the_name_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "layout.yaml"
    path.write_text("name: one\nnodes: [{prefix: n, partition: p}]\n")
    layout = load_layout(path, name="two")
    assert (layout.name, [node.name for node in layout.unrolled()]) == ("two", ["n1"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodez: []", ["nodez", "allowed here: name, nodes"]),
        ("nodes: [{prefix: n, partition: p, gpu: 1}]", ["nodes.0.gpu", "gpus"]),
        ("nodes: []", ["at least one node group"]),
        ("nodes: [{prefix: n, partition: p}, {prefix: n, partition: q}]", ["n1", "twice"]),
        ("nodes: [{prefix: n, partition: p, count: 150}, {prefix: m, partition: p, count: 51}]", ["201", "200"]),
        ("nodes: [{prefix: 'N_', partition: p}]", ["nodes.0.prefix", "lower-case"]),
        ("name: Bad", ["name", "lower-case"]),
        ("name: a-very-very-long-cluster-name", ["at most 20"]),
        ("subnet: 10.0.0.0/28", ["subnet", "/24"]),
        ("[1, 2]", ["expected a mapping"]),
        ("a: [", ["not YAML"]),
    ],
)
def test_bad_layout_is_one_line_that_names_the_key(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "layout.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_layout(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in [str(path), *words]:
        assert word in message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: No such file"):
        load_layout(tmp_path / "none.yaml")


def test_group_rejects_zero_nodes() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        NodeGroup(prefix="n", partition="p", count=0)
