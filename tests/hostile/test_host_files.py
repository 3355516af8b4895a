"""The host's files, environment and processes."""

from __future__ import annotations

import os
from typing import Any


def test_nothing_is_seen(attack: Any) -> None:
    secret = attack.base / "secret"
    secret.write_text("host secret")
    os.environ["HPCRL_SECRET"] = "host secret"
    try:
        got = attack.run(
            f"cat {secret} /proc/1/environ /proc/[0-9]*/environ; env; cat {os.path.expanduser('~')}/.bashrc; ls /sys; "
            f"find / -name secret -not -path '/proc/*' 2>/dev/null; ls -d {attack.base} {os.getcwd()}"
        )
    finally:
        del os.environ["HPCRL_SECRET"]
    assert "host secret" not in got.output
    assert f"cannot access '{attack.base}'" in got.output and f"cannot access '{os.getcwd()}'" in got.output
