"""The real init binary, driven over its socket as an ordinary process; every test runs with the sanitizer build too."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import select
import signal
import socket
import stat
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from dsec.model.files import BatchKind, BatchOp, FileType, TreePiece, TreeTag
from dsec.wire import guest
from dsec.wire.guest import Frame, Kind

NATIVE = Path(__file__).parents[2] / "native"
PATIENCE = 20.0
ENV = (b"PATH=/usr/local/bin:/usr/bin:/bin", b"LC_ALL=C")
# A descriptor becomes number 3, whatever it was, and nothing else is inherited.
LAUNCH = 'fd=$1; shift; exec 3<&"$fd"; [ "$fd" = 3 ] || exec {fd}<&-; exec "$@"'
M = TypeVar("M", bound=guest.Message)


def build(target: str) -> Path:
    subprocess.run(["make", "-s", "-C", str(NATIVE), target], check=True, capture_output=True, timeout=300)
    return NATIVE / target


@pytest.fixture(scope="session", params=["build/init", "build/asan/init"], ids=["plain", "asan"])
def binary(request: pytest.FixtureRequest) -> Path:
    return build(request.param)


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Wait for a condition; whether it came true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@dataclass
class Ended:
    """What an exec gave: STARTED, all DATA, EXIT."""

    started: guest.Started
    exit: guest.ExitStatus
    stdout: bytes
    stderr: bytes

    @property
    def outcome(self) -> tuple[int, int, int]:
        return self.exit.how, self.exit.code, self.exit.reason


@dataclass
class Init:
    """A running init."""

    process: subprocess.Popen[bytes]
    address: str
    logs: Path

    def connect(self, *, hello: bool = True) -> Engine:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE)
        sock.connect(self.address)
        engine = Engine(sock)
        if hello:
            engine.send(guest.Hello(), 0)
            engine.take(0, guest.Welcome)
        return engine

    def assert_well(self) -> None:
        """It lives, answers, and no sanitizer has spoken in it or its children."""
        assert self.process.poll() is None, f"init ended with {self.process.returncode}"
        with self.connect() as engine:
            engine.send(guest.Ping(b"well?"), 7)
            assert engine.take(7, guest.Pong).data == b"well?"
        assert self.complaints() == ""

    def complaints(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.logs.glob("san.*")))


@dataclass
class Engine:
    """A minimal engine: one connection, frames kept per arrival."""

    sock: socket.socket
    reader: guest.FrameReader = field(default_factory=guest.FrameReader)
    frames: deque[Frame] = field(default_factory=deque)
    channel: int = 100

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def fresh(self) -> int:
        self.channel += 1
        return self.channel

    def send(self, message: guest.Message, channel: int) -> int:
        self.sock.sendall(message.frame(channel))
        return channel

    def ask(self, message: guest.Message) -> int:
        """Send on a fresh channel; its number."""
        return self.send(message, self.fresh())

    def receive(self, seconds: float = PATIENCE) -> None:
        """More frames.  Raises: EOFError, TimeoutError."""
        if not select.select([self.sock], [], [], seconds)[0]:
            raise TimeoutError("init says nothing")
        data = self.sock.recv(1 << 18)
        if not data:
            raise EOFError
        self.frames += self.reader.feed(data)

    def next(self, channel: int, seconds: float = PATIENCE) -> Frame:
        """The next frame of a channel; those of others stay."""
        end = time.monotonic() + seconds
        while True:
            for index, frame in enumerate(self.frames):
                if frame.channel == channel:
                    del self.frames[index]
                    return frame
            self.receive(max(0.0, end - time.monotonic()))

    def take(self, channel: int, cls: type[M]) -> M:
        frame = self.next(channel)
        message = guest.decode_reply(frame)
        assert isinstance(message, cls), message
        return message

    def error(self, channel: int) -> tuple[int, int]:
        said = self.take(channel, guest.Error)
        return said.errno, said.code

    def credit(self, channel: int, count: int) -> None:
        if count:
            self.send(guest.Credit(count), channel)

    def ended(self, channel: int, started: guest.Started | None = None) -> Ended:
        """Everything of an exec until EXIT; consumed output is credited."""
        started = started or self.take(channel, guest.Started)
        out = {1: bytearray(), 2: bytearray()}
        begin = {1: started.stdout, 2: started.stderr}
        while True:
            frame = self.next(channel)
            if frame.kind != Kind.DATA:
                said = guest.decode_reply(frame)
                assert isinstance(said, guest.ExitStatus), said
                return Ended(started, said, bytes(out[1]), bytes(out[2]))
            offset, data = guest.split_output(frame.payload)
            assert offset == begin[frame.stream] + len(out[frame.stream])
            out[frame.stream] += data
            self.credit(channel, len(data))

    def run(self, *argv: str, **options: object) -> Ended:
        return self.ended(self.ask(command(*argv, **options)))

    def content(self, channel: int) -> bytes:
        """File bytes until the end bit."""
        got = bytearray()
        while True:
            frame = self.next(channel)
            assert frame.kind == Kind.DATA, guest.decode_reply(frame)
            got += frame.payload
            if frame.end:
                return bytes(got)
            self.credit(channel, len(frame.payload))

    def is_dropped(self) -> bool:
        """Init closes this connection."""
        with contextlib.suppress(ConnectionError, EOFError):
            while True:
                self.receive()
        return True


_next_id = iter(range(1, 1 << 30))


def command(*argv: str, **options: object) -> guest.Exec:
    """An EXEC with defaults; ``options`` replace fields."""
    fields: dict[str, object] = {
        "id": b"x%d" % next(_next_id),
        "argv": tuple(os.fsencode(a) for a in argv),
        "env": ENV,
        "cwd": b"/",
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": (),
        "flags": 0,
        "rows": 0,
        "cols": 0,
        "timeout_ms": 0,
        "keep": 65536,
        "nofile": 0,
        "credit": 1 << 20,
    }
    return guest.Exec(**{**fields, **options})  # type: ignore[arg-type]


@contextlib.contextmanager
def running(binary: Path, top: Path, *arguments: str, wrap: tuple[str, ...] = ()) -> Iterator[Init]:
    """Init on a socket of its own; told to stop at the end."""
    address = str(top / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(8)
        environment = {
            "ASAN_OPTIONS": f"detect_leaks=0:log_path={top}/san",
            "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={top}/san",
        }
        process = subprocess.Popen(
            ["bash", "-c", LAUNCH, "-", str(listener.fileno()), *wrap, str(binary), *arguments],
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            cwd="/",
        )
    init = Init(process, address, top)
    try:
        yield init
        assert init.complaints() == ""
    finally:
        process.terminate() if not wrap else process.kill()
        try:
            process.wait(10)
        finally:
            process.kill()


@pytest.fixture
def init(binary: Path, tmp_path: Path) -> Iterator[Init]:
    with running(binary, tmp_path) as started:
        yield started


@pytest.fixture
def engine(init: Init) -> Iterator[Engine]:
    with init.connect() as connected:
        yield connected


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory for files of a test, away from the socket."""
    path = tmp_path / "home"
    path.mkdir()
    return path


# --- execs -------------------------------------------------------------------------------------------------------


def test_exit_code_output_and_counts(engine: Engine) -> None:
    ended = engine.run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ended.outcome, ended.stdout, ended.stderr) == ((0, 7, 0), b"out\n", b"err\n")
    assert (ended.exit.stdout_bytes, ended.exit.stderr_bytes) == (4, 4)
    assert ended.exit.wall_ns > 0
    assert ended.exit.max_rss_kib > 100
    assert ended.started.pid > 1
