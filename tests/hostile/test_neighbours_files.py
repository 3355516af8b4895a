"""What a neighbour or an earlier attempt left, and what shows of the run: scratch, run directory, tests, solution, keys."""

from __future__ import annotations

from typing import Any

FIND = (
    "find / -xdev \\( -name 'reward*' -o -name test.sh -o -name solve.sh -o -name '*.key' -o -name keys -o -name 'coordinator*' "
    "-o -name 'w-*' -o -name 'attempt-*' \\) -not -path '/proc/*' -not -path '/usr/*' -not -path '/etc/*' 2>/dev/null; "
    "ls -A /tests /logs/verifier /tmp /var/tmp /dev/shm; ls /proc/1/cwd/ /proc/1/root/work"
)


def test_nothing_is_there(attack: Any) -> None:
    for place in ("/tmp", "/var/tmp", "/dev/shm", "."):
        attack.run(f"echo secret > {place}/attempt-left")
    got = attack.run(FIND)
    assert "attempt-" not in got.output and "test.sh" not in got.output and "solve.sh" not in got.output
    assert "reward" not in got.output and "w-" not in got.output and "key" not in got.output


def test_nothing_can_be_written_that_others_see(attack: Any) -> None:
    got = attack.run(
        "for f in /proc/sys/kernel/core_pattern /proc/sys/vm/drop_caches /proc/sysrq-trigger /proc/sys/kernel/hostname; do "
        "(echo x > $f) 2>/dev/null && echo wrote $f; done; echo x > /usr/bin/planted; echo done"
    )
    assert "wrote" not in got.output and got.output.endswith("done\n")
    assert "cannot access" in attack.run("ls /usr/bin/planted").output
