"""A Slurm of ordinary objects: it takes jobs, and the test says what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpcrl.launch.outcome import leader_of
from hpcrl.launch.slurm import Slurm


class FakeSlurm(Slurm):
    """``texts``: submitted scripts; ``jobs``: state by id, to be set by the test; ``calls``: everything that was ordered."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.jobs: dict[str, str] = {}
        self.calls: list[str] = []

    def submit(self, script: Path, *, folder: Path | None = None) -> str:
        self.texts.append(script.read_text(encoding="utf-8"))
        job_id = str(43 + len(self.texts))
        for index in range(self.texts[-1].count("#SBATCH hetjob") + 1):
            self.jobs[f"{job_id}+{index}"] = "PENDING"
        return job_id

    def states(self, job_ids: Iterable[str]) -> dict[str, str]:
        leaders = {leader_of(job_id) for job_id in job_ids}
        return {job_id: state for job_id, state in self.jobs.items() if leader_of(job_id) in leaders}

    def cancel(self, job_id: str) -> None:
        self.calls.append(f"cancel {job_id}")

    def requeue(self, job_id: str) -> None:
        self.calls.append(f"requeue {job_id}")

    def output(self, job_id: str) -> Path | None:
        return None
