"""Run one command in an attempt's sandbox, for programs of a ``command`` harness: ``$HPCRL_EXEC 'ls -l'``, or with ``-c`` before it.

Prints what the command printed and ends with its exit code; 125 when there is no sandbox any more. Started by path, with the standard
library only: it is a child of somebody else's program and must start fast.
"""

from __future__ import annotations

import os
import socket
import sys
from http.client import HTTPConnection

__all__ = ["main"]

_NO_SANDBOX = 125


class _Unix(HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["HPCRL_SANDBOX"])


def main(arguments: list[str]) -> int:
    """One command; gives its exit code."""
    words = arguments[1:] if arguments[:1] == ["-c"] else arguments
    if not words or "HPCRL_SANDBOX" not in os.environ:
        sys.stderr.write("usage: $HPCRL_EXEC COMMAND, below a command harness (HPCRL_SANDBOX is set there)\n")
        return 2
    connection = _Unix("sandbox")
    try:
        connection.request("POST", "/run", " ".join(words).encode("utf-8", "surrogateescape"))
        response = connection.getresponse()
        body = response.read()
    except OSError as error:
        sys.stderr.write(f"no sandbox at {os.environ['HPCRL_SANDBOX']}: {error}\n")
        return _NO_SANDBOX
    if response.status != 200:
        sys.stderr.buffer.write(body + b"\n")
        return _NO_SANDBOX
    sys.stdout.buffer.write(body)
    return int(response.headers["X-Exit-Code"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
