"""Measurements of the parts against their baselines: ``hpcrl bench weights``."""

from __future__ import annotations

__all__: list[str] = []
