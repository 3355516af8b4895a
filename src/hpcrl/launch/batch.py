"""Entry point of slurm/launch_hetjob.sh: ``python -m hpcrl.launch.batch CONFIG [--set K=V]… [--run-dir DIR] | --resume DIR``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from hpcrl.config import RunConfig, load_config
from hpcrl.errors import HpcrlError
from hpcrl.launch.job import launch_slurm, new_run_dir
from hpcrl.protocol.rundir import RunDir, publish_text


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch_hetjob.sh", description="Run hpcrl in this heterogeneous job.")
    parser.add_argument("config", nargs="?", help="run configuration (YAML)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a configuration key")
    parser.add_argument("--run-dir", type=Path, help="run directory (default: a fresh one under run.dir)")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="continue this run from its last checkpoint")
    args = parser.parse_args()
    if (args.config is None) == (args.resume is None):
        parser.error("give either a configuration or --resume RUN_DIR")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        root, config, resume = _what(args)
        print(f"run directory: {root}{' (continued)' if resume else ''}", flush=True)
        launch_slurm(root, config, resume=resume)
        _note(config).unlink(missing_ok=True)  # only success is final: Slurm may start any other job again
    except HpcrlError as error:
        print(f"hpcrl: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error


def _what(args: argparse.Namespace) -> tuple[Path, RunConfig, bool]:
    """Run directory, configuration, whether to continue. A job that Slurm starts again (a requeue, preemption) finds its own run."""
    if args.resume is not None:
        return args.resume.resolve(), load_config(RunDir(args.resume).config, args.set), True
    config = load_config(args.config, args.set)
    restarted = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
    note = _note(config)
    if args.run_dir is not None:
        root = args.run_dir.resolve()
    elif restarted and note.exists():
        root = Path(note.read_text(encoding="utf-8"))
    else:
        root = new_run_dir(config)
        publish_text(note, str(root))
    if restarted and RunDir(root).config.exists():
        return root, load_config(RunDir(root).config), True
    return root, config, False


def _note(config: RunConfig) -> Path:
    """Where a job keeps which run is its own."""
    return Path(config.run.dir) / f".job-{os.environ.get('SLURM_JOB_ID')}"


if __name__ == "__main__":
    main()
