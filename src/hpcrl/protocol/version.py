"""``PolicyVersion``: the name of exactly one set of weights.

``L.S`` is lineage and step. A run starts at lineage 0; every resume starts a new lineage at the checkpoint's step, so the
steps of a lost lineage are never reused and a version names one set of weights for ever.
"""

from __future__ import annotations

from typing import NamedTuple

from hpcrl.errors import UserError

__all__ = ["PolicyVersion"]


class PolicyVersion(NamedTuple):
    """``PolicyVersion(lineage=0, step=7)``, written ``0.7``. Orders by lineage, then step."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read ``"L.S"``. Raises UserError for anything else."""
        lineage, dot, step = text.partition(".")
        if not (dot and lineage.isdecimal() and step.isdecimal()):
            raise UserError(f"{text!r} is not a policy version: expected LINEAGE.STEP, for example 0.7")
        return cls(int(lineage), int(step))
