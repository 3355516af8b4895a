"""Host services, as the coordinator and vLLM are: a port on the loopback, an abstract socket, a socket in /tmp."""

from __future__ import annotations

import os
import socket
from typing import Any

TRY = """python3 -c '
import socket
for family, where in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_UNIX, chr(0) + "hpcrl-hostile"), (socket.AF_UNIX, "PATH")):
    try:
        socket.socket(family).connect(where)
        print("REACHED", where)
    except OSError as error:
        print("refused", error.errno)
'"""


def test_nothing_is_reached(attack: Any) -> None:
    path = str(attack.base / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        for one, name in ((abstract, "\0hpcrl-hostile"), (named, path)):
            one.bind(name)
            one.listen()
        os.chmod(path, 0o777)
        got = attack.run(TRY.replace("PORT", str(port.getsockname()[1])).replace("PATH", path))
    assert "REACHED" not in got.output and got.output.count("refused") == 3
