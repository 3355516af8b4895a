"""What every role process does around its work: read the configuration, set up logging, leave one readable reason when it fails.

A failure is written to ``failures/`` in the run directory before the process exits; the launcher reports the earliest one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrl.config import RunConfig, load_config
from hpcrl.errors import EnvironmentFault, HpcrlError
from hpcrl.protocol.rundir import RunDir, publish_text

__all__ = ["bounded", "record_failure", "role_main"]


def role_main(
    role: str, work: Callable[[RunDir, RunConfig, argparse.Namespace], None], parser: argparse.ArgumentParser
) -> None:
    """Run ``work`` with ``--run-dir`` parsed and the resolved configuration loaded.

    Returns normally on success. On any error the reason is recorded and the exception goes on (a raising MPI rank must reach
    ``python -m mpi4py``, which aborts the world); errors of hpcrl itself end with their exit code.
    """
    parser.add_argument("--run-dir", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run, job = RunDir(args.run_dir), getattr(args, "job", None)
    try:
        work(run, load_config(run.config), args)
    except HpcrlError as error:
        record_failure(run, role, str(error), error.exit_code, job)
        print(f"hpcrl {role}: {error}", file=sys.stderr, flush=True)
        traceback.print_exc()
        raise SystemExit(error.exit_code) from error
    except Exception as error:  # the one recording point: whatever it was, its reason must reach the user
        record_failure(run, role, f"{type(error).__name__}: {error}", job=job)
        raise


@contextmanager
def bounded(run: RunDir, role: str, seconds: float, reason: str) -> Iterator[None]:
    """End the whole process with ``reason`` recorded when the body takes longer: for calls that can hang and cannot be interrupted."""

    def give_up() -> None:
        record_failure(run, role, reason, EnvironmentFault.exit_code)
        print(f"hpcrl {role}: {reason}", file=sys.stderr, flush=True)
        os._exit(EnvironmentFault.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def record_failure(run: RunDir, role: str, reason: str, exit_code: int = 1, job: str | None = None) -> None:
    """Leave ``reason`` in the run directory (best effort: the directory itself may be what failed).

    The launcher does not start a role again whose ``exit_code`` is that of wrong input or of a lacking machine. ``job``: it joined the
    run from a job of its own, and its end is no reason of the run's.
    """
    node, pid = socket.gethostname(), os.getpid()
    entry = {"role": role, "node": node, "pid": pid, "at": time.time(), "exit_code": exit_code, "reason": reason}
    try:
        path = (
            run.failures / "joined" / f"{role}-{node}-j{job}-{pid}.json"
            if job
            else run.failures / f"{role}-{node}-{pid}.json"
        )
        publish_text(path, json.dumps(entry) + "\n")
    except OSError as error:
        print(f"hpcrl {role}: cannot record the failure in {run.root}: {error}", file=sys.stderr, flush=True)
