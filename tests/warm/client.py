"""Stands for a Python interpreter that has imported torch already.

Takes a script, `-m module` or `-c code` as `python` does, has server.py fork a process that runs it
with the streams, files, folder and environment of this one, and ends as that process ends. Signals
are passed on, and that process is killed when this one is. A copy of this file lies beside the
socket of the server, with the interpreter in its first line.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def open_files() -> list[int]:
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (pathlib takes 20 ms)
        try:
            os.fstat(number)
        except OSError:
            continue  # that of the folder itself
        found.append(number)
    return sorted(found)


def main() -> None:
    files = open_files()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    server.connect(os.path.join(os.path.dirname(os.path.realpath(__file__)), "socket"))  # noqa: PTH118, PTH120
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    request = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),  # noqa: PTH109
        "environment": dict(os.environ),
        "files": files,
    }
    socket.send_fds(server, [json.dumps(request).encode()], files)
    status = int(server.recv(100) or 1)
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
