"""Bearer keys. Everything is derived from the run's secret (``token`` in the run directory, mode 0600) by HMAC-SHA256.

A *role key* opens the coordinator's routes of that role. An *attempt key* joins model calls to an attempt: it names the attempt,
its bound policy version and the replica, so that a proxy can check it without asking anybody.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Literal, NamedTuple

__all__ = ["AttemptKey", "Role", "new_secret", "read_attempt_key", "role_key", "same_key", "sign_attempt_key"]

Role = Literal["worker", "scorer", "trainer", "inference", "admin"]


class AttemptKey(NamedTuple):
    attempt_id: str
    policy_version: str
    replica_id: str


def new_secret() -> str:
    """A fresh run secret: 256 random bits, URL-safe text."""
    return secrets.token_urlsafe(32)


def _mac(secret: str, text: str) -> str:
    digest = hmac.new(secret.encode(), text.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def role_key(secret: str, role: Role) -> str:
    """The bearer key of a role."""
    return _mac(secret, f"role:{role}")


def sign_attempt_key(secret: str, key: AttemptKey) -> str:
    """The API key given to a harness: readable by the proxies of this run, forgeable by nobody without the secret."""
    body = base64.urlsafe_b64encode("\n".join(key).encode()).decode().rstrip("=")
    return f"sk-{body}.{_mac(secret, 'attempt:' + body)}"


def read_attempt_key(secret: str, text: str) -> AttemptKey | None:
    """The key's content, or None when it was not signed with this secret."""
    body, dot, mac = text.removeprefix("sk-").partition(".")
    if not dot or not same_key(mac, _mac(secret, "attempt:" + body)):
        return None
    parts = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)).decode().split("\n")
    return AttemptKey(*parts) if len(parts) == 3 else None


def same_key(given: str, expected: str) -> bool:
    """Constant-time comparison."""
    return hmac.compare_digest(given.encode(), expected.encode())
