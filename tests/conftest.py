"""Which tests may run at the same time (``tools/test``): two processes, and what starts the same kind of real part is never in both."""

from __future__ import annotations

import pytest

_GROUPS = ("vllm", "slurm")
"""Modules with one of these marks run one after another, in this order of preference; the longest come first. Others: by module."""


def _group(item: pytest.Item) -> str:
    module = item.getparent(pytest.Module)
    assert module is not None
    marks = {mark.name for mark in module.iter_markers()}
    return next((name for name in _GROUPS if name in marks), module.nodeid)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("numprocesses", None):
        return
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: _GROUPS.index(groups[item]) if groups[item] in _GROUPS else len(_GROUPS))
