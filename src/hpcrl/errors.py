"""The error tree of hpcrl.

    HpcrlError                  anything hpcrl itself refuses or reports; str(error) is one readable line
    ├── UserError               bad input: named thing, what is allowed, what to do        (exit code 2)
    │   └── ConfigError         the run configuration
    ├── EnvironmentFault        the machine or site lacks something hpcrl needs            (exit code 3)
    ├── RunError                a run ended without success; the first cause               (exit code 1)
    ├── InfraError              node, network, container start, engine, verifier crash: no score, retried
    ├── PolicyError             the agent broke or timed out its own sandbox: scored
    └── DataError               a record is incomplete or corrupt: no score, retried

The last three are the failure vocabulary of a rollout (see protocol/states.py). They are raised inside a role and
recorded in one place, as data; an infrastructure failure is never a reward.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DataError",
    "EnvironmentFault",
    "HpcrlError",
    "InfraError",
    "PolicyError",
    "RunError",
    "UserError",
]


class HpcrlError(Exception):
    """Base of all errors that hpcrl raises on purpose. ``str(error)`` is one line for a person."""

    exit_code = 1


class UserError(HpcrlError):
    """Input that cannot be accepted: says what was given, what is allowed and what to do."""

    exit_code = 2


class ConfigError(UserError):
    """A run configuration that cannot be accepted; names the key."""


class EnvironmentFault(HpcrlError):
    """Something outside hpcrl is missing or unusable (Apptainer, user namespaces, Slurm, PMI, a shared directory)."""

    exit_code = 3


class RunError(HpcrlError):
    """A run ended without success. The message is the first cause."""


class _Failure(HpcrlError):
    """A failure of one attempt: ``reason`` is a short snake_case word for counting, the message is for reading."""

    kind = ""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason


class InfraError(_Failure):
    """The infrastructure failed. Never a reward; the rollout is tried again under a new attempt."""

    kind = "infra"


class PolicyError(_Failure):
    """The agent caused it. The attempt ends and is scored as it stands."""

    kind = "policy"


class DataError(_Failure):
    """A record is incomplete or inconsistent. No score; the rollout is tried again under a new attempt."""

    kind = "data"
