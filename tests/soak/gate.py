"""A gate before a server: passes connections on, and now and then behaves as networks do."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from typing import Literal

_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)

Trouble = Literal["resets", "503", "stands still"]


class Gate:
    """Listens on a port of its own; `trouble` makes all connections suffer for some seconds."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._listens = socket.create_server(("127.0.0.1", 0))
        self._trouble: tuple[Trouble, float] = ("503", 0.0)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self._listens.getsockname()[1]}"

    def trouble(self, kind: Trouble, seconds: float) -> None:
        """From now on, for so long."""
        self._trouble = (kind, time.monotonic() + seconds)

    def close(self) -> None:
        """Accept nobody any more."""
        self._listens.shutdown(socket.SHUT_RDWR)
        self._listens.close()

    @property
    def _now(self) -> Trouble | None:
        kind, until_s = self._trouble
        return kind if time.monotonic() < until_s else None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listens.accept()
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self._now == "503":
                client.recv(1 << 16)
                client.sendall(_BUSY)
                return
            with socket.create_connection(self._server) as server:
                self._pump(client, server)

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in ready.select():
                    while self._now == "stands still":
                        time.sleep(0.05)
                    if self._now == "resets":
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        return
                    data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)
