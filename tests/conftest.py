"""Two parts that may run at the same time (``tools/test``): modules that start vLLM, and the others.

Within a part tests run one after another, so that never two vLLMs' tests compete, nor two development clusters of one name.
"""

from __future__ import annotations

import signal

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=["vllm", "others"], help="only the modules that are marked vllm, or only the others"
    )


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("part")
    if part is None:
        return
    kept = [item for item in items if (part == "vllm") == _starts_vllm(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _starts_vllm(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    return module is not None and any(mark.name == "vllm" for mark in module.iter_markers())
