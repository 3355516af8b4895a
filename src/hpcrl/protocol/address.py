"""An address under which other nodes reach this one. A hostname that resolves to loopback is the classic trap of small clusters."""

from __future__ import annotations

import os
import socket

__all__ = ["interface_of", "routable_address"]

# Any address outside the machine will do: connecting a UDP socket sends nothing, it only asks the kernel for the route.
_ELSEWHERE = ("203.0.113.1", 9)


def routable_address() -> str:
    """This node's IPv4 address: HPCRL_ADDRESS if set, else what the hostname resolves to, else the route outwards, else loopback."""
    fixed = os.environ.get("HPCRL_ADDRESS")
    if fixed:
        return fixed
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError:
            return address


def interface_of(address: str) -> str | None:
    """Name of the network interface that holds ``address`` (for GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); None if none does."""
    import fcntl
    import struct

    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
