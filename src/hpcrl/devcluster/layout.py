"""What a development cluster looks like: a validated model, read from YAML or taken from the default.

Pure, apart from reading the file in :func:`load_layout`.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hpcrl.errors import UserError

CONTROLLER = "ctl"
MAX_NODES = 200
_FIRST_HOST = 10  # nodes take .10 and up; .1 is the controller and the machine itself
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,18}[a-z0-9])?")


class Node(BaseModel):
    """One node, after the groups are unrolled. Example: ``Node(name="infer2", partition="infer", cpus=8, ...)``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    partition: str
    cpus: int
    memory_mb: int
    gpus: int
    index: int


class NodeGroup(BaseModel):
    """Equal nodes ``prefix1 .. prefixN`` of one partition."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: str
    """Start of the host names; the number 1..count is appended."""
    count: int = Field(default=1, ge=1, le=MAX_NODES)
    partition: str
    cpus: int = Field(default=8, ge=1)
    """CPUs Slurm believes in. May exceed the machine's: nothing is pinned."""
    memory_mb: int = Field(default=16_000, ge=1)
    """Memory Slurm believes in, MiB. Not enforced."""
    gpus: int = Field(default=0, ge=0, le=64)
    """Fake GPUs: device files that can be allocated and nothing else."""

    @field_validator("prefix", "partition")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,29}", value):
            raise ValueError("lower-case letters, digits and '-', starting with a letter, at most 30 characters")
        return value


DEFAULT_NODES = (
    NodeGroup(prefix="train", count=1, partition="train", gpus=2),
    NodeGroup(prefix="infer", count=2, partition="infer", gpus=1),
    NodeGroup(prefix="cpu", count=2, partition="cpu"),
)


class ClusterLayout(BaseModel):
    """A cluster. ``ClusterLayout()`` is the default: train1 (2 GPUs), infer1-2 (1 GPU each), cpu1-2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "hpcrl"
    """Names the state directory and the Slurm cluster; clusters of different names run side by side."""
    nodes: tuple[NodeGroup, ...] = DEFAULT_NODES
    subnet: ipaddress.IPv4Network | None = None
    """IPv4 network of at least /24 size; null takes a free /24 out of 10.213.0.0/16."""
    slurm_conf: dict[str, str | int] = Field(default_factory=dict)
    """Further slurm.conf options (Epilog, SlurmdTimeout, ...), replacing the generated ones of the same name."""

    @field_validator("name")
    @classmethod
    def _cluster_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("lower-case letters, digits and inner '-', starting with a letter, at most 20 characters")
        return value

    @field_validator("subnet")
    @classmethod
    def _large_enough(cls, value: ipaddress.IPv4Network | None) -> ipaddress.IPv4Network | None:
        if value is not None and value.prefixlen > 24:
            raise ValueError("a /24 or larger network is needed")
        return value

    @model_validator(mode="after")
    def _distinct_nodes(self) -> ClusterLayout:
        names = [node.name for node in self.unrolled()]
        if not names:
            raise ValueError("at least one node group is needed")
        if len(names) > MAX_NODES:
            raise ValueError(f"{len(names)} nodes; at most {MAX_NODES} are possible")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"node name given twice: {', '.join(twice)}; use another prefix")
        reserved = sorted({"localhost", CONTROLLER} & set(names))
        if reserved:
            raise ValueError(f"reserved node name: {', '.join(reserved)}")
        return self

    def unrolled(self) -> tuple[Node, ...]:
        """All nodes, in the order of the groups."""
        nodes: list[Node] = []
        for group in self.nodes:
            for number in range(1, group.count + 1):
                nodes.append(
                    Node(
                        name=f"{group.prefix}{number}",
                        partition=group.partition,
                        cpus=group.cpus,
                        memory_mb=group.memory_mb,
                        gpus=group.gpus,
                        index=len(nodes),
                    )
                )
        return tuple(nodes)


def controller_address(subnet: ipaddress.IPv4Network) -> str:
    """Address of the machine itself on the cluster network; slurmctld listens there."""
    return str(subnet.network_address + 1)


def node_address(subnet: ipaddress.IPv4Network, node: Node) -> str:
    """Address of ``node`` in ``subnet``."""
    return str(subnet.network_address + _FIRST_HOST + node.index)


def load_layout(path: Path | None, *, name: str | None = None) -> ClusterLayout:
    """The layout in a YAML file, or the default; ``name`` replaces the layout's own.

    Raises UserError naming the file, the key and what is allowed there.
    """
    data: object = {}
    if path is not None:
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise UserError(f"cluster layout {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise UserError(f"cluster layout {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"cluster layout {path}: expected a mapping with keys {', '.join(ClusterLayout.model_fields)}")
    if name is not None:
        data = {**data, "name": name}
    try:
        return ClusterLayout.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "layout"
        allowed = ""
        if first["type"] == "extra_forbidden":
            model = NodeGroup if first["loc"][0] == "nodes" else ClusterLayout
            allowed = f"; allowed here: {', '.join(model.model_fields)}"
        raise UserError(f"cluster layout {path or 'default'}: {key}: {first['msg']}{allowed}") from error
