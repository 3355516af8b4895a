"""The relay that keeps PMI commands shorter than what Slurm reads at once."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from hpcrl.weights import pmi_relay


def test_only_the_longest_value_is_lowered() -> None:
    answer = b"cmd=maxes rc=0 kvsname_max=256 keylen_max=256 vallen_max=1024"
    assert pmi_relay.shorten(answer) == b"cmd=maxes rc=0 kvsname_max=256 keylen_max=256 vallen_max=900"
    assert pmi_relay.shorten(b"cmd=maxes vallen_max=64") == b"cmd=maxes vallen_max=64"
    other = b"cmd=get_result rc=0 value=vallen_max=1024"
    assert pmi_relay.shorten(other) == other


def test_it_stands_between_rank_and_slurm_and_ends_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, given = socket.socketpair()
    started: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def remember(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        started.append(original(*args, **kwargs))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    monkeypatch.setenv("PMI_FD", str(given.detach()))
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    pmi_relay.install()
    rank = socket.socket(fileno=int(os.environ["PMI_FD"]))
    slurm.settimeout(30)
    rank.settimeout(30)
    rank.sendall(b"cmd=get_maxes\n")
    assert slurm.recv(100) == b"cmd=get_maxes\n"
    slurm.sendall(b"cmd=maxes vallen_")  # in two pieces
    slurm.sendall(b"max=1024\n")
    assert rank.recv(100) == b"cmd=maxes vallen_max=900\n"
    rank.close()
    assert slurm.recv(100) == b""  # Slurm sees the rank's end
    assert started[0].wait(30) == 0


def test_outside_a_slurm_step_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_FD", "99")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    pmi_relay.install()
    assert os.environ["PMI_FD"] == "99"
