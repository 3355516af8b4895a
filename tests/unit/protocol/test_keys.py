"""Bearer keys: derived from the run's secret, forgeable by nobody without it."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.protocol.keys import AttemptKey, Pin, new_secret, read_attempt_key, role_key, same_key, sign_attempt_key

KEY = AttemptKey("g000012-r3-a0", "0.7", "replica1")


def test_a_key_reads_back_with_its_secret_only() -> None:
    text = sign_attempt_key("secret", KEY)
    assert text.startswith("sk-")
    assert read_attempt_key("secret", text) == KEY
    assert read_attempt_key("other", text) is None


@pytest.mark.parametrize("pin", ["trajectory", "turn", "token"])
def test_a_key_says_which_versions_may_answer(pin: Pin) -> None:
    key = read_attempt_key("secret", sign_attempt_key("secret", KEY._replace(pin=pin)))
    assert key is not None
    allowed = [version for version in ("0.6", "0.7", "0.8", "0.10", "1.7", "1.8", "none") if key.allows(version)]
    assert allowed == (["0.7"] if pin == "trajectory" else ["0.7", "0.8", "0.10"])


def test_the_same_key_is_made_again() -> None:
    """A restarted coordinator hands out what the proxies and harnesses already know."""
    assert sign_attempt_key("secret", KEY) == sign_attempt_key("secret", KEY)
    assert sign_attempt_key("secret", KEY) != sign_attempt_key("secret", KEY._replace(attempt_id="g000012-r3-a1"))


def test_a_changed_body_is_refused() -> None:
    body, _, mac = sign_attempt_key("secret", KEY).removeprefix("sk-").partition(".")
    forged = base64.urlsafe_b64encode("\n".join(KEY._replace(policy_version="0.8")).encode()).decode().rstrip("=")
    assert forged != body
    assert read_attempt_key("secret", f"sk-{forged}.{mac}") is None


def test_every_changed_character_is_refused() -> None:
    text = sign_attempt_key("secret", KEY)
    for place in range(
        3, len(text) - 1
    ):  # the last character of base64 carries unused bits of the MAC's text, tested apart
        other = "A" if text[place] != "A" else "B"
        assert read_attempt_key("secret", text[:place] + other + text[place + 1 :]) is None, place


@given(st.text(max_size=60))
def test_rubbish_is_no_key_and_no_error(text: str) -> None:
    assert read_attempt_key("secret", text.encode("utf-8", "replace").decode()) is None


@pytest.mark.parametrize("text", ["", "sk-", "sk-.", "sk-a.b", "sk-é.é", "..", "sk-" + "A" * 10_000])
def test_malformed_keys_are_none(text: str) -> None:
    assert read_attempt_key("secret", text) is None


def test_roles_and_attempts_have_different_keys() -> None:
    keys = [role_key("secret", role) for role in ("worker", "scorer", "trainer", "inference", "admin")]
    assert len(set(keys)) == 5
    assert role_key("other", "worker") not in keys
    assert all(read_attempt_key("secret", key) is None for key in keys)


def test_secrets_are_long_and_fresh() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert min(map(len, secrets)) >= 43


def test_comparison() -> None:
    assert same_key("a", "a")
    assert not same_key("a", "b")
    assert not same_key("a", "")
    assert not same_key("é", "e")
