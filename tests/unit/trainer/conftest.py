"""One compute thread: tests run beside others, and OpenMP threads that wait for a busy core are slower than none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
