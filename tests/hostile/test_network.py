"""Host services: a port on the loopback, an abstract socket."""

from __future__ import annotations

import socket
from typing import Any

TRY = """python3 -c '
import socket
for family, where in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_UNIX, chr(0) + "hpcrl-hostile")):
    try:
        socket.socket(family).connect(where)
        print("REACHED", where)
    except OSError as error:
        print("refused", error.errno)
'"""


def test_nothing_is_reached(attack: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0hpcrl-hostile")
        abstract.listen()
        got = attack.run(TRY.replace("PORT", str(port.getsockname()[1])))
    assert "REACHED" not in got.output and got.output.count("refused") == 2
