"""The cluster's network.

    machine ── hvXXXXXXXX  <subnet>.1         nodes: eth0 <subnet>.11, .12, ...
                   │ veth                        │ veth
               ┌───┴────────────────────────────┴───┐
               │  bridge br0 in namespace KEY.switch │
               └─────────────────────────────────────┘

The bridge has a namespace of its own: forwarding between nodes is then untouched by the machine's packet filter (a
Docker host drops bridged traffic), and nothing but one veth shows on the machine. Namespaces are named ones
(/run/netns), so that ``ip -n`` and ``tc -n`` can reach them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from contextlib import suppress
from pathlib import Path

from hpcrl.devcluster.layout import ClusterLayout, Node, controller_address, node_address
from hpcrl.devcluster.procs import run_tool
from hpcrl.errors import EnvironmentFault

_NETNS_DIR = Path("/run/netns")
_POOL = ipaddress.IPv4Network("10.213.0.0/16")


class Network:
    """Namespaces and links of one cluster. Names carry a key of the state directory, so clusters never collide."""

    def __init__(self, state_dir: Path, name: str) -> None:
        key = hashlib.sha256(str(state_dir).encode()).hexdigest()
        self.prefix = f"{name}-{key[:6]}."
        self.host_interface = f"hv{key[:8]}"
        self.switch = f"{self.prefix}switch"

    def node_namespace(self, node: str) -> str:
        """Name of a node's network namespace."""
        return f"{self.prefix}{node}"

    def node_path(self, node: str) -> Path:
        """File that holds a node's network namespace; it exists while the namespace does."""
        return _NETNS_DIR / self.node_namespace(node)

    def namespaces(self) -> list[str]:
        """All namespaces of this cluster that exist, also of a layout that was forgotten."""
        if not _NETNS_DIR.is_dir():
            return []
        return sorted(path.name for path in _NETNS_DIR.iterdir() if path.name.startswith(self.prefix))

    def inodes(self) -> set[int]:
        """Namespace inodes of the nodes, to find the processes inside."""
        found = set()
        for name in self.namespaces():
            with suppress(OSError):
                found.add((_NETNS_DIR / name).stat().st_ino)
        return found

    def ensure(self, layout: ClusterLayout, subnet: ipaddress.IPv4Network) -> None:
        """Create what is missing; intact parts are left alone. Raises EnvironmentFault."""
        if not self._switch_intact(subnet):
            self.remove()
            self._add_switch(subnet)
        for node in layout.unrolled():
            if not self._intact(self.node_namespace(node.name), "eth0", node_address(subnet, node)):
                self._remove_namespace(self.node_namespace(node.name))
                self._add_node(node, subnet)

    def limit(self, node: Node, rate: str | None) -> None:
        """Limit a node's link to ``rate`` (tc's notation, "1gbit") in both directions; None: no limit. Raises EnvironmentFault."""
        ends = ((self.node_namespace(node.name), "eth0"), (self.switch, f"port{node.index}"))
        for namespace, device in ends:
            if "tbf" in run_tool(["tc", "-n", namespace, "qdisc", "show", "dev", device]):
                run_tool(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"])
            if rate is not None:
                bucket = ["rate", rate, "burst", "256kb", "latency", "50ms"]
                run_tool(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket])

    def remove(self) -> None:
        """Delete all namespaces of this cluster and its link on the machine; nothing there is no error."""
        if Path("/sys/class/net", self.host_interface).exists():
            run_tool(["ip", "link", "delete", self.host_interface])
        for name in self.namespaces():
            self._remove_namespace(name)

    def _add_switch(self, subnet: ipaddress.IPv4Network) -> None:
        run_tool(["ip", "netns", "add", self.switch])
        _batch(
            [
                f"link add {self.host_interface} type veth peer name machine netns {self.switch}",
                f"address add {controller_address(subnet)}/{subnet.prefixlen} dev {self.host_interface}",
                f"link set {self.host_interface} up",
            ]
        )
        commands = ["link add br0 type bridge", "link set br0 up", "link set machine master br0", "link set machine up"]
        _batch(commands, namespace=self.switch)

    def _add_node(self, node: Node, subnet: ipaddress.IPv4Network) -> None:
        name, port = self.node_namespace(node.name), f"port{node.index}"
        run_tool(["ip", "netns", "add", name])
        _batch(
            [
                f"link add {port} type veth peer name eth0 netns {name}",
                f"link set {port} master br0",
                f"link set {port} up",
            ],
            namespace=self.switch,
        )
        _batch(
            [
                "link set lo up",
                f"address add {node_address(subnet, node)}/{subnet.prefixlen} dev eth0",
                "link set eth0 up",
            ],
            namespace=name,
        )

    def _remove_namespace(self, name: str) -> None:
        if (_NETNS_DIR / name).exists():
            run_tool(["ip", "netns", "delete", name])

    def _switch_intact(self, subnet: ipaddress.IPv4Network) -> bool:
        link = Path("/sys/class/net", self.host_interface).exists()
        return link and self._intact(self.switch, "br0", None) and controller_address(subnet) in _addresses(None)

    def _intact(self, namespace: str, interface: str, address: str | None) -> bool:
        if not (_NETNS_DIR / namespace).exists():
            return False
        try:
            found = _addresses(namespace, interface)
        except EnvironmentFault:  # no such interface, or the file is no namespace any more (reboot)
            return False
        return address is None or address in found


def free_subnet(start: int) -> ipaddress.IPv4Network:
    """A /24 of the pool that overlaps no address or route of the machine; the search begins at number ``start``."""
    used = []
    for route in json.loads(run_tool(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]"):
        with suppress(ValueError):  # "default" and the like
            used.append(ipaddress.IPv4Network(route["dst"], strict=False))
    candidates = list(_POOL.subnets(new_prefix=24))
    for number in range(len(candidates)):
        candidate = candidates[(start + number) % len(candidates)]
        if not any(candidate.overlaps(network) for network in used):
            return candidate
    raise EnvironmentFault(f"no free /24 network in {_POOL}; give the layout a subnet")


def _addresses(namespace: str | None, interface: str | None = None) -> set[str]:
    where = ["-n", namespace] if namespace else []
    which = ["dev", interface] if interface else []
    links = json.loads(run_tool(["ip", *where, "-json", "-4", "address", "show", *which]) or "[]")
    return {entry["local"] for link in links for entry in link.get("addr_info", [])}


def _batch(commands: list[str], *, namespace: str | None = None) -> None:
    where = ["-n", namespace] if namespace else []
    run_tool(["ip", *where, "-batch", "-"], stdin="".join(line + "\n" for line in commands))
