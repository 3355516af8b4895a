"""Each role finds its own keys, and only what it needs."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import get_args

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.protocol.client import Client
from hpcrl.protocol.keyfiles import issue_keys, read_keys
from hpcrl.protocol.keys import AttemptKey, Role, read_attempt_key, records_key, role_key, sign_attempt_key
from hpcrl.protocol.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    issue_keys(run)
    return run


def test_every_role_has_a_file_that_only_its_user_can_read(run: RunDir) -> None:
    assert sorted(path.name for path in run.keys.iterdir()) == sorted(get_args(Role))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (*run.keys.iterdir(), run.token)}
    assert modes == {0o600}
    assert stat.S_IMODE(run.keys.stat().st_mode) == 0o700


def test_a_file_holds_the_roles_own_keys_and_no_others(run: RunDir) -> None:
    texts = {role: (run.keys / role).read_text() for role in get_args(Role)}
    for role in get_args(Role):
        key = role_key(run.secret(), role)
        assert [name for name, text in texts.items() if key in text] == [role]
        assert run.secret() not in texts[role]
        assert read_keys(run, role).coordinator == key
    proxies = read_keys(run, "inference").proxies
    assert [role for role, text in texts.items() if proxies in text] == ["inference"]
    attempt = AttemptKey("a", "0.1", "r0")
    assert read_attempt_key(proxies, sign_attempt_key(proxies, attempt)) == attempt
    assert read_keys(run, "worker").records == records_key(proxies)


def test_issuing_again_changes_nothing(run: RunDir) -> None:
    before = {path.name: path.read_text() for path in (*run.keys.iterdir(), run.token)}
    issue_keys(run)
    assert {path.name: path.read_text() for path in (*run.keys.iterdir(), run.token)} == before


def test_a_role_needs_its_own_file_alone(run: RunDir) -> None:
    for path in (run.token, *(run.keys / role for role in get_args(Role) if role != "scorer")):
        path.unlink()
    Client(run, "scorer").close()
    with pytest.raises(EnvironmentFault, match=r"cannot read the worker's keys .*keys/worker: No such file"):
        Client(run, "worker")
    (run.keys / "worker").write_text("{")
    with pytest.raises(EnvironmentFault, match="holds no keys"):
        Client(run, "worker")
