"""Files that have no name any more: nobody who walks the directories finds them."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.errors import PolicyError
from hpcrl.sandbox.limits import Limits

FILL = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { SIZE = 1 << 20 };
static char content[SIZE];
static void *fill(void *unused) {
    char name[64];
    memset(content, 1, SIZE);
    BEFORE;
    for (int i = 0; i < 40; i++) {
        snprintf(name, sizeof name, "WHERE/f%d", i);
        int file = open(name, O_RDWR | O_CREAT, 0600);
        unlink(name);
        write(file, content, SIZE);
        AFTER;
    }
    sleep(SECONDS);
    return 0;
}
int main(void) {
    pthread_t thread;
    pthread_create(&thread, 0, fill, 0);
    pthread_join(thread, 0);
    return 0;
}
"""
OPEN = ("", "")
MAPPED = ("", "mmap(0, SIZE, PROT_READ, MAP_SHARED, file, 0); close(file)")
# A table of open files that only this thread has; a process whose first thread has ended shows no memory of its own.
THREAD = ("syscall(SYS_unshare, 0x400)", "")


def _program(attack: Any, how: tuple[str, str], where: str = ".", seconds: int = 20) -> bytes:
    source = FILL.replace("BEFORE", how[0]).replace("AFTER", how[1])
    return bytes(attack.built(source.replace("WHERE", where).replace("SECONDS", str(seconds))))


@pytest.mark.parametrize(
    ("how", "where"),
    [(OPEN, "."), (OPEN, "/dev/shm"), (MAPPED, "."), (MAPPED, "dev/zero"), (THREAD, ".")],
    ids=["open", "shm", "mapped", "as_memory", "thread"],
)
def test_only_that_attempt_ends(attack: Any, how: tuple[str, str], where: str) -> None:
    got = attack.run("mkdir -p dev/zero; ./program", 15, Limits(disk_bytes=8 << 20), _program(attack, how, where))
    assert isinstance(got, PolicyError) and got.reason == "disk_limit"


@pytest.mark.parametrize("how", [OPEN, MAPPED], ids=["open", "mapped"])
def test_temporary_files_are_no_offence(attack: Any, how: tuple[str, str]) -> None:
    got = attack.run("./program", 15, Limits(disk_bytes=64 << 20), _program(attack, how, seconds=3))
    assert not isinstance(got, PolicyError) and got.exit_code == 0
