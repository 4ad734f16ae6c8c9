"""Raw socket throughput of this machine's loopback: the denominator of the demo's lower bound."""

from __future__ import annotations

import socket
import threading
import time

BLOCK_NBYTES = 4 << 20


def measure_loopback(duration_s: float = 1.0) -> float:
    """Bytes per second from one thread to another through 127.0.0.1; plain sendall and recv_into, nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5.0)
        sender = threading.Thread(target=_send, args=(server.getsockname(), duration_s), name="loopback")
        sender.start()
        connection, _ = server.accept()
        block, num_received = bytearray(BLOCK_NBYTES), 0
        start_s = time.monotonic()
        with connection:
            while got := connection.recv_into(block):
                num_received += got
        elapsed_s = time.monotonic() - start_s
        sender.join()
    return num_received / elapsed_s


def _send(address: tuple[str, int], duration_s: float) -> None:
    block = bytes(BLOCK_NBYTES)
    with socket.create_connection(address) as connection:
        deadline_s = time.monotonic() + duration_s
        while time.monotonic() < deadline_s:
            connection.sendall(block)
