"""A stand-in for vLLM, found by ``python -m vllm.entrypoints.openai.api_server`` when this folder comes first in PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FOLDER"]

FOLDER = Path(__file__).parent
"""For PYTHONPATH."""
