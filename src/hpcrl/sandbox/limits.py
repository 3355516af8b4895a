"""What an attempt may use. Set inside the sandbox (ulimit), by a cgroup where one is delegated, and watched from outside.

per process   memory (writable private pages), largest file, open files     ulimit, at once
per sandbox   processes                                                     ulimit on the user namespace, at once
              memory, processes                                             cgroup.py, at once; else watch.py, about once a second
              work directory: bytes and entries; deleted files that are open; files in memory   watch.py, about once a second
per command   wall clock, output kept, output at all                        shell.py, channel.py
per attempt   wall clock                                                    Sandbox.end_after, watch.py
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.errors import UserError

__all__ = ["Limits"]

MIB = 1024 * 1024

# Address space per byte of memory allowed: bounds shared mappings, which the limit on private pages leaves out.
_ADDRESS_SPACE = 8

_PENDING_SIGNALS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Example: ``Limits(command_timeout_s=30, output_bytes=16384)``. Every value must be positive."""

    start_timeout_s: float = 60.0
    """Container start, until its command server answers."""
    command_timeout_s: float = 30.0
    """Wall clock of one command when the caller names none."""
    command_bytes: int = 100_000
    """Longest command; the kernel allows 128 KiB per argument."""
    output_bytes: int = 16_384
    """Kept of a command's output: head and tail."""
    output_flood_bytes: int = 64 * MIB
    """A command that prints more than this is killed."""
    memory_bytes: int = 1024 * MIB
    """Private memory of one process, and of all together."""
    file_bytes: int = 256 * MIB
    """Largest file."""
    disk_bytes: int = 256 * MIB
    """Work directory and /dev/shm together."""
    disk_entries: int = 100_000
    """Files and directories in the work directory; as many in /tmp and the writable layer."""
    processes: int = 64
    open_files: int = 256
    artifact_bytes: int = 64 * MIB
    """Changed files of the work directory, as the stored archive."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UserError(f"sandbox limit {name} is {getattr(self, name)}: it must be positive")

    def ulimits(self) -> list[str]:
        """Shell lines that lower the limits; a line that fails means the inherited limit is already stricter.

        bash spells the process limit ``-u``, dash and busybox ``-p``. The unit of ``-v`` is KiB, of ``-f`` 512 or 1024 bytes
        depending on the shell: 1024 is assumed, so that the smaller shells are the stricter ones. Memory is bounded by ``-d``
        (private writable pages): allocators, Go, Java and Node reserve far more address space than they use.
        """
        return [
            "ulimit -c 0",
            # Counted for all sandboxes of a user together: one must not use up what its neighbours need.
            f"ulimit -i {_PENDING_SIGNALS}",
            # A site may allow its users real-time priority, which takes a whole core from everybody.
            "ulimit -r 0",
            "ulimit -e 0",
            f"ulimit -n {self.open_files}",
            f"ulimit -f {max(1, self.file_bytes // 1024)}",
            f"ulimit -d {max(1, self.memory_bytes // 1024)}",
            f"ulimit -v {max(1, _ADDRESS_SPACE * self.memory_bytes // 1024)}",
            f"ulimit -u {self.processes} || ulimit -p {self.processes}",
        ]
