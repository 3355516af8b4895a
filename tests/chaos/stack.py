"""A run directory and its processes, which may be killed at any time and are started again: what a launcher does."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.config import dump_config, parse_config
from hpcrl.protocol import client as c
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.status import Status, StatusRequest

__all__ = ["GROUPS_PER_STEP", "GROUP_SIZE", "ROLES", "Stack"]

GROUP_SIZE, GROUPS_PER_STEP = 3, 2
TASKS = 5
ROLES = ("worker-0", "worker-1", "scorer-0", "coordinator", "trainer")


def write_task(root: Path, name: str) -> None:
    """Right when the file ``answer`` holds ``right``."""
    task = root / name
    (task / "environment" / "files").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "instruction.md").write_text(f"Make the answer right ({name}).\n")
    (task / "environment" / "files" / "answer").write_text("wrong\n")
    (task / "tests" / "test.sh").write_text(
        'if [ "$(cat answer)" = right ]; then echo 1; else echo 0; fi > "${HPCRL_MOUNT_1:-/logs/verifier}/reward.txt"\n'
    )


@dataclass
class Stack:
    """``start`` brings all roles up, ``watch`` restarts what was killed, ``close`` ends everything and says what was left behind."""

    root: Path
    steps: int
    replica_url: str = ""
    backend: str = "process"
    lease_s: float = 6.0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    deaths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = RunDir(self.root / "run")
        self.run.create()
        for index in range(TASKS):
            write_task(self.root / "tasks", f"task-{index}")
        config = {
            "model": {"path": "unused"},
            "tasks": {"train": str(self.root / "tasks")},
            "rollout": {"group_size": GROUP_SIZE, "max_turns": 2, "attempt_timeout_s": 60.0},
            "staleness": {"max_policy_lag": 2},
            "trainer": {"groups_per_step": GROUPS_PER_STEP, "steps": self.steps},
            "sandbox": {"backend": self.backend},
            "coordinator": {
                "lease_s": self.lease_s,
                "heartbeat_s": 0.5,
                "infra_retries": 10_000,
                "data_retries": 10_000,
                "redraws": 10_000,
            },
            "worker": {"concurrency": 6, "seal_every": 3, "seal_after_s": 0.2},
            "scoring": {"concurrency": 4, "lease_s": 2 * self.lease_s},
            "inference": {"request_timeout_s": 20.0},
        }
        publish_text(self.run.config, dump_config(parse_config(config)))
        issue_keys(self.run)
        # Run by root, containers are an ordinary user's, who cannot pass private directories.
        self.scratch = Path(tempfile.mkdtemp(prefix="hpcrl-chaos-scratch-"))
        self.scratch.chmod(0o711)

    def start(self) -> None:
        for role in ("coordinator", "worker-0", "worker-1", "scorer-0", "trainer"):
            self.spawn(role)

    def spawn(self, role: str) -> None:
        name, _, index = role.partition("-")
        if role == "trainer":
            script = Path(__file__).parent / "trainer_step.py"
            command = [sys.executable, str(script), str(self.run.root), self.replica_url, str(self.steps)]
        else:
            command = [sys.executable, "-m", f"hpcrl.run.{name}", "--run-dir", str(self.run.root)]
            command += ["--index", index] if index else []
        environment = {**os.environ, "HPCRL_SCRATCH": str(self.scratch)}
        with open(self.run.root / f"{role}.log", "ab") as log:
            self.processes[role] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def kill(self, role: str) -> bool:
        process = self.processes[role]
        if process.poll() is not None:
            return False
        self.killed.add(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True

    def watch(self) -> None:
        """Start again what was killed; what died by itself is remembered, for it should not have."""
        for role, process in list(self.processes.items()):
            code = process.poll()
            if code is None or (role == "trainer" and code == 0):
                continue
            if process.pid not in self.killed:
                self.deaths.append(f"{role} ended by itself with code {code}: see {self.run.root / role}.log")
            self.spawn(role)

    @property
    def done(self) -> bool:
        return (self.run.root / "done").exists()

    def status(self) -> Status | None:
        client = c.Client(self.run, "admin", patience_s=0.2)
        try:
            return client.call(c.STATUS, StatusRequest())
        except c.CoordinatorGone:
            return None
        finally:
            client.close()

    def damage(self, chance: random.Random) -> bool:
        """Flip one bit of a sealed shard."""
        shards = sorted(self.run.shards.glob("*.h5"))
        if not shards:
            return False
        with contextlib.suppress(FileNotFoundError), open(chance.choice(shards), "r+b") as file:
            place = chance.randrange(file.seek(0, os.SEEK_END))
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
        return True

    def close(self) -> list[str]:
        """End all roles. Returns the sandboxes that were left behind: their directories, and processes in them."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        deadline = time.monotonic() + 30
        while (
            left := self.leftovers()
        ) and time.monotonic() < deadline:  # the guards of killed workers sweep a moment later
            time.sleep(0.2)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return left

    def leftovers(self) -> list[str]:
        found = [str(path) for path in self.scratch.glob("*/w-*")]
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                where = os.readlink(entry / "cwd")
                if where.startswith(str(self.scratch)):
                    found.append(f"process {entry.name} in {where}")
        return found
