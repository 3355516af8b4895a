"""Memory that belongs to no process, or to several at once."""

from __future__ import annotations

from typing import Any

from hpcrl.errors import PolicyError
from hpcrl.sandbox.limits import Limits

SHARED = r"""
#include <sys/mman.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    for (int i = 0; i < 8; i++) {
        char *p = mmap(0, 40 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return 1;
        memset(p, 1, 40 << 20);
    }
    sleep(60);
    return 0;
}
"""
OTHERS = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sched.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/ptrace.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>
static void say(const char *name, long got) { printf("%s: %s\n", name, got < 0 ? strerror(errno) : "done"); }
int main(void) {
    struct clone_args arguments = {.flags = CLONE_NEWUSER, .exit_signal = 17};
    say("clone3", syscall(SYS_clone3, &arguments, sizeof arguments));
    say("clone", syscall(SYS_clone, CLONE_NEWUSER | 17, 0, 0, 0, 0));
    say("unshare", unshare(CLONE_NEWUSER));
    say("parent", syscall(SYS_clone, CLONE_PARENT | 17, 0, 0, 0, 0));
    say("same memory", syscall(SYS_clone, CLONE_VM | 17, 0, 0, 0, 0));
    say("memfd", memfd_create("x", 0));
    say("segment", shmget(IPC_PRIVATE, 1 << 20, 0600));
    say("semaphores", semget(IPC_PRIVATE, 1000, 0600));
    say("queue", msgget(IPC_PRIVATE, 0600));
    say("tracer", ptrace(PTRACE_SEIZE, getppid(), 0, PTRACE_O_TRACESECCOMP));
    say("small segment", shmget(IPC_PRIVATE, 56, 0600));
    say("few semaphores", semget(IPC_PRIVATE, 17, 0600));
    return 0;
}
"""


def test_shared_memory_is_counted(attack: Any) -> None:
    got = attack.run("./program", 20, Limits(memory_bytes=128 << 20), program=attack.built(SHARED))
    assert isinstance(got, PolicyError) and got.reason == "memory_limit"


def test_shared_memory_of_many_is_counted_once(attack: Any) -> None:
    source = SHARED.replace("sleep(60);", "fork(); fork(); sleep(3);")
    got = attack.run("./program", 20, Limits(memory_bytes=400 << 20), program=attack.built(source))
    assert got.exit_code == 0


def test_memory_outside_of_processes_is_refused(attack: Any) -> None:
    got = attack.run("./program", 20, program=attack.built(OTHERS))
    said = dict(line.split(": ", 1) for line in got.output.splitlines())
    refused = "Operation not permitted"
    names = ("clone", "unshare", "parent", "same memory", "memfd", "segment", "semaphores", "queue", "tracer")
    assert {name: said[name] for name in names} == dict.fromkeys(names, refused)
    assert said["clone3"] == "Function not implemented"
    assert said["small segment"] == said["few semaphores"] == "done"


def test_no_file_system_in_memory_is_made(attack: Any) -> None:
    got = attack.run("unshare --user --map-root-user --mount mount -t tmpfs -o size=8G tmpfs /mnt; echo $?")
    assert got.output.splitlines()[-1] == "1"
