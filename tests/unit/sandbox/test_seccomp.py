from __future__ import annotations

import json

import pytest

from hpcrl.sandbox.seccomp import profile


@pytest.mark.parametrize(("machine", "first"), [("x86_64", "SCMP_ARCH_X86_64"), ("aarch64", "SCMP_ARCH_AARCH64")])
def test_the_filter_is_for_the_machine(machine: str, first: str) -> None:
    assert json.loads(profile(machine))["architectures"][0] == first


def test_an_unknown_machine_has_its_own_abi_only() -> None:
    assert json.loads(profile("riscv64"))["architectures"] == []


def test_what_is_not_named_is_allowed() -> None:
    table = json.loads(profile())
    assert table["defaultAction"] == "SCMP_ACT_ALLOW"
    refused = {name for rule in table["syscalls"] if not rule.get("args") for name in rule["names"]}
    assert {"memfd_create", "setns", "bpf"} <= refused and not refused & {"clone", "unshare", "ptrace", "shmget"}


def test_an_argument_of_32_bits_is_looked_at_as_the_kernel_does() -> None:
    """More bits set above those would pass an equality of 64."""
    for rule in json.loads(profile())["syscalls"]:
        if {"fcntl", "ioctl"} & set(rule["names"]):
            assert [(arg["op"], arg["value"]) for arg in rule["args"]] == [("SCMP_CMP_MASKED_EQ", 0xFFFFFFFF)]
