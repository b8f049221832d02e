"""Runs in a sandbox and attacks what is around it: `hostile.py ATTACK ARGUMENT…`. It goes as far as it is let."""

import os
import socket
import sys
import time
from collections.abc import Callable

MIB = 2**20


def bomb(*_: str) -> None:
    """Every process makes more processes, until no more are given."""
    try:
        while True:
            os.fork()
    except OSError:
        time.sleep(600)


def read(*paths: str) -> None:
    """Print what other people's files hold."""
    for path in paths:
        try:
            with open(path, "rb") as secret:
                sys.stdout.buffer.write(secret.read())
        except OSError as error:
            print(f"{path}: {error.strerror}", file=sys.stderr)


def fill(most: str) -> None:
    """Fill the disk."""
    written = 0
    with open("filler", "wb", buffering=0) as filler:
        try:
            while written < int(most) * MIB:
                written += filler.write(bytes(MIB))
            os.fsync(filler.fileno())
        except OSError as error:
            print(error.strerror, file=sys.stderr)
    print(written // MIB)


def memory(most: str) -> None:
    """Take all memory."""
    taken = []
    for number in range(int(most)):
        taken.append(b"x" * MIB)
        print(number + 1, flush=True)


def connect(port: str, *hosts: str) -> None:
    """Talk to somebody."""
    for host in hosts:
        try:
            with socket.create_connection((host, int(port)), timeout=2) as somebody:
                somebody.sendall(b"secret")
                print(f"{host}: connected")
        except OSError as error:
            print(f"{host}: {error.strerror or error}", file=sys.stderr)


ATTACKS: dict[str, Callable[..., None]] = {
    "bomb": bomb,
    "read": read,
    "fill": fill,
    "memory": memory,
    "connect": connect,
}

if __name__ == "__main__":
    ATTACKS[sys.argv[1]](*sys.argv[2:])
