"""Who holds which key: one file per role under ``keys/`` of the run directory, mode 0600, written when the run is created.

    token           the run's secret              read by the coordinator alone
    keys/worker     its role key, records key     keys/trainer     its role key
    keys/scorer     its role key                  keys/inference   its role key, proxy secret
    keys/admin      opens every route             launcher and ``hpcrl`` commands

A role reads its own file and nothing else, so a worker's mistake or a key that leaks from one role's log or memory cannot score, give
batches out or publish. What this does not do: all roles of a job run as one user, and a program that runs as that user outside a
sandbox can read every file here. Agents and tests are kept away by the sandbox, which has neither the run directory nor the
environment of its worker; with ``sandbox.backend: process`` nothing keeps them away.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import get_args

from hpcrl.errors import EnvironmentFault
from hpcrl.protocol.keys import Role, new_secret, proxy_secret, records_key, role_key
from hpcrl.protocol.rundir import RunDir, publish_text

__all__ = ["RoleKeys", "issue_keys", "read_keys"]


@dataclass(frozen=True, slots=True)
class RoleKeys:
    """``coordinator``: the role key. ``proxies``: the proxy secret (inference only). ``records``: the records key (worker only)."""

    coordinator: str
    proxies: str = ""
    records: str = ""


def issue_keys(run: RunDir) -> None:
    """Write the files of all roles, and the secret first where the run has none yet. Raises OSError."""
    if not run.token.exists():
        publish_text(run.token, new_secret() + "\n", 0o600)
    secret = run.secret()
    proxies = proxy_secret(secret)
    run.keys.mkdir(mode=0o700, exist_ok=True)
    for role in get_args(Role):
        keys = RoleKeys(
            coordinator=role_key(secret, role),
            proxies=proxies if role == "inference" else "",
            records=records_key(proxies) if role == "worker" else "",
        )
        publish_text(run.keys / role, json.dumps(asdict(keys)) + "\n", 0o600)


def read_keys(run: RunDir, role: Role) -> RoleKeys:
    """The role's own keys. Raises EnvironmentFault when they cannot be read."""
    path = run.keys / role
    try:
        return RoleKeys(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot read the {role}'s keys {path}: {error.strerror}; is the run directory on a file system shared by all nodes of "
            "the job, and the file this user's?"
        ) from error
    except (ValueError, TypeError) as error:
        raise EnvironmentFault(
            f"{path} holds no keys: {error}; it is written when the run is created or resumed"
        ) from error
