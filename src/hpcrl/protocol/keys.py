"""Bearer keys. Everything is derived from the run's secret by HMAC-SHA256, downwards only: no key tells anything of another.

    run's secret ─┬─► role key of worker, scorer, trainer, inference, admin      opens the coordinator's routes of that role
                  └─► proxy secret ─┬─► attempt keys                             open model calls of one attempt
                                    └─► records key                              opens the proxies' records of ended attempts

An *attempt key* joins model calls to an attempt: it names the attempt, its bound policy version, the replica, and whether later
versions may answer it, so that a proxy can check it without asking anybody. Who holds which: ``keyfiles.py``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Literal, NamedTuple, cast, get_args

from hpcrl.errors import UserError
from hpcrl.protocol.version import PolicyVersion

__all__ = [
    "AttemptKey",
    "Pin",
    "Role",
    "new_secret",
    "proxy_secret",
    "read_attempt_key",
    "records_key",
    "role_key",
    "same_key",
    "sign_attempt_key",
]

Role = Literal["worker", "scorer", "trainer", "inference", "admin"]


Pin = Literal["trajectory", "turn", "token"]
"""How long an attempt stays with one version: see ``weights.pin``."""


class AttemptKey(NamedTuple):
    """Who calls, and what may answer: with pin ``trajectory`` only ``policy_version``, else that or a later one of its lineage."""

    attempt_id: str
    policy_version: str
    replica_id: str
    pin: Pin = "trajectory"

    def allows(self, version: str) -> bool:
        """Whether a token of ``version`` may become part of the attempt."""
        if self.pin == "trajectory":
            return version == self.policy_version
        bound = PolicyVersion.parse(self.policy_version)
        try:
            found = PolicyVersion.parse(version)
        except UserError:  # an engine's name for weights that were never published
            return False
        return found.lineage == bound.lineage and found.step >= bound.step


def new_secret() -> str:
    """A fresh run secret: 256 random bits, URL-safe text."""
    return secrets.token_urlsafe(32)


def _mac(secret: str, text: str) -> str:
    digest = hmac.new(secret.encode(), text.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def role_key(secret: str, role: Role) -> str:
    """The bearer key of a role."""
    return _mac(secret, f"role:{role}")


def proxy_secret(secret: str) -> str:
    """What the coordinator and the proxies share, and nobody else."""
    return _mac(secret, "proxies")


def records_key(proxies: str) -> str:
    """The workers' key for records, from the proxy secret."""
    return _mac(proxies, "records")


def sign_attempt_key(proxies: str, key: AttemptKey) -> str:
    """The API key given to a harness: readable by the proxies of this run, forgeable by nobody without the proxy secret."""
    body = base64.urlsafe_b64encode("\n".join(key).encode()).decode().rstrip("=")
    return f"sk-{body}.{_mac(proxies, 'attempt:' + body)}"


def read_attempt_key(proxies: str, text: str) -> AttemptKey | None:
    """The key's content, or None when it was not signed with this proxy secret."""
    body, dot, mac = text.removeprefix("sk-").partition(".")
    if not dot or not same_key(mac, _mac(proxies, "attempt:" + body)):
        return None
    parts = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)).decode().split("\n")
    if len(parts) != 4 or parts[3] not in get_args(Pin):
        return None
    return AttemptKey(parts[0], parts[1], parts[2], cast(Pin, parts[3]))


def same_key(given: str, expected: str) -> bool:
    """Constant-time comparison."""
    return hmac.compare_digest(given.encode(), expected.encode())
