"""A process whose first thread has ended: /proc shows no memory of it."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.errors import PolicyError
from hpcrl.sandbox.limits import Limits

HOG = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
static void *hold(void *unused) {
    for (int i = 0; i < 3; i++)
        memset(mmap(0, 40 << 20, PROT_READ | PROT_WRITE, KIND | MAP_ANONYMOUS, -1, 0), 1, 40 << 20);
    sleep(20);
    return 0;
}
int main(void) {
    pthread_t thread;
    pthread_create(&thread, 0, hold, 0);
    pthread_exit(0);
}
"""


@pytest.mark.parametrize("kind", ["MAP_PRIVATE", "MAP_SHARED"])
def test_only_that_attempt_ends(attack: Any, kind: str) -> None:
    # Two processes, each within its own limit.
    program = attack.built(HOG.replace("KIND", kind))
    got = attack.run("./program & ./program & wait", 15, Limits(memory_bytes=160 << 20), program)
    assert isinstance(got, PolicyError) and got.reason == "memory_limit"
