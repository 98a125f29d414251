"""Two ends of one TCP connection: ``peer.py serve`` and ``peer.py ADDRESS``, which reads numbers of bytes to send.

For each number it prints the seconds until the other end had them all.
"""

import socket
import sys
import time

PORT = 5001


def serve() -> None:
    # Where gloo would listen.
    with socket.create_server((socket.gethostbyname(socket.gethostname()), PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while head := connection.recv(8, socket.MSG_WAITALL):
                left = int.from_bytes(head, "big")
                while left:
                    left -= len(connection.recv(min(left, 2**20)))
                connection.sendall(b"x")


def send(address: str) -> None:
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print("ready", flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            connection.sendall(int(line).to_bytes(8, "big") + bytes(int(line)))
            connection.recv(1)
            print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else send(sys.argv[1])
