"""A real multi-node Slurm on one machine, in Linux namespaces. Needs root; see README.md."""

from __future__ import annotations

from hpcrl.devcluster.cluster import Cluster, ClusterStatus, NodeStatus
from hpcrl.devcluster.layout import ClusterLayout, Node, NodeGroup, load_layout

__all__ = ["Cluster", "ClusterLayout", "ClusterStatus", "Node", "NodeGroup", "NodeStatus", "load_layout"]
