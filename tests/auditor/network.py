"""A network between client and auditor that a test can cut: by resetting connections, or by silence."""

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Network:
    """Forwards 127.0.0.1:port to `target`. up: bytes flow; silent: connections stay, nothing arrives; down: reset."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._state, self._closing = "up", False
        self.forwarded = 0
        self._thread = threading.Thread(target=self._run, name="network")
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def set(self, state: str) -> None:
        self._state = state

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._reset_all()
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            if self._state == "down":
                self._reset_all()
            if self._state == "silent":
                threading.Event().wait(0.02)  # the kernel's buffers fill, as those of a router would not
                continue
            for key, _ in self._selector.select(0.02):
                end = key.fileobj
                assert isinstance(end, socket.socket)
                if end is self._listener:
                    self._accept()
                elif end in self._peers:
                    self._forward(end)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        if self._state == "down":
            near.close()
            return
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        try:
            content = end.recv(1 << 16)
            if content:
                self._peers[end].sendall(content)
                self.forwarded += len(content)
                return
        except OSError:
            pass
        self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        for one in (end, self._peers.get(end)):
            if one is not None and self._peers.pop(one, None) is not None:
                self._selector.unregister(one)
                with suppress(OSError):
                    one.close()

    def _reset_all(self) -> None:
        for end in list(self._peers):
            self._drop(end)


@contextmanager
def network(target: str) -> Iterator[Network]:
    running = Network(target)
    try:
        yield running
    finally:
        running.close()
