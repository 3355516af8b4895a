"""Light packages stay light at run time too, and the two commands of the README exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIGHT = (
    *(
        "config",
        "protocol",
        "metrics",
        "trajectory",
        "sandbox",
        "harness",
        "scoring",
        "coordinator",
        "launch",
        "report",
    ),
    *("cli", "devcluster"),
)


@pytest.mark.parametrize("package", LIGHT)
def test_importing_all_of_a_light_package_loads_no_heavy_library(package: str) -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module('hpcrl.{package}')\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(sorted({'torch', 'vllm', 'mpi4py', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["quickstart", "test", "setup", "lint", "install-apptainer"])
def test_tools_are_executable_and_valid_shell(name: str) -> None:
    path = ROOT / "tools" / name
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)
