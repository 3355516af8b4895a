"""System calls that no sandbox needs: they reach memory that nobody counts, or kernel code that only an attacker wants.

Apptainer applies the profile to the container (``--security=seccomp:FILE``); a build without libseccomp warns and goes on, which
check.preflight sees from inside. The profile's format is Docker's, of which Apptainer knows no ``errnoRet``: refused is EPERM. Only
``clone3`` must say ENOSYS, so that libc falls back to ``clone``, whose flags a filter can read; TRACE without a tracer does that, and
a process inside may not become a tracer that is asked.

    user namespaces                  a tmpfs of any size, IPC memory of its own, most of the kernel's recent holes
    memfd, System V IPC              memory that belongs to no process (small segments stay: PostgreSQL takes one of 56 bytes)
    parents of one's choosing        processes that scoring would not see coming loose: CLONE_PARENT, and memory shared with one that
                                     goes on (threads and vfork stay)
    sockets but of four families     some know no network namespace: vsock reaches the machine that this one runs on
    limits of other processes        the tested code must not see to it that the tests can open no file
    signals upon input or output     the kernel sends them to whom a file names: they outlive the one that asked for them, and could
                                     end the tests when nobody is left to be seen
    pidfd_getfd, setns               what another process has open, or where it lives
    syslog                           the host's own log
    io_setup                         counted for the whole node: one sandbox could take all
    bpf, perf, io_uring, keys, …     attack surface
"""

from __future__ import annotations

import json
import platform
from typing import Any

__all__ = ["profile"]

_ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}

_CLONE_NEWUSER = 0x10000000
_CLONE_PARENT = 0x8000
_CLONE_VM, _CLONE_VFORK, _CLONE_THREAD = 0x100, 0x4000, 0x10000
_PTRACE_SETOPTIONS, _PTRACE_SEIZE = 0x4200, 0x4206
_PTRACE_O_TRACESECCOMP = 0x80
_SEGMENT_BYTES = 4096
_SEMAPHORES = 32
_INT = 0xFFFFFFFF
"""The kernel looks at no more of an argument that is an int."""
_OWNER_COMMANDS = (8, 10, 15)
"""fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX"""
_REQUESTS = (0x8901, 0x8902, 0x40806685)
"""ioctl: FIOSETOWN, SIOCSPGRP; FS_IOC_ENABLE_VERITY, after which nobody can write to a file, a reward for one"""
_SOCKETS = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK"""

_REFUSED = (
    "memfd_create",
    "memfd_secret",
    "msgget",
    "ipc",  # System V IPC of 32-bit programs
    "socketcall",  # sockets of 32-bit programs, whose family a filter cannot read
    "pidfd_getfd",
    "setns",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "syslog",
    "io_setup",
    "io_uring_setup",
    "add_key",
    "request_key",
    "keyctl",
)


def profile(machine: str | None = None) -> str:
    """The profile as JSON, for ``machine`` as in ``uname -m`` (None: this one; an unknown one's filter is for its own ABI)."""
    rules = [
        _refuse("unshare", "clone", args=[_flag(0, _CLONE_NEWUSER)]),
        _refuse("clone", args=[_flag(0, _CLONE_PARENT)]),
        _refuse("clone", args=[_flag(0, _CLONE_VM, of=_CLONE_VM | _CLONE_VFORK | _CLONE_THREAD)]),
        {"names": ["clone3"], "action": "SCMP_ACT_TRACE"},
        *(
            _refuse("ptrace", args=[_compare(0, "EQ", request), _flag(3, _PTRACE_O_TRACESECCOMP)])
            for request in (_PTRACE_SETOPTIONS, _PTRACE_SEIZE)
        ),
        _refuse("shmget", args=[_compare(1, "GT", _SEGMENT_BYTES)]),
        _refuse("semget", args=[_compare(1, "GT", _SEMAPHORES)]),
        *(
            _refuse("socket", "socketpair", args=[_compare(0, "EQ", family)])
            for family in range(_SOCKETS[-1])
            if family not in _SOCKETS
        ),
        _refuse("socket", "socketpair", args=[_compare(0, "GT", _SOCKETS[-1])]),
        *(_refuse("fcntl", "fcntl64", args=[_flag(1, command, of=_INT)]) for command in _OWNER_COMMANDS),
        *(_refuse("ioctl", args=[_flag(1, request, of=_INT)]) for request in _REQUESTS),
        _refuse("prlimit64", args=[_compare(0, "NE", 0), _compare(2, "NE", 0)]),
        _refuse(*_REFUSED),
    ]
    architectures = _ARCHITECTURES.get(platform.machine() if machine is None else machine, [])
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "architectures": architectures, "syscalls": rules})


def _refuse(*names: str, args: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ERRNO", "args": args or []}


def _compare(index: int, how: str, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": f"SCMP_CMP_{how}"}


def _flag(index: int, bit: int, of: int | None = None) -> dict[str, Any]:
    """Of the bits ``of`` (None: of this one) exactly ``bit`` is set."""
    return {"index": index, "value": bit if of is None else of, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}
