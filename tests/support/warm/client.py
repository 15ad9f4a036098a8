"""``python -S client.py MODULE ARGUMENTS``: as ``python -m MODULE ARGUMENTS``, run by the server at `ADDRESS`."""

import array
import json
import os
import signal
import socket
import sys

#: environment variable: the server's socket
ADDRESS = "EAGLE_TRACE_TEST_WARM"


def main() -> None:
    """Hand the job over and wait for its end."""
    job = {"argv": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 (light start)
    data = json.dumps(job).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        connection.sendmsg(
            [len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        )
        connection.sendall(data)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: connection.send(bytes([number])))
        status = connection.recv(4)
    code = int.from_bytes(status, "big", signed=True) if len(status) == 4 else 70
    if code < 0:
        if -code != signal.SIGKILL:  # which has no handler to put back
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
