"""What no namespace bounds: sockets of families that know no network namespace, the host's log, what is counted for the whole node."""

from __future__ import annotations

from typing import Any

import pytest

PROGRAM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
static char buffer[65536];
static struct rlimit few = {3, 3};
static void tell(const char *what, long got) { printf("%s %s %d\n", what, got < 0 ? "refused" : "DONE", got < 0 ? errno : 0); }
int main(void) {
    for (int family = 1; family < 64; family++)
        for (int kind = 1; kind < 6; kind++) {
            int got = syscall(SYS_socket, family, kind, 0);
            if (got >= 0) { printf("socket %d\n", family); close(got); break; }
        }
    int pair[2];
    tell("vsock pair", syscall(SYS_socketpair, 40, 1, 0, pair));
    tell("log", syscall(SYS_syslog, 3, buffer, sizeof buffer));
    tell("aio", syscall(SYS_io_setup, 60000, buffer));
    tell("signals", syscall(SYS_fcntl, 1, 0x100000000 | F_SETOWN, getppid()));
    tell("verity", syscall(SYS_ioctl, open("program", O_RDONLY), 0x40806685, buffer));
    tell("limits of another", syscall(SYS_prlimit64, getppid(), RLIMIT_NOFILE, &few, 0));
    tell("limits of its own", syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, &few, 0));
    return 0;
}
"""
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16


@pytest.fixture
def told(attack: Any) -> list[str]:
    lines: list[str] = attack.run("./program & wait", program=attack.built(PROGRAM)).output.splitlines()
    return lines


def test_sockets_of_its_own_network_only(told: list[str]) -> None:
    assert {int(line.split()[1]) for line in told if line.startswith("socket ")} <= {_UNIX, _INET, _INET6, _NETLINK}


def test_refused(told: list[str]) -> None:
    refused = ("log", "aio", "signals", "verity", "limits of another")
    assert told[-6:] == [*(f"{what} refused 1" for what in refused), "limits of its own DONE 0"]
