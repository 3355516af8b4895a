"""The run directory: one place that knows the names in it, and the one way files are published (temp, fsync, rename).

runs/<run_id>/  config.resolved.yaml  token  keys/  coordinator.db  endpoints/  manifests/  shards/  checkpoints/  metrics/
                logs/<role>/  artifacts/  model/<version>/  adapter/<version>/  failures/
                stop  job  restarted  requeues  trained.json  status.final.json  end.json  report.html  summary.json
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrl.errors import EnvironmentFault

__all__ = ["RunDir", "publish", "publish_text"]


@contextmanager
def publish(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success fsync it and rename it to ``path`` (atomic on one file system)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        yield temporary
        os.chmod(temporary, mode)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write ``text`` to ``path`` so that a reader sees either nothing or all of it."""
    with publish(path, mode) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


class RunDir:
    """Paths of one run. Creates nothing by itself except through :meth:`create`."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).resolve()

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def config(self) -> Path:
        return self.root / "config.resolved.yaml"

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def keys(self) -> Path:
        """One file per role, see ``keyfiles.py``."""
        return self.root / "keys"

    @property
    def database(self) -> Path:
        return self.root / "coordinator.db"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints"

    @property
    def manifests(self) -> Path:
        return self.root / "manifests"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    def model(self, version: str) -> Path:
        """The trained weights of ``version`` as a Hugging Face directory."""
        return self.root / "model" / version

    def adapter(self, version: str) -> Path:
        """The trained LoRA adapter of ``version`` as a PEFT directory."""
        return self.root / "adapter" / version

    @property
    def failures(self) -> Path:
        return self.root / "failures"

    @property
    def stop(self) -> Path:
        """The launcher's request to the trainer: write a checkpoint and end. Holds the reason."""
        return self.root / "stop"

    @property
    def job(self) -> Path:
        """The id of the Slurm job that runs it, or ran it last; absent for a run on one machine."""
        return self.root / "job"

    @property
    def trained(self) -> Path:
        """What the trainer reached, written as its last act: the proof that a run which ended also succeeded."""
        return self.root / "trained.json"

    @property
    def restarted(self) -> Path:
        """When the MPI world died or the job started again (s since 1970), until the first trained step after it; by the launcher."""
        return self.root / "restarted"

    @property
    def requeues(self) -> Path:
        """``JOB COUNT``: how often the launcher put its job back into the queue."""
        return self.root / "requeues"

    @property
    def final_status(self) -> Path:
        return self.root / "status.final.json"

    @property
    def end(self) -> Path:
        """How the run ended: ``{"state", "reason", "started_at", "ended_at"}``; absent while it runs."""
        return self.root / "end.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def logs(self, role: str) -> Path:
        return self.root / "logs" / role

    def create(self) -> None:
        """Make the directory and its folders (mode 0700: the token and transcripts are the owner's alone)."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in (self.endpoints, self.manifests, self.shards, self.checkpoints, self.metrics, self.artifacts):
            folder.mkdir(exist_ok=True)

    def secret(self) -> str:
        """The run's secret. Raises EnvironmentFault when it cannot be read."""
        try:
            return self.token.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise EnvironmentFault(
                f"cannot read the run's token {self.token}: {error.strerror}; is the run directory on a file system "
                "shared by all nodes of the job?"
            ) from error

    def endpoint(self, role: str) -> str | None:
        """The URL announced by ``role`` (for example ``coordinator``), or None while there is none."""
        try:
            return (self.endpoints / role).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def announce(self, role: str, url: str) -> None:
        """Announce ``role``'s URL to the others."""
        publish_text(self.endpoints / role, url + "\n", 0o600)
