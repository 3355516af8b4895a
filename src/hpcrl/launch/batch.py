"""Entry point of slurm/launch_hetjob.sh: ``python -m hpcrl.launch.batch CONFIG [--set K=V]… [--run-dir DIR] | --resume DIR``."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from hpcrl.config import load_config
from hpcrl.errors import HpcrlError
from hpcrl.launch.job import launch_slurm, new_run_dir
from hpcrl.protocol.rundir import RunDir


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
        config = load_config(args.config or RunDir(args.resume).config, args.set)
        root = args.resume or args.run_dir or new_run_dir(config)
        print(f"run directory: {Path(root).resolve()}", flush=True)
        launch_slurm(Path(root), config, resume=args.resume is not None)
    except HpcrlError as error:
        print(f"hpcrl: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()
