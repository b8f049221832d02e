"""The real init binary, driven over its socket as an ordinary process; every test runs with the sanitizer build too."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import random
import resource
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
        said = "".join(path.read_text(errors="replace") for path in sorted(self.logs.glob("san.*")))
        return said if "runtime error" in said or "Sanitizer" in said else ""


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
    with socket.socket(socket.AF_UNIX) as listener, (top / "san.stderr").open("wb") as errors:
        listener.bind(address)
        listener.listen(8)
        environment = {
            "ASAN_OPTIONS": f"detect_leaks=0:log_path={top}/san",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        process = subprocess.Popen(
            ["bash", "-c", LAUNCH, "-", str(listener.fileno()), *wrap, str(binary), *arguments],
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
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


def test_exec_reports_what_killed_it_and_what_never_started(engine: Engine, home: Path) -> None:
    assert engine.run("sh", "-c", "kill -TERM $$").outcome == (1, signal.SIGTERM, 0)
    assert engine.run("/does/not/exist").outcome == (2, 2, 0)
    assert engine.run("no-such-command").outcome == (2, 2, 0)
    assert engine.run("true", cwd=b"/does/not/exist").outcome == (2, 2, 0)
    (home / "plain").write_text("x")
    assert engine.run(str(home / "plain")).outcome == (2, 13, 0)
    found = engine.run("plain", env=(b"PATH=" + os.fsencode(home),))
    assert found.outcome == (2, 13, 0)


def test_command_starts_clean(engine: Engine) -> None:
    """Default signals, its own session, no descriptor but 0, 1, 2, umask 022, exactly the given environment."""
    script = (
        "import os,signal;"
        "print([s for s in range(1,65) if s not in (9,19,32,33) and signal.getsignal(s) is not None"
        " and signal.getsignal(s) == signal.SIG_IGN and s not in (13,25)],"
        " signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getsid(0)==os.getpid()==os.getpgid(0),"
        " sorted(int(f) for f in os.listdir('/proc/self/fd'))[:-1], oct(os.umask(0)), os.read(0, 1))"
    )
    got = engine.run("/usr/bin/env", "-i", "python3", "-S", "-c", script)
    assert got.stdout == b"[] set() True [0, 1, 2] 0o22 b''\n"
    ignored = engine.run("sh", "-c", "grep SigIgn /proc/self/status")
    assert int(ignored.stdout.split()[1], 16) == 0
    assert engine.run("env", env=(b"A=1", b"B=x y")).stdout == b"A=1\nB=x y\n"
    assert engine.run("sh", "-c", "ulimit -n", nofile=77).stdout == b"77\n"
    assert engine.run("pwd", cwd=b"/usr").stdout == b"/usr\n"


@pytest.mark.needs_root
def test_command_becomes_its_user_and_holds_no_capability(engine: Engine) -> None:
    got = engine.run(
        "sh", "-c", "id -u; id -g; id -G; grep Cap /proc/self/status", uid=12345, gid=23456, groups=(7, 8)
    )
    lines = got.stdout.decode().split("\n")
    assert lines[:3] == ["12345", "23456", "23456 7 8"]
    sets = dict(line.split() for line in lines[3:] if line)
    assert {sets[f"Cap{name}:"] for name in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    assert engine.run("sh", "-c", "kill -9 $PPID", uid=12345, gid=1).exit.code != 0


DAEMON = (
    "import os, time\n"
    "for _ in range(3):\n  if os.fork(): os._exit(0)\n  os.setsid()\n"
    "os.fork()\nos.fork()\ntime.sleep(600)"
)


@pytest.mark.parametrize(
    "script",
    [
        "sleep 600",
        "trap '' TERM HUP INT; while :; do sleep 600; done",
        "(setsid sh -c 'trap \"\" TERM HUP; sleep 600 & sleep 600') & (sleep 600 &) ; sleep 600",
        f"python3 -c '{DAEMON}'; sleep 600",
    ],
    ids=["plain", "ignoring", "setsid", "daemon"],
)
def test_timeout_ends_the_whole_tree_first(engine: Engine, home: Path, script: str) -> None:
    marker = f"DSEC_MARK={home}"
    got = engine.run("sh", "-c", script, timeout_ms=300, env=(*ENV, marker.encode()))
    assert got.outcome == (1, signal.SIGKILL, 1)
    assert marked(marker) == []


def marked(text: str) -> list[int]:
    """Processes with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_fork_bomb_ends_at_its_timeout(engine: Engine, home: Path) -> None:
    marker = f"DSEC_MARK={home}"
    bomb = "ulimit -u 400; f() { f | f & }; f; sleep 60"
    got = engine.run("bash", "-c", bomb, timeout_ms=500, env=(*ENV, marker.encode()), uid=54321, gid=1)
    assert got.outcome == (1, signal.SIGKILL, 1)
    assert marked(marker) == []


def test_background_process_outlives_the_command_and_delays_nothing(engine: Engine, home: Path) -> None:
    got = engine.run(
        "sh", "-c", f"(while :; do echo tick; sleep 0.05; done; echo) & echo $! > {home}/pid; echo done"
    )
    assert got.outcome == (0, 0, 0)
    assert b"done\n" in got.stdout
    pid = int((home / "pid").read_text())
    time.sleep(0.3)  # long enough to die of SIGPIPE, if nobody drained
    os.kill(pid, signal.SIGKILL)


def test_background_flood_does_not_hold_up_the_exit(engine: Engine, home: Path) -> None:
    got = engine.run("sh", "-c", f"yes & echo $! > {home}/pid; sleep 0.1")
    assert got.outcome == (0, 0, 0)
    os.kill(int((home / "pid").read_text()), signal.SIGKILL)


def test_binary_output_of_100_mb_is_exact(engine: Engine) -> None:
    script = (
        "import sys,hashlib,random\nr=random.Random(5)\nh=hashlib.sha256()\n"
        "for i in range(100):\n  b=r.randbytes(1<<20); h.update(b); sys.stdout.buffer.write(b)\n"
        "sys.stderr.write(h.hexdigest())"
    )
    channel = engine.ask(command("python3", "-c", script, keep=1000))
    digest, count, offset, error = hashlib.sha256(), 0, 0, b""
    engine.take(channel, guest.Started)
    while (frame := engine.next(channel)).kind == Kind.DATA:
        at, data = guest.split_output(frame.payload)
        if frame.stream == 1:
            assert at == offset
            digest.update(data)
            offset += len(data)
        else:
            error += data
        engine.credit(channel, len(data))
        count += len(data)
    assert guest.decode_reply(frame).code == 0  # type: ignore[attr-defined]
    assert offset == 100 << 20
    assert error.decode() == digest.hexdigest()


def test_stalled_reader_isolates_nobody_else(engine: Engine) -> None:
    stalled = engine.ask(command("sh", "-c", "yes", credit=1000))
    engine.take(stalled, guest.Started)
    got = 0
    while got < 1000:
        got += len(guest.split_output(engine.next(stalled).payload)[1])
    assert got == 1000
    for _ in range(5):
        assert engine.run("echo", "hi").stdout == b"hi\n"
    with pytest.raises(TimeoutError):
        engine.next(stalled, 0.1)
    engine.credit(stalled, 500)
    assert len(guest.split_output(engine.next(stalled).payload)[1]) <= 500


def test_engine_that_reads_nothing_stops_the_output_not_init(init: Init) -> None:
    with init.connect() as engine:
        engine.ask(command("yes", id=b"flood", credit=0xFFFFFFFF))
        for number in range(2000):
            with contextlib.suppress(BlockingIOError):
                engine.sock.setblocking(False)
                engine.send(guest.Ping(b"x" * 1000), 100_000 + number)
        time.sleep(0.3)
        status = Path(f"/proc/{init.process.pid}/status").read_text()
        rss = int(status.split("VmRSS:")[1].split()[0])
        assert rss < (200_000 if "asan" in str(init.process.args) else 8_000)
    with init.connect() as engine:
        assert engine.run("echo", "hi").stdout == b"hi\n"
        channel = engine.ask(guest.Signal(b"flood", 9, 2))
        engine.take(channel, guest.Ok)
    init.assert_well()


def test_stdin_is_delivered_with_backpressure_and_end(engine: Engine) -> None:
    channel = engine.ask(command("sh", "-c", "sleep 0.2; sha256sum", flags=guest.ExecFlag.STDIN))
    started = engine.take(channel, guest.Started)
    blob = random.Random(1).randbytes(1 << 20)
    window, at = guest.INITIAL_CREDIT, 0
    while at < len(blob):
        while window == 0:
            window += engine.take(channel, guest.Credit).bytes
        n = min(window, 65536, len(blob) - at)
        engine.sock.sendall(guest.encode_data(channel, blob[at : at + n]))
        at, window = at + n, window - n
    engine.sock.sendall(guest.encode_data(channel, b"", end=True))
    while window < guest.INITIAL_CREDIT:
        window += engine.take(channel, guest.Credit).bytes
    assert window == guest.INITIAL_CREDIT
    ended = engine.ended(channel, started)
    assert ended.stdout.split()[0].decode() == hashlib.sha256(blob).hexdigest()


def test_input_nobody_reads_is_credited_back(engine: Engine) -> None:
    channel = engine.ask(command("sh", "-c", "exec 0<&-; sleep 0.5", flags=guest.ExecFlag.STDIN))
    engine.take(channel, guest.Started)
    time.sleep(0.1)
    engine.sock.sendall(guest.encode_data(channel, b"x" * guest.INITIAL_CREDIT))
    assert engine.take(channel, guest.Credit).bytes == guest.INITIAL_CREDIT


def test_more_input_than_granted_drops_the_connection(init: Init) -> None:
    with init.connect() as engine:
        channel = engine.ask(command("sleep", "5", flags=guest.ExecFlag.STDIN, timeout_ms=5000))
        engine.take(channel, guest.Started)
        with contextlib.suppress(ConnectionError):
            for _ in range(3):
                engine.sock.sendall(guest.encode_data(channel, b"x" * 200_000))
        assert engine.is_dropped()
    init.assert_well()


def test_terminal_with_size_input_and_resize(engine: Engine) -> None:
    channel = engine.ask(
        command("bash", "--norc", "-i", id=b"tty", flags=3, rows=24, cols=80, timeout_ms=20_000)
    )
    started = engine.take(channel, guest.Started)
    engine.sock.sendall(
        guest.encode_data(channel, b"stty size; tty; trap 'stty size; exit 3' WINCH; echo rea''dy\n")
    )
    seen = b""
    while b"ready\r\n" not in seen:
        frame = engine.next(channel)
        if frame.kind == Kind.DATA:
            assert frame.stream == 1
            seen += guest.split_output(frame.payload)[1]
    assert b"24 80\r\n" in seen
    assert b"/dev/pts/" in seen
    engine.take(engine.ask(guest.Winsize(b"tty", 50, 132)), guest.Ok)
    with contextlib.suppress(TimeoutError):
        while (frame := engine.next(channel, 0.5)).kind == Kind.CREDIT:
            pass
        engine.frames.appendleft(frame)
    engine.sock.sendall(guest.encode_data(channel, b"\n"))
    rest = b""
    while (frame := engine.next(channel)).kind in (Kind.DATA, Kind.CREDIT):
        rest += frame.payload[8:] if frame.kind == Kind.DATA else b""
    ended = guest.decode_reply(frame)
    assert isinstance(ended, guest.ExitStatus)
    assert (ended.how, ended.code) == (0, 3)
    assert b"50 132\r\n" in rest
    assert started.pid > 0
    assert engine.error(engine.ask(guest.Winsize(b"tty", 1, 1)))[0] == 3


def test_terminal_output_is_whole_and_end_of_input_ends_cat(engine: Engine) -> None:
    got = engine.run("seq", "1", "20000", flags=1)
    assert got.stdout == b"".join(b"%d\r\n" % n for n in range(1, 20001))
    channel = engine.ask(command("cat", flags=3, timeout_ms=10_000))
    started = engine.take(channel, guest.Started)
    engine.sock.sendall(guest.encode_data(channel, b"abc\n") + guest.encode_data(channel, b"", end=True))
    assert engine.take(channel, guest.Credit).bytes == 4
    assert engine.ended(channel, started).outcome == (0, 0, 0)
    assert engine.error(engine.ask(guest.Winsize(b"x1", 1, 1)))[0] in (3, 25)


def test_attach_after_reconnect_continues_at_an_offset(init: Init) -> None:
    with init.connect() as engine:
        channel = engine.ask(
            command("sh", "-c", "echo first; sleep 0.5; echo second; exit 4", id=b"long", credit=3)
        )
        engine.take(channel, guest.Started)
        assert guest.split_output(engine.next(channel).payload) == (0, b"fir")
    with init.connect() as engine:
        channel = engine.ask(guest.Attach(b"long", 3, 0, 1 << 20))
        ended = engine.ended(channel)
        assert ended.started.stdout == 3
        assert (ended.stdout, ended.exit.code) == (b"st\nsecond\n", 4)
        again = engine.ended(engine.ask(guest.Attach(b"long", 0, 0, 1 << 20)))
        assert again.stdout == b"first\nsecond\n"
        assert engine.error(engine.ask(guest.Attach(b"long", 99, 0, 1)))[1] == guest.ErrorCode.MALFORMED
        assert engine.error(engine.ask(guest.Attach(b"never", 0, 0, 1))) == (3, guest.ErrorCode.UNKNOWN_EXEC)


def test_detached_output_keeps_the_last_bytes_and_shows_the_gap(engine: Engine) -> None:
    channel = engine.ask(command("sh", "-c", "seq 1 100000; sleep 0.3", id=b"gap", keep=1000, credit=10))
    engine.take(channel, guest.Started)
    engine.send(guest.Close(), channel)
    time.sleep(0.2)
    whole = b"".join(b"%d\n" % n for n in range(1, 100_001))
    ended = engine.ended(engine.ask(guest.Attach(b"gap", 0, 0, 1 << 20)))
    assert ended.started.stdout == len(whole) - 1000
    assert ended.stdout == whole[-1000:]
    assert ended.exit.stdout_bytes == len(whole)


def test_second_channel_replaces_the_first(engine: Engine) -> None:
    first = engine.ask(command("sleep", "30", id=b"two"))
    engine.take(first, guest.Started)
    second = engine.ask(guest.Attach(b"two", 0, 0, 0))
    assert engine.error(first) == (104, 0)
    started = engine.take(second, guest.Started)
    engine.take(engine.ask(guest.Signal(b"two", signal.SIGKILL, 2)), guest.Ok)
    assert engine.ended(second, started).outcome == (1, 9, 2)


def test_id_is_never_used_twice(engine: Engine) -> None:
    engine.run("true", id=b"once")
    assert engine.error(engine.ask(command("true", id=b"once"))) == (17, 0)
    engine.take(engine.ask(guest.Forget(b"once")), guest.Ok)
    assert engine.error(engine.ask(command("true", id=b"once"))) == (17, 0)
    assert engine.error(engine.ask(guest.Forget(b"once"))) == (3, guest.ErrorCode.UNKNOWN_EXEC)


def test_list_and_forget(engine: Engine) -> None:
    engine.run("sh", "-c", "echo x; exit 5", id=b"done")
    running_channel = engine.ask(command("sleep", "30", id=b"runs"))
    engine.take(running_channel, guest.Started)
    rows = {row.id: row for row in engine.take(engine.ask(guest.ListExecs()), guest.Execs).rows}
    assert (rows[b"done"].state, rows[b"done"].code, rows[b"done"].stdout_bytes) == (1, 5, 2)
    assert (rows[b"runs"].state, rows[b"runs"].how) == (0, 0)
    assert abs(rows[b"runs"].started_ns - time.time_ns()) < 60e9
    assert engine.error(engine.ask(guest.Forget(b"runs")))[0] == 16
    engine.take(engine.ask(guest.Signal(b"runs", signal.SIGTERM, 0)), guest.Ok)
    assert guest.decode_reply(engine.next(running_channel)) is not None
    assert until(lambda: engine_state(engine, b"runs") == 1)
    engine.take(engine.ask(guest.Forget(b"runs")), guest.Ok)
    assert [row.id for row in engine.take(engine.ask(guest.ListExecs()), guest.Execs).rows] == [b"done"]


def engine_state(engine: Engine, id: bytes) -> int:
    rows = engine.take(engine.ask(guest.ListExecs()), guest.Execs).rows
    return next(row.state for row in rows if row.id == id)


def test_signals_by_scope(engine: Engine) -> None:
    for scope, reason in ((0, 0), (1, 0), (2, 2)):
        id = b"scope%d" % scope
        channel = engine.ask(command("sleep", "30", id=id))
        started = engine.take(channel, guest.Started)
        engine.take(engine.ask(guest.Signal(id, signal.SIGKILL, scope)), guest.Ok)
        assert engine.ended(channel, started).outcome == (1, 9, reason)
        assert engine.error(engine.ask(guest.Signal(id, 9, scope))) == (3, 0)
    assert engine.error(engine.ask(guest.Signal(b"nobody", 9, 2))) == (3, guest.ErrorCode.UNKNOWN_EXEC)


def test_shift_moves_deadlines(engine: Engine) -> None:
    channel = engine.ask(command("sh", "-c", "sleep 0.6; echo late", timeout_ms=300))
    engine.take(engine.ask(guest.Shift(5000)), guest.Ok)
    ended = engine.ended(channel)
    assert (ended.outcome, ended.stdout) == ((0, 0, 0), b"late\n")


def test_shift_sent_before_the_thaw_counts(init: Init) -> None:
    with init.connect() as engine:
        channel = engine.ask(command("sleep", "0.5", timeout_ms=200))
        started = engine.take(channel, guest.Started)
        os.kill(init.process.pid, signal.SIGSTOP)
        time.sleep(0.4)
        shift = engine.ask(guest.Shift(5000))
        os.kill(init.process.pid, signal.SIGCONT)
        engine.take(shift, guest.Ok)
        assert engine.ended(channel, started).outcome == (0, 0, 0)


def test_newer_connection_replaces_the_older(init: Init) -> None:
    with init.connect() as old, init.connect() as new:
        assert old.is_dropped()
        assert new.run("echo", "x").stdout == b"x\n"


def test_ten_thousand_orphans_are_reaped(init: Init) -> None:
    script = "import os\nfor i in range(100):\n  if os.fork()==0:\n    for j in range(100):\n      if os.fork()==0: os._exit(0)\n    os._exit(0)\n"
    with init.connect() as engine:
        assert engine.run("python3", "-S", "-c", script).exit.code == 0
        assert until(lambda: engine.take(engine.ask(guest.Usage()), guest.UsageIs).processes == 0)
        assert engine.take(engine.ask(guest.Usage()), guest.UsageIs).user_us > 0
    children = Path(f"/proc/{init.process.pid}/task/{init.process.pid}/children")
    # A monitor may wait for the next command, for a second.
    assert not children.exists() or until(lambda: children.read_text() == "")


def test_monitor_killed_by_the_sandbox_root_means_all_die(init: Init, home: Path) -> None:
    marker = f"DSEC_MARK={home}"
    env = (*ENV, marker.encode())
    with init.connect() as engine:
        bystander = engine.ask(command("sleep", "60", env=env))
        engine.take(bystander, guest.Started)
        channel = engine.ask(command("sh", "-c", "kill -9 $PPID; sleep 60", timeout_ms=500, env=env))
        assert engine.ended(channel).outcome == (1, 9, 3)
        assert engine.ended(bystander, guest.Started(0, 0, 0)).outcome == (1, 9, 3)
        assert marked(marker) == []
        assert engine.run("true").outcome == (0, 0, 0)
        lost = engine.run("sh", "-c", "sleep 0.2; kill -9 $PPID; sleep 0.1; exit 6")
        assert lost.outcome == (0, 6, 0)


def test_terminating_init_ends_everything_below(binary: Path, tmp_path: Path) -> None:
    marker = f"DSEC_MARK={tmp_path}"
    with running(binary, tmp_path) as init:
        with init.connect() as engine:
            engine.take(
                engine.ask(command("sh", "-c", "setsid sleep 60 & sleep 60", env=(*ENV, marker.encode()))),
                guest.Started,
            )
            assert until(lambda: len(marked(marker)) >= 3)
        init.process.terminate()
        init.process.wait(10)
        assert marked(marker) == []


def test_commands_do_not_outlive_a_killed_init(binary: Path, tmp_path: Path) -> None:
    marker = f"DSEC_MARK={tmp_path}"
    with running(binary, tmp_path) as init:
        with init.connect() as engine:
            script = "trap '' TERM; setsid sleep 60 & sleep 60"
            channel = engine.ask(command("sh", "-c", script, env=(*ENV, marker.encode())))
            engine.take(channel, guest.Started)
            assert until(lambda: len(marked(marker)) >= 3)
        init.process.kill()
        init.process.wait(10)
        assert until(lambda: marked(marker) == [])


@pytest.mark.needs_root
def test_pid_1_of_a_namespace(binary: Path, tmp_path: Path) -> None:
    wrap = ("unshare", "-pf", "--mount-proc", "--kill-child")
    with running(binary, tmp_path, "--pidns", "--oom", "500", wrap=wrap) as init:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE)
        sock.connect(init.address)
        with Engine(sock) as engine:
            engine.send(guest.Hello(), 0)
            welcome = engine.take(0, guest.Welcome)
            assert (welcome.pid, welcome.flags) == (1, 1)
            assert engine.run("cat", "/proc/self/oom_score_adj").stdout == b"500\n"
            assert (
                engine.run("sh", "-c", "kill -TERM 1; kill -HUP 1; kill -9 1; sleep 0.1; echo alive").stdout
                == b"alive\n"
            )
            keep = engine.ask(command("sleep", "60"))
            engine.take(keep, guest.Started)
            killer = "kill -9 $PPID; setsid sleep 60 & sleep 60"
            assert engine.run("sh", "-c", killer, timeout_ms=300).outcome == (1, 9, 3)
            assert engine.ended(keep, guest.Started(0, 0, 0)).outcome == (1, 9, 3)
            assert engine.take(engine.ask(guest.Usage()), guest.UsageIs).processes == 0
            assert engine.run("echo", "x").stdout == b"x\n"


@pytest.mark.needs_root
def test_scoped_commands_cannot_signal_init_or_monitor(binary: Path, tmp_path: Path) -> None:
    script = "kill -9 $PPID; kill -9 {init}; sleep 0.1; echo alive"
    with running(binary, tmp_path, "--scope-signals") as init:
        if not until(lambda: init.process.poll() is not None, 0.2):
            with init.connect() as engine:
                got = engine.run("sh", "-c", script.format(init=init.process.pid))
                assert got.stdout == b"alive\n"
                assert got.stderr.count(b"not permitted") == 2
                assert engine.run("sleep", "60", timeout_ms=200).outcome == (1, 9, 1)
                assert engine.ended(engine.ask(command("seq", "3"))).stdout == b"1\n2\n3\n"
        else:
            assert init.process.returncode == 3, "without signal scopes init refuses to start"


def test_exec_arguments_out_of_range(engine: Engine) -> None:
    for wrong in (
        command("true", env=(b"novalue",)),
        command(id=b"noargv"),
        command("true", keep=1 << 40),
        command("true", timeout_ms=1 << 50),
    ):
        assert engine.error(engine.ask(wrong)) == (22, guest.ErrorCode.MALFORMED)
    assert engine.error(engine.ask(guest.Signal(b"x", 99, 0))) == (22, guest.ErrorCode.MALFORMED)
    large = command("sh", "-c", 'echo "${#1}"', "-", "x" * 100_000, env=(*ENV, b"V=" + b"y" * 90_000))
    assert engine.ended(engine.ask(large)).stdout == b"100000\n"


def test_two_hundred_commands_at_once(engine: Engine) -> None:
    channels = [engine.ask(command("sh", "-c", f"echo {n}; exit {n}")) for n in range(200)]
    for n, channel in enumerate(channels):
        ended = engine.ended(channel)
        assert (ended.stdout, ended.exit.code) == (b"%d\n" % n, n)


# --- monitors that wait ------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """The children of a process, waiting monitors included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def late(message: guest.Exec, channel: int) -> bytes:
    """An EXEC whose STARTED may come late."""
    frame = bytearray(message.frame(channel))
    frame[-36] |= 4  # flags; rows, cols, timeout_ms, keep, nofile and credit follow
    return bytes(frame)


def parent(engine: Engine, **options: object) -> int:
    return int(engine.run("sh", "-c", "echo $PPID", **options).stdout)


def settled(engine: Engine, **options: object) -> int:
    """The monitor that takes one command after another.  It has the time to say that it waits."""
    before = parent(engine, **options)
    for _ in range(50):
        time.sleep(0.02)
        now = parent(engine, **options)
        if now == before:
            return now
        before = now
    raise AssertionError("no monitor takes a second command")


@pytest.mark.needs_root
def test_nothing_carries_over_from_one_command_of_a_monitor_to_the_next(binary: Path, tmp_path: Path) -> None:
    dirty = (
        "import os,resource,signal,sys\n"
        "os.umask(0o777); os.chdir('/tmp'); os.nice(5)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "open('/proc/self/oom_score_adj', 'w').write('900')\n"
        "print(os.getppid())"
    )
    clean = (
        "echo $PPID; id -u; id -g; id -G; umask; pwd; ulimit -n; ulimit -c; env | sort; nice;"
        "grep -E 'SigBlk|SigIgn|NoNewPrivs|Seccomp:' /proc/self/status; cat /proc/self/oom_score_adj;"
        "echo $(ls /proc/self/fd)"
    )
    other = {
        "uid": 12345,
        "gid": 23456,
        "groups": (7, 8),
        "cwd": b"/usr",
        "nofile": 99,
        "env": (*ENV, b"X=1"),
    }
    with running(binary, tmp_path, "--oom", "300") as init, init.connect() as engine:
        first = engine.run("sh", "-c", clean, nofile=64).stdout.decode().split("\n")
        monitor = settled(engine)
        own = Path(f"/proc/{monitor}/oom_score_adj").read_text()
        for options in (other, {}):
            time.sleep(0.05)
            assert int(engine.run("python3", "-S", "-c", dirty, **options).stdout) == monitor
            time.sleep(0.05)
            after = engine.run("sh", "-c", clean, nofile=64).stdout.decode().split("\n")
            assert (int(after[0]), after[1:]) == (monitor, first[1:])
        assert "300" in first
        assert own.strip() != "300"
        assert Path(f"/proc/{monitor}/oom_score_adj").read_text() == own
        assert Path(f"/proc/{monitor}/cwd").readlink() == Path("/")
        assert len(os.listdir(f"/proc/{monitor}/fd")) <= 3


def test_monitor_starts_every_command_clean(init: Init) -> None:
    with init.connect() as engine:
        monitor = settled(engine)
        test_command_starts_clean(engine)
        assert monitor in children(init.process.pid)


def test_scoped_commands_do_not_add_up(binary: Path, tmp_path: Path) -> None:
    """More than the 16 Landlock domains that a process can be in."""
    with running(binary, tmp_path, "--scope-signals") as init:
        if until(lambda: init.process.poll() is not None, 0.2):
            pytest.skip("this kernel cannot scope signals")
        with init.connect() as engine:
            monitor = settled(engine)
            for _ in range(20):
                time.sleep(0.01)
                got = engine.run("sh", "-c", "kill -9 $PPID || echo $PPID")
                assert got.stdout == b"%d\n" % monitor


def test_monitor_of_a_command_that_left_something_takes_no_other(init: Init, home: Path) -> None:
    with init.connect() as engine:
        monitor = settled(engine)
        time.sleep(0.05)
        got = engine.run("sh", "-c", f"echo $PPID; sleep 300 >/dev/null 2>&1 & echo $! > {home}/pid")
        assert int(got.stdout) == monitor
        orphan = int((home / "pid").read_text())
        assert until(lambda: orphan in children(init.process.pid))
        assert until(lambda: monitor not in children(init.process.pid))
        assert engine.run("sleep", "60", timeout_ms=100).outcome == (1, 9, 1)
        assert parent(engine) != monitor
        os.kill(orphan, signal.SIGKILL)


def test_waiting_monitor_that_is_killed_only_delays(init: Init) -> None:
    with init.connect() as engine:
        assert until(lambda: len(children(init.process.pid)) == 1)
        for _ in range(3):
            for pid in children(init.process.pid):
                os.kill(pid, signal.SIGKILL)
            assert until(lambda: children(init.process.pid) == [])
            assert engine.run("echo", "x").stdout == b"x\n"
            time.sleep(0.05)
    init.assert_well()


def test_waiting_monitors_are_few_uncounted_and_let_go(init: Init) -> None:
    with init.connect() as engine:
        for channel in [engine.ask(command("sleep", "0.3")) for _ in range(12)]:
            assert engine.ended(channel).outcome == (0, 0, 0)
        assert until(lambda: engine.take(engine.ask(guest.Usage()), guest.UsageIs).processes == 0)
        assert 1 <= len(children(init.process.pid)) <= 2
        used = engine.take(engine.ask(guest.Usage()), guest.UsageIs)
        assert until(lambda: children(init.process.pid) == [])
        later = engine.take(engine.ask(guest.Usage()), guest.UsageIs)
        assert later.user_us + later.system_us >= used.user_us + used.system_us > 0
        assert engine.run("echo", "x").stdout == b"x\n"


def test_large_commands_start_whether_or_not_a_monitor_waits(engine: Engine) -> None:
    for size in (10, 60_000, 70_000, 120_000, 5):
        got = engine.run("printf", "%s", "a" * size, env=(*ENV, b"B=" + b"b" * (size // 2)))
        assert got.stdout == b"a" * size
        time.sleep(0.02)


def test_identity_is_kept_across_terminal_input_and_plain_commands(engine: Engine) -> None:
    for flags in (0, 1, 2, 3, 0):
        got = engine.ask(command("sh", "-c", "test -t 1 && echo tty; exit 4", flags=flags))
        ended = engine.ended(got)
        assert (ended.outcome, b"tty" in ended.stdout) == ((0, 4, 0), bool(flags & 1))
        time.sleep(0.02)


def test_late_start_comes_with_what_follows(engine: Engine) -> None:
    for _ in range(3):
        channel = engine.fresh()
        engine.sock.sendall(late(command("sh", "-c", "echo out; exit 3"), channel))
        ended = engine.ended(channel)
        assert (ended.outcome, ended.stdout) == ((0, 3, 0), b"out\n")
        assert ended.started.pid > 1
    never = engine.fresh()
    engine.sock.sendall(late(command("/does/not/exist"), never))
    assert engine.take(never, guest.Started).pid == 0
    assert engine.ended(never, guest.Started(0, 0, 0)).outcome == (2, 2, 0)
    slow = engine.fresh()
    engine.sock.sendall(late(command("sleep", "60", id=b"slow"), slow))
    started = engine.take(slow, guest.Started)  # nothing else follows
    engine.take(engine.ask(guest.Signal(b"slow", signal.SIGTERM, 0)), guest.Ok)
    assert engine.ended(slow, started).outcome == (1, signal.SIGTERM, 0)
    attached = engine.fresh()
    engine.sock.sendall(late(command("sleep", "60", id=b"attached"), attached))
    engine.sock.sendall(guest.Attach(b"attached", 0, 0, 1000).frame(engine.fresh()))
    assert engine.take(engine.channel, guest.Started).pid > 1
    engine.take(engine.ask(guest.Signal(b"attached", 9, 2)), guest.Ok)


@pytest.mark.parametrize("scope", [0, 1, 2])
@pytest.mark.parametrize("flag", [0, 4])
def test_signal_that_comes_with_its_command(engine: Engine, scope: int, flag: int) -> None:
    """Before anybody was told of the start, with a monitor that waits and without."""
    for _ in range(3):
        message = command("sleep", "60")
        channel, answer = engine.fresh(), engine.fresh()
        frame = late(message, channel) if flag else message.frame(channel)
        engine.sock.sendall(frame + guest.Signal(message.id, 9, scope).frame(answer))
        engine.take(answer, guest.Ok)
        assert engine.ended(channel).outcome == (1, 9, 2 if scope == 2 else 0)


@pytest.mark.slow
def test_stopped_monitor_does_not_stop_a_timeout(init: Init, home: Path) -> None:
    marker = f"DSEC_MARK={home}"
    with init.connect() as engine:
        script = "kill -STOP $PPID; sleep 60"
        got = engine.run("sh", "-c", script, timeout_ms=100, env=(*ENV, marker.encode()))
        assert got.outcome == (1, signal.SIGKILL, 3)
        assert marked(marker) == []
        assert engine.run("echo", "x").stdout == b"x\n"


def test_unread_signals_leave_room_for_the_kill(init: Init) -> None:
    with init.connect() as engine:
        bystander = engine.ask(command("sleep", "60", id=b"bystander"))
        by = engine.take(bystander, guest.Started)
        channel = engine.ask(command("sh", "-c", "echo $PPID; exec sleep 60", id=b"flooded"))
        engine.take(channel, guest.Started)
        monitor = int(guest.split_output(engine.next(channel).payload)[1])
        os.kill(monitor, signal.SIGSTOP)
        refused = None
        for _ in range(1000):
            answer = engine.next(engine.ask(guest.Signal(b"flooded", signal.SIGURG, 0)))
            if answer.kind == Kind.ERROR:
                refused = guest.decode_reply(answer)
                break
        assert isinstance(refused, guest.Error)
        assert (refused.errno, refused.code) == (errno.EAGAIN, guest.ErrorCode.BOUND)
        engine.take(engine.ask(guest.Signal(b"flooded", 9, 2)), guest.Ok)
        os.kill(monitor, signal.SIGCONT)
        while (frame := engine.next(channel)).kind == Kind.DATA:
            pass
        said = guest.decode_reply(frame)
        assert isinstance(said, guest.ExitStatus)
        assert (said.how, said.code, said.reason) == (1, signal.SIGKILL, 2)  # 3: everybody had to die for it
        engine.take(engine.ask(guest.Signal(b"bystander", signal.SIGTERM, 0)), guest.Ok)
        assert engine.ended(bystander, by).outcome == (1, signal.SIGTERM, 0)


def test_killed_twice_is_killed_once(engine: Engine) -> None:
    """The monitor ends without having read the second order; its last report counts all the same."""
    for _ in range(30):
        message, channel = command("sleep", "60"), engine.fresh()
        started = engine.take(engine.send(message, channel), guest.Started)
        kills = [guest.Signal(message.id, 9, 2).frame(engine.fresh()) for _ in range(3)]
        engine.sock.sendall(b"".join(kills))
        assert engine.ended(channel, started).outcome == (1, 9, 2)


def test_kill_that_crosses_a_failed_start_is_not_for_the_next_command(init: Init) -> None:
    """The kill is on its way to the monitor when that says that there was nothing to start."""
    with init.connect() as engine:
        settled(engine)
        for _ in range(100):
            first, channel, answer = command("/does/not/exist"), engine.fresh(), engine.fresh()
            engine.sock.sendall(first.frame(channel) + guest.Signal(first.id, 9, 2).frame(answer))
            assert engine.ended(channel).outcome == (2, 2, 0)
            engine.take(answer, guest.Ok)
            assert engine.ended(engine.ask(command("sh", "-c", "exit 3"))).outcome == (0, 3, 0)


# --- files -------------------------------------------------------------------------------------------------------

ME = (os.getuid(), os.getgid())
USER = (4242, 4343)


def read(path: Path | bytes, offset: int = 0, length: int = 1 << 40, credit: int = 1 << 20) -> guest.Read:
    return guest.Read(*ME, os.fsencode(path), offset, length, credit)


def write_file(
    engine: Engine, path: Path | str, data: bytes, flags: int = 1, mode: int = 0o644, root: bytes = b""
) -> guest.EntryIs:
    """All of a WRITE, within the granted credit."""
    channel = engine.ask(guest.Write(*ME, os.fsencode(path), mode, flags, root))
    engine.take(channel, guest.Ok)
    window = guest.INITIAL_CREDIT
    view = memoryview(data)
    while True:
        n = min(len(view), 100_000)
        while window < n:
            window += engine.take(channel, guest.Credit).bytes
        engine.sock.sendall(guest.encode_data(channel, view[:n], end=n == len(view)))
        window -= n
        if n == len(view):
            break
        view = view[n:]
    while (frame := engine.next(channel)).kind == Kind.CREDIT:
        pass
    message = guest.decode_reply(frame)
    assert isinstance(message, guest.EntryIs), message
    return message


def refused(engine: Engine, message: guest.Message) -> tuple[int, int]:
    return engine.error(engine.ask(message))


def test_read_whole_part_and_past_the_end(engine: Engine, home: Path) -> None:
    blob = random.Random(2).randbytes(3_000_000)
    (home / "f").write_bytes(blob)
    channel = engine.ask(read(home / "f", credit=1000))
    entry = engine.take(channel, guest.EntryIs).entry
    assert (entry.name, entry.type, entry.size, entry.uid) == (
        str(home / "f"),
        FileType.FILE,
        len(blob),
        ME[0],
    )
    assert engine.content(channel) == blob
    for offset, length, want in (
        (5, 7, blob[5:12]),
        (len(blob) - 3, 99, blob[-3:]),
        (len(blob) + 9, 9, b""),
        (0, 0, b""),
    ):
        channel = engine.ask(read(home / "f", offset, length))
        engine.take(channel, guest.EntryIs)
        assert engine.content(channel) == want


def test_read_of_growing_shrinking_and_made_up_files(engine: Engine, home: Path) -> None:
    path = home / "grows"
    path.write_bytes(b"a" * 100_000)
    channel = engine.ask(read(path, credit=10))
    engine.take(channel, guest.EntryIs)
    with path.open("ab") as more:
        more.write(b"b" * 100_000)
    assert engine.content(channel) == b"a" * 100_000
    channel = engine.ask(read(path, credit=10))
    engine.take(channel, guest.EntryIs)
    os.truncate(path, 50)
    assert engine.content(channel) == b"a" * 50
    for name in (b"/proc/self/status", b"/proc/cpuinfo", b"/sys/kernel/mm/transparent_hugepage/enabled"):
        channel = engine.ask(read(name))
        engine.take(channel, guest.EntryIs)
        assert len(engine.content(channel)) > 10
    channel = engine.ask(read(b"/proc/cpuinfo", 0, 9))
    engine.take(channel, guest.EntryIs)
    assert engine.content(channel) == b"processor"


def test_only_regular_files_are_opened(engine: Engine, home: Path) -> None:
    os.mkfifo(home / "fifo")
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(home / "sock"))
        os.symlink("loop", home / "loop")
        os.symlink("/dev/zero", home / "zero")
        os.symlink("fifo", home / "to-fifo")
        for name in ("fifo", "sock", "zero", "to-fifo"):
            assert refused(engine, read(home / name))[1] == guest.ErrorCode.NOT_REGULAR, name
            wrong = guest.Write(*ME, os.fsencode(home / name), 0o644, 1, b"")
            assert refused(engine, wrong)[1] == guest.ErrorCode.NOT_REGULAR, name
        assert refused(engine, guest.Write(*ME, os.fsencode(home / "fifo"), 0, 17, b"")) == (6, 2)
    for name in (b"/dev/zero", b"/dev/null", b"/dev/ptmx"):
        assert refused(engine, read(name))[1] == guest.ErrorCode.NOT_REGULAR
    assert refused(engine, read(home)) == (21, 2)
    assert refused(engine, read(home / "loop")) == (40, 0)
    assert refused(engine, read(b"/proc/self/exe")) == (40, 0), "magic links lead out"
    assert refused(engine, read(b"/proc/self/root/etc/passwd")) == (40, 0)
    assert refused(engine, guest.Write(*ME, b"/proc/self/comm", 0, 0, b""))[1] == guest.ErrorCode.NOT_REGULAR
    assert refused(engine, read(home / "absent")) == (2, 0)
    assert refused(engine, guest.Read(*ME, b"x" * 5, 1 << 63, 0, 0)) == (22, 1)


def test_write_create_append_exclusive_and_mode(engine: Engine, home: Path) -> None:
    blob = random.Random(3).randbytes(2_000_000)
    entry = write_file(engine, home / "f", blob, mode=0o4751).entry
    assert (entry.size, entry.mode) == (len(blob), 0o4751)
    assert (home / "f").read_bytes() == blob
    write_file(engine, home / "f", b"short")
    assert (home / "f").read_bytes() == b"short"
    write_file(engine, home / "f", b"er", flags=guest.WriteFlag.APPEND)
    assert (home / "f").read_bytes() == b"shorter"
    create = guest.WriteFlag.CREATE
    assert refused(engine, guest.Write(*ME, os.fsencode(home / "no"), 0o644, 0, b"")) == (2, 0)
    assert refused(engine, guest.Write(*ME, os.fsencode(home / "f"), 0o644, create | 2, b"")) == (17, 0)
    assert refused(engine, guest.Write(*ME, os.fsencode(home / "a/b/c"), 0o644, create, b"")) == (2, 0)
    write_file(engine, home / "a/b/c", b"deep", flags=create | guest.WriteFlag.PARENTS)
    assert (home / "a/b/c").read_bytes() == b"deep"
    assert refused(engine, guest.Write(*ME, os.fsencode(home / "f"), 0o644, 4 | 16, b"")) == (22, 1)
    write_file(engine, home / "new", b"", flags=create | 2)
    assert (home / "new").read_bytes() == b""


def test_atomic_write_shows_old_or_new_and_leaves_no_trace(init: Init, home: Path) -> None:
    target = home / "f"
    target.write_text("old")
    atomic = guest.WriteFlag.CREATE | guest.WriteFlag.ATOMIC
    with init.connect() as engine:
        channel = engine.ask(guest.Write(*ME, os.fsencode(target), 0o600, atomic, b""))
        engine.take(channel, guest.Ok)
        engine.sock.sendall(guest.encode_data(channel, b"half"))
        assert engine.take(channel, guest.Credit).bytes == 4
        assert target.read_text() == "old"
        engine.send(guest.Close(), channel)
        engine.run("true")
        assert [p.name for p in home.iterdir()] == ["f"]
        write_file(engine, target, b"new", flags=atomic, mode=0o640)
        assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("new", 0o640)
        assert refused(engine, guest.Write(*ME, os.fsencode(target), 0o600, atomic | 2, b"")) == (17, 0)
        assert refused(engine, guest.Write(*ME, os.fsencode(home / "no"), 0o600, 16, b"")) == (2, 0)
        channel = engine.ask(guest.Write(*ME, os.fsencode(target), 0o600, atomic, b""))
        engine.take(channel, guest.Ok)
        assert len(list(home.iterdir())) == 2
    assert until(lambda: len(list(home.iterdir())) == 1), "a lost connection leaves no temporary file"


def test_write_beneath_a_root_never_leaves_it(engine: Engine, home: Path) -> None:
    root, outside = home / "root", home / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "f").write_text("safe")
    os.symlink("../outside", root / "out")
    os.symlink(str(outside / "f"), root / "link")
    fs_root = os.fsencode(root)
    write_file(engine, "a/b/f", b"x", flags=9, root=fs_root)
    assert (root / "a/b/f").read_bytes() == b"x"
    for path in ("../outside/f", "out/f", "link", "/etc/hosts", "a/../../outside/f", "out/new/deep"):
        for flags in (1, 9, 17, 25):
            if path == "link" and flags & 16:
                continue  # an atomic write replaces the link itself
            assert refused(engine, guest.Write(*ME, path.encode(), 0o644, flags, fs_root))[0] in (
                18,
                40,
                20,
                22,
            ), (path, flags)
    write_file(engine, "link", b"mine", flags=17, root=fs_root)
    assert (root / "link").read_bytes() == b"mine"
    assert (outside / "f").read_text() == "safe"
    assert [p.name for p in outside.iterdir()] == ["f"]


def test_write_beyond_a_limit_fails_typed_and_atomic_leaves_nothing(init: Init, home: Path) -> None:
    resource.prlimit(init.process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    with init.connect() as engine:
        for flags in (1, 17):
            channel = engine.ask(guest.Write(*ME, os.fsencode(home / f"f{flags}"), 0o644, flags, b""))
            engine.take(channel, guest.Ok)
            engine.sock.sendall(guest.encode_data(channel, b"x" * 99_000))
            engine.take(channel, guest.Credit)
            engine.sock.sendall(guest.encode_data(channel, b"x" * 99_000))
            engine.take(channel, guest.Credit)
            assert engine.error(channel) == (27, 0)
            engine.sock.sendall(guest.encode_data(channel, b"late is not wrong", end=True))
    assert [p.name for p in home.iterdir()] == ["f1"]
    init.assert_well()


@pytest.mark.needs_root
def test_ordinary_user_acts_as_itself_only(binary: Path, tmp_path: Path) -> None:
    for part in (tmp_path, *tmp_path.parents[:3]):
        part.chmod(part.stat().st_mode | 0o111)
    wrap = ("setpriv", f"--reuid={USER[0]}", f"--regid={USER[1]}", "--clear-groups")
    mine = tmp_path / "mine"
    mine.mkdir()
    os.chown(mine, *USER)
    own = {"uid": USER[0], "gid": USER[1]}
    with running(binary, tmp_path, "--scope-signals", wrap=wrap) as init, init.connect() as engine:
        assert engine.run("id", "-u", **own).stdout == b"4242\n"
        assert refused(engine, command("true")) == (1, 0)
        assert refused(engine, read(mine)) == (1, 0)
        assert refused(engine, guest.Tree(*ME, os.fsencode(mine), 9, 9, 9)) == (1, 0)
        engine.take(engine.ask(guest.Mkdir(*USER, os.fsencode(mine / "a/b"), 0o700, 1)), guest.Ok)
        engine.take(engine.ask(guest.RemoveAt(*USER, os.fsencode(mine / "a"), 1)), guest.Ok)
        got = engine.run("sh", "-c", "setsid sleep 60 & kill -9 $PPID; sleep 60", timeout_ms=300, **own)
        assert got.outcome == (1, 9, 1)
        assert until(lambda: engine.take(engine.ask(guest.Usage()), guest.UsageIs).processes == 0)
        assert "init" in Path(f"/proc/{init.process.pid}/comm").read_text()
        peek = engine.run("cat", f"/proc/{init.process.pid}/environ", f"/proc/{init.process.pid}/maps", **own)
        assert (peek.stdout, peek.exit.code) == (b"", 1)
        engine.run("true", **own)
        waiting = children(init.process.pid)
        assert waiting
        for pid in waiting:
            assert "monitor" in Path(f"/proc/{pid}/comm").read_text()
            script = (
                f"cat /proc/{pid}/maps /proc/{pid}/mem; ls /proc/{pid}/fd/; kill -9 {pid}; kill -STOP {pid}"
            )
            peek = engine.run("sh", "-c", f"cat /proc/$$/maps | wc -l; {script}", **own)
            assert int(peek.stdout) > 1  # what it may read of itself, and nothing else
        assert set(waiting) & set(children(init.process.pid))


def test_stat_follows_only_when_asked(engine: Engine, home: Path) -> None:
    (home / "f").write_bytes(b"12345")
    os.chmod(home / "f", 0o640)
    os.utime(home / "f", ns=(1, 1_234_567_890_123_456_789))
    os.symlink("f", home / "l")
    entry = engine.take(engine.ask(guest.Stat(*ME, os.fsencode(home / "l"), 1)), guest.EntryIs).entry
    assert (entry.type, entry.size, entry.mode, entry.mtime_ns) == (
        FileType.FILE,
        5,
        0o640,
        1_234_567_890_123_456_789,
    )
    assert entry.inode == (home / "f").stat().st_ino
    link = engine.take(engine.ask(guest.Stat(*ME, os.fsencode(home / "l"), 0)), guest.EntryIs).entry
    assert (link.type, link.target) == (FileType.SYMLINK, "f")
    assert refused(engine, guest.Stat(*ME, b"/absent", 1)) == (2, 0)
    null = engine.take(engine.ask(guest.Stat(*ME, b"/dev/null", 1)), guest.EntryIs).entry
    assert null.type is FileType.CHAR_DEVICE


def listing(engine: Engine, path: Path, limit: int) -> tuple[dict[str, FileType], bool]:
    channel = engine.ask(guest.List(*ME, os.fsencode(path), limit))
    found: dict[str, FileType] = {}
    while True:
        frame = engine.next(channel)
        message = guest.decode_reply(frame)
        assert isinstance(message, guest.Entries), message
        found |= {entry.name: entry.type for entry in message.entries}
        if frame.end:
            return found, bool(message.truncated)


def test_list_many_odd_names_and_limit(engine: Engine, home: Path) -> None:
    names = {f"n{i:05}" for i in range(3000)}
    for name in names:
        (home / name).touch()
    odd = os.fsdecode(b"\xff\xfe bad\nname")
    (home / odd).mkdir()
    os.mkfifo(home / "fifo")
    os.symlink("x" * 300, home / "long")
    found, truncated = listing(engine, home, 100_000)
    assert set(found) == names | {odd, "fifo", "long"}
    assert not truncated
    assert (found[odd], found["fifo"], found["long"]) == (FileType.DIRECTORY, FileType.FIFO, FileType.SYMLINK)
    some, truncated = listing(engine, home, 1000)
    assert (len(some), truncated) == (1000, True)
    assert listing(engine, home, 0) == ({}, True)
    assert listing(engine, home, 3003)[1] is False
    assert refused(engine, guest.List(*ME, os.fsencode(home / "n00001"), 9)) == (20, 0)


def test_mkdir_rename_remove(engine: Engine, home: Path) -> None:
    ok = lambda message: engine.take(engine.ask(message), guest.Ok)  # noqa: E731
    at = lambda name: os.fsencode(home / name)  # noqa: E731
    ok(guest.Mkdir(*ME, at("d"), 0o2750, 0))
    assert stat.S_IMODE((home / "d").stat().st_mode) == 0o2750
    assert refused(engine, guest.Mkdir(*ME, at("d"), 0o755, 0)) == (17, 0)
    ok(guest.Mkdir(*ME, at("d"), 0o755, 1))
    ok(guest.Mkdir(*ME, at("p/q/r/"), 0o700, 1))
    ok(guest.Mkdir(*ME, b"/", 0o700, 1))
    assert refused(engine, guest.Mkdir(*ME, at("x/y"), 0o700, 0)) == (2, 0)
    (home / "f").write_text("f")
    assert refused(engine, guest.Mkdir(*ME, at("f"), 0o700, 1)) == (17, 0)
    (home / "g").write_text("g")
    assert refused(engine, guest.RenameTo(*ME, at("f"), at("g"), 0)) == (17, 0)
    ok(guest.RenameTo(*ME, at("f"), at("g"), 1))
    assert (home / "g").read_text() == "f"
    ok(guest.RenameTo(*ME, at("g"), at("p/h"), 0))
    assert refused(engine, guest.RenameTo(*ME, at("no"), at("h"), 1)) == (2, 0)
    assert refused(engine, guest.RemoveAt(*ME, at("p"), 0)) == (39, 0)
    ok(guest.RemoveAt(*ME, at("p/h"), 0))
    ok(guest.RemoveAt(*ME, at("d"), 0))
    ok(guest.RemoveAt(*ME, at("p"), 1))
    assert list(home.iterdir()) == []
    assert refused(engine, guest.RemoveAt(*ME, at("p"), 1)) == (2, 0)
    assert refused(engine, guest.RemoveAt(*ME, b"/", 1)) == (16, 0)
    assert refused(engine, guest.RemoveAt(*ME, at(".."), 1))[0] == 22


def test_remove_of_a_deep_and_wide_tree_never_follows(engine: Engine, home: Path) -> None:
    top = home / "top"
    outside = home / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    top.mkdir()
    os.symlink(outside, top / "link")
    fd = os.open(top, os.O_RDONLY)
    for _ in range(3000):  # far beyond PATH_MAX
        os.mkdir("directory", dir_fd=fd)
        os.symlink(str(outside), "l", dir_fd=fd)
        below = os.open("directory", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    for n in range(500):
        (top / f"f{n}").touch()
    engine.take(engine.ask(guest.RemoveAt(*ME, os.fsencode(top), 1)), guest.Ok)
    assert sorted(p.name for p in home.iterdir()) == ["outside"]
    assert (outside / "precious").exists()


def test_setattr(engine: Engine, home: Path) -> None:
    ok = lambda message: engine.take(engine.ask(message), guest.Ok)  # noqa: E731
    path = home / "f"
    path.touch()
    os.chmod(path, 0)
    os.symlink("f", home / "l")
    ok(guest.SetAttrs(*ME, os.fsencode(path), 5, 0o4711, 0, 0, -1_500_000_000))
    assert stat.S_IMODE(path.stat().st_mode) == 0o4711
    assert path.stat().st_mtime_ns == -1_500_000_000
    ok(guest.SetAttrs(*ME, os.fsencode(home / "l"), 4, 0, 0, 0, 5))
    assert (os.lstat(home / "l").st_mtime_ns, path.stat().st_mtime_ns) == (5, -1_500_000_000)
    assert refused(engine, guest.SetAttrs(*ME, os.fsencode(home / "l"), 1, 0o600, 0, 0, 0)) == (95, 0)
    ok(guest.SetAttrs(*ME, os.fsencode(home / "l"), 9, 0o600, 0, 0, 0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.needs_root
def test_file_operations_have_the_users_rights_only(engine: Engine, home: Path, tmp_path: Path) -> None:
    for part in (tmp_path, *tmp_path.parents[:3]):
        part.chmod(part.stat().st_mode | 0o111)
    secret, shared = home / "secret", home / "shared"
    secret.write_text("s")
    secret.chmod(0o600)
    shared.mkdir()
    shared.chmod(0o2777)
    assert refused(engine, guest.Read(*USER, os.fsencode(secret), 0, 9, 9)) == (13, 0)
    assert refused(engine, guest.Write(*USER, os.fsencode(secret), 0, 0, b"")) == (13, 0)
    assert refused(engine, guest.RemoveAt(*USER, os.fsencode(secret), 0)) == (13, 0)
    assert refused(engine, guest.SetAttrs(*USER, os.fsencode(secret), 1, 0o777, 0, 0, 0)) == (1, 0)
    assert refused(engine, guest.SetAttrs(*USER, os.fsencode(shared), 2, 0, 1, 1, 0)) == (1, 0)
    channel = engine.ask(guest.Write(*USER, os.fsencode(shared / "f"), 0o640, 1, b""))
    engine.take(channel, guest.Ok)
    engine.sock.sendall(guest.encode_data(channel, b"x", end=True))
    entry = engine.take(channel, guest.EntryIs).entry
    assert (entry.uid, entry.gid, entry.mode) == (*USER, 0o640)
    engine.take(engine.ask(guest.Mkdir(*USER, os.fsencode(shared / "d"), 0o750, 0)), guest.Ok)
    made = (shared / "d").stat()
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode)) == (*USER, 0o750)
    engine.take(engine.ask(guest.SetAttrs(*USER, os.fsencode(shared / "d"), 1, 0o711, 0, 0, 0)), guest.Ok)
    engine.take(engine.ask(guest.RemoveAt(*USER, os.fsencode(shared / "d"), 1)), guest.Ok)
    assert refused(engine, guest.Tree(*USER, os.fsencode(secret.parent / "none"), 9, 9, 9)) == (2, 0)
    done = batch(engine, shared, [BatchOp(BatchKind.FILE, b"b", 0o4755, 77, b"data")], who=USER)
    assert (done.done, done.errno) == (1, 0)
    made = (shared / "b").stat()
    assert (made.st_uid, made.st_gid, stat.S_IMODE(made.st_mode), made.st_mtime_ns) == (*USER, 0o4755, 77)
    assert secret.read_text() == "s", "the control: root reads it"
    channel = engine.ask(read(secret))
    engine.take(channel, guest.EntryIs)
    assert engine.content(channel) == b"s"


def batch(engine: Engine, root: Path, ops: list[BatchOp], who: tuple[int, int] = ME) -> guest.BatchDone:
    return engine.take(engine.ask(guest.BatchOps(*who, os.fsencode(root), tuple(ops))), guest.BatchDone)


def test_batch_makes_replaces_and_keeps(engine: Engine, home: Path) -> None:
    kind = BatchKind
    ops = [
        BatchOp(kind.DIRECTORY, b"d", 0o751, 11),
        BatchOp(kind.FILE, b"d/f", 0o640, 22, b"content"),
        BatchOp(kind.SYMLINK, b"d/l", 0, 33, b"../anywhere"),
        BatchOp(kind.HARD_LINK, b"d/h", 0, 0, b"d/f"),
        BatchOp(kind.FILE, b"d/l", 0o600, 44, b"was a link"),
        BatchOp(kind.SYMLINK, b"d/f", 0, 55, b"was-a-file"),
        BatchOp(kind.HARD_LINK, b"d/l", 0, 0, b"d/h"),
        BatchOp(kind.HARD_LINK, b"d/l", 0, 0, b"d/l"),
    ]
    assert batch(engine, home, ops).done == len(ops)
    assert (home / "d/h").read_text() == "content"
    assert (home / "d/l").stat().st_ino == (home / "d/h").stat().st_ino
    assert os.readlink(home / "d/f") == "was-a-file"
    assert os.lstat(home / "d/f").st_mtime_ns == 55
    (home / "d/keep").touch()
    again = batch(engine, home, [BatchOp(kind.DIRECTORY, b"d", 0o700, 99)])
    assert (again.done, (home / "d/keep").exists(), (home / "d").stat().st_mtime_ns) == (1, True, 99)
    many = [BatchOp(kind.FILE, b"d/m%d" % n, 0o600, 1, b"x" * (n % 7)) for n in range(3000)]
    assert batch(engine, home, many).done == 3000
    assert len(list((home / "d").iterdir())) == 3004


def test_batch_stays_beneath_its_root_and_stops_at_the_first_failure(engine: Engine, home: Path) -> None:
    root, outside = home / "root", home / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "f").write_text("safe")
    os.symlink(str(outside), root / "out")
    kind = BatchKind
    for path in (b"out/f", b"../outside/f", b"/tmp/dsec-evil", b"a/../../outside/f", b"out/../x", b".."):
        for op in (kind.DIRECTORY, kind.FILE, kind.SYMLINK, kind.HARD_LINK):
            done = batch(
                engine, root, [BatchOp(kind.FILE, b"ok", 0o600, 0), BatchOp(op, path, 0o700, 0, b"ok")]
            )
            assert done.done == 1, (path, op)
            assert done.errno in (18, 40, 20, 22, 2), (path, op, done.errno)
    assert batch(engine, root, [BatchOp(kind.HARD_LINK, b"stolen", 0, 0, b"out/f")]).errno in (40, 20)
    assert batch(engine, root, [BatchOp(kind.HARD_LINK, b"stolen", 0, 0, b"../outside/f")]).errno == 18
    assert batch(engine, root, [BatchOp(kind.FILE, b"missing/f", 0o600, 0)]).errno == 2
    assert batch(engine, root, [BatchOp(kind.DIRECTORY, b"out", 0o700, 0)]).errno == 17
    assert refused(engine, guest.BatchOps(*ME, os.fsencode(home / "none"), ())) == (2, 0)
    assert [p.name for p in outside.iterdir()] == ["f"]
    assert (outside / "f").read_text() == "safe"


def tree(engine: Engine, path: Path, max_bytes: int = 1 << 40, max_entries: int = 1 << 20) -> list[TreePiece]:
    channel = engine.ask(guest.Tree(*ME, os.fsencode(path), max_bytes, max_entries, 100_000))
    reader = guest.TreeReader()
    return list(reader.feed(engine.content(channel)))


def contents(pieces: list[TreePiece]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    name = ""
    for piece in pieces:
        if piece.entry:
            name = piece.entry.name
            found[name] = os.fsencode(piece.entry.target)
        found[name] += piece.content
    return found


def test_tree_streams_everything_and_follows_nothing(engine: Engine, home: Path) -> None:
    blob = random.Random(4).randbytes(500_000)
    top = home / "top"
    (top / "a/b").mkdir(parents=True)
    (top / "a/b/blob").write_bytes(blob)
    (top / "empty").touch()
    odd = os.fsdecode(b"\xff odd")
    (top / odd).write_bytes(b"odd")
    os.symlink("/etc/passwd", top / "link")
    os.symlink("..", top / "a/up")
    os.mkfifo(top / "fifo")
    pieces = tree(engine, top)
    assert contents(pieces) == {
        ".": b"", "a": b"", "a/b": b"", "a/b/blob": blob, "empty": b"", odd: b"odd", "link": b"/etc/passwd",
        "a/up": b"..", "fifo": b"",
    }  # fmt: skip
    assert (pieces[-1].tag, pieces[-1].status) == (TreeTag.TREE_END, 0)
    assert tree(engine, top, max_bytes=1000)[-1].status == 1
    few = tree(engine, top, max_entries=3)
    assert (few[-1].status, sum(p.entry is not None for p in few)) == (2, 3)
    assert refused(engine, guest.Tree(*ME, b"/absent", 1, 1, 1)) == (2, 0)
    assert refused(engine, guest.Tree(*ME, os.fsencode(top / "empty"), 1, 1, 1)) == (20, 0)


def test_closing_a_tree_ends_its_worker(init: Init) -> None:
    with init.connect() as engine:
        channel = engine.ask(guest.Tree(*ME, b"/usr", 1 << 40, 1 << 30, 1000))
        engine.next(channel)
        assert engine.take(engine.ask(guest.Usage()), guest.UsageIs).processes == 1
        engine.send(guest.Close(), channel)
        assert until(lambda: engine.take(engine.ask(guest.Usage()), guest.UsageIs).processes == 0)
        for _ in range(100):
            engine.send(guest.Close(), engine.ask(guest.Tree(*ME, b"/usr", 1 << 40, 1 << 30, 1000)))
        assert until(lambda: engine.take(engine.ask(guest.Usage()), guest.UsageIs).processes == 0)
    init.assert_well()


def events(engine: Engine, channel: int, last: bytes) -> set[tuple[int, bytes]]:
    seen: set[tuple[int, bytes]] = set()
    while not any(path == last for _, path in seen):
        seen |= {(row.what, row.path) for row in engine.take(channel, guest.Events).rows}
    return seen


def test_watch_recursive(engine: Engine, home: Path) -> None:
    (home / "sub").mkdir()
    channel = engine.ask(guest.Watch(*ME, os.fsencode(home), 1))
    engine.take(channel, guest.Ok)
    (home / "sub/f").write_text("x")
    (home / "sub/f").rename(home / "g")
    (home / "new/deep/er").mkdir(parents=True)
    (home / "new/deep/er/f").write_text("y")
    (home / "g").chmod(0o600)
    (home / "g").unlink()
    (home / "last").touch()
    seen = events(engine, channel, b"last")
    want = {
        (1, b"sub/f"),
        (2, b"sub/f"),
        (4, b"sub/f"),
        (5, b"g"),
        (1, b"new"),
        (1, b"new/deep"),
        (1, b"new/deep/er"),
    }
    assert want | {(1, b"new/deep/er/f"), (6, b"g"), (3, b"g")} <= seen
    (home / "new").rename(home / "moved")
    (home / "moved/deep/x").touch()
    assert (1, b"moved/deep/x") in events(engine, channel, b"moved/deep/x")
    engine.send(guest.Close(), channel)
    flat = engine.ask(guest.Watch(*ME, os.fsencode(home), 0))
    engine.take(flat, guest.Ok)
    (home / "moved/deep/y").touch()
    (home / "end").touch()
    assert {path for _, path in events(engine, flat, b"end")} == {b"end"}
    assert refused(engine, guest.Watch(*ME, b"/absent", 1)) == (2, 0)


def test_watch_misses_nothing_of_a_directory_that_moves(init: Init, home: Path) -> None:
    """What happens in it before init has read of the move."""
    (home / "a/b").mkdir(parents=True)
    (home / "out").mkdir()
    with init.connect() as engine:
        channel = engine.ask(guest.Watch(*ME, os.fsencode(home), 1))
        engine.take(channel, guest.Ok)
        os.kill(init.process.pid, signal.SIGSTOP)
        (home / "a").rename(home / "c")
        (home / "c/b/first").touch()
        os.kill(init.process.pid, signal.SIGCONT)
        assert (1, b"c/b/first") in events(engine, channel, b"c/b/first")
        (home / "c/b/second").touch()
        assert (1, b"c/b/second") in events(engine, channel, b"c/b/second")
        away = home.parent / "away"
        (home / "c/b").rename(away)
        (away / "unseen").touch()
        (home / "out/last").touch()
        seen = events(engine, channel, b"out/last")
        assert (4, b"c/b") in seen
        assert not any(path.endswith(b"unseen") for _, path in seen)


def exchange(one: Path, other: Path) -> None:
    """Both names at once, as a release is put in the place of another."""
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    done = renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2)
    assert done == 0, os.strerror(ctypes.get_errno())


def test_watch_knows_exchanged_directories_by_their_new_names(init: Init, home: Path) -> None:
    (home / "a/deep").mkdir(parents=True)
    (home / "b/other").mkdir(parents=True)
    with init.connect() as engine:
        channel = engine.ask(guest.Watch(*ME, os.fsencode(home), 1))
        engine.take(channel, guest.Ok)
        for first, second in (("one", "two"), ("three", "four")):
            exchange(home / "a", home / "b")
            seen = events(engine, channel, b".")
            assert {(4, b"a"), (5, b"b"), (7, b".")} <= seen  # the reader is told to look anew
            deep = "b/deep" if first == "one" else "a/deep"
            other = "a/other" if first == "one" else "b/other"
            (home / deep / first).touch()
            (home / other / second).touch()
            (home / "a" / f"{second}-last").touch()
            seen = events(engine, channel, f"a/{second}-last".encode())
            names = {path for what, path in seen if what == 1}
            assert names == {
                f"{deep}/{first}".encode(),
                f"{other}/{second}".encode(),
                f"a/{second}-last".encode(),
            }


def test_watch_finds_a_directory_that_was_renamed_as_soon_as_it_was_made(init: Init, home: Path) -> None:
    with init.connect() as engine:
        channel = engine.ask(guest.Watch(*ME, os.fsencode(home), 1))
        engine.take(channel, guest.Ok)
        os.kill(init.process.pid, signal.SIGSTOP)
        (home / "draft/below").mkdir(parents=True)
        (home / "draft").rename(home / "final")
        os.kill(init.process.pid, signal.SIGCONT)
        assert (1, b"final/below") in events(engine, channel, b"final/below")
        (home / "final/below/x").touch()
        assert (1, b"final/below/x") in events(engine, channel, b"final/below/x")


def test_watch_with_a_stalled_reader_reports_what_was_lost(init: Init, home: Path) -> None:
    with init.connect() as engine:
        channel = engine.ask(guest.Watch(*ME, os.fsencode(home), 0))
        engine.take(channel, guest.Ok)
        os.kill(init.process.pid, signal.SIGSTOP)
        path = str(home / "f")
        for _ in range(int(Path("/proc/sys/fs/inotify/max_queued_events").read_text()) // 2 + 100):
            os.close(os.open(path, os.O_CREAT))
            os.unlink(path)
        os.kill(init.process.pid, signal.SIGCONT)
        what: set[int] = set()
        while 7 not in what:
            what |= {row.what for row in engine.take(channel, guest.Events).rows}
    init.assert_well()


# --- hostile and broken peers ------------------------------------------------------------------------------------


def header(length: int, kind: int, flags: int = 0, reserved: int = 0, channel: int = 1) -> bytes:
    return guest.HEADER.pack(length, kind, flags, reserved, channel)


MALFORMED = {
    "unknown kind": header(0, 0x7E),
    "too long": header(262_145, 0x0B),
    "reserved": header(0, 0x07, reserved=1),
    "flags": header(0, 0x07, flags=1),
    "short": header(2, 0x09) + b"xx",
    "trailing": guest.HEADER.pack(5, 0x09, 0, 0, 1) + b"12345",
    "bytes beyond": header(4, 0x06) + b"\xff\xff\xff\x7f",
    "list beyond": header(8, 0x02) + b"\0\0\0\0\xff\xff\xff\xff",
    "second hello": guest.Hello().frame(0),
    "reply kind": guest.Ok().frame(3),
    "exec on channel 0": guest.Exec(b"i", (b"true",), (), b"/", *ME, (), 0, 0, 0, 0, 0, 0, 0).frame(0),
    "channel in use": guest.Watch(*ME, b"/tmp", 0).frame(9) + guest.Watch(*ME, b"/tmp", 0).frame(9),
    "data to a watch": guest.Watch(*ME, b"/tmp", 0).frame(9) + guest.encode_data(9, b"x"),
    "credit": guest.Write(*ME, b"/nonexistent/x", 0, 0, b"").frame(8) + header(0, 0x10, flags=2, channel=8),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_frames_end_the_connection_only(init: Init, name: str) -> None:
    with init.connect() as engine:
        engine.sock.sendall(MALFORMED[name])
        assert engine.is_dropped()
    init.assert_well()


def test_nothing_is_done_before_hello(init: Init) -> None:
    for first in (guest.Ping(b"x").frame(1), guest.Hello(1).frame(5), os.urandom(64)):
        with init.connect(hello=False) as engine:
            engine.sock.sendall(first)
            engine.sock.shutdown(socket.SHUT_WR)
            assert engine.is_dropped()
    with init.connect(hello=False) as engine:
        engine.send(guest.Hello(9), 0)
        assert engine.error(0)[1] == guest.ErrorCode.MALFORMED
        engine.send(guest.Hello(), 0)
        engine.take(0, guest.Welcome)
    init.assert_well()


def hostile_bytes(rng: random.Random, home: Path) -> bytes:
    """Frames that are nearly right: real requests with bytes flipped, cut or repeated."""
    path = os.fsencode(home / "x")
    samples: list[guest.Message] = [
        command("true", flags=rng.randrange(4)),
        read(path),
        guest.Write(*ME, path, 0o644, rng.randrange(32), b""),
        guest.List(*ME, os.fsencode(home), 9),
        guest.BatchOps(*ME, os.fsencode(home), (BatchOp(BatchKind.FILE, b"b", 0o600, 1, b"data"),)),
        guest.Watch(*ME, os.fsencode(home), 1),
        guest.Tree(*ME, os.fsencode(home), 1 << 20, 100, 1000),
        guest.Attach(b"x1", 0, 0, 5),
        guest.Credit(rng.randrange(1 << 32)),
        guest.Ping(b"p"),
        guest.Usage(),
        guest.ListExecs(),
        guest.Data(rng.randbytes(rng.randrange(100))),
        guest.Close(),
    ]
    frame = bytearray(rng.choice(samples).frame(rng.randrange(4)))
    if rng.random() < 0.3:
        body = guest.HEADER.size
        # Anywhere but in paths that could name something of this machine: numbers and lengths at the ends.
        for _ in range(rng.randrange(1, 4)):
            at = rng.choice([rng.randrange(body), len(frame) - 1 - rng.randrange(min(8, len(frame)))])
            frame[at] = rng.randrange(256)
    return bytes(frame)


def test_random_and_nearly_right_bytes_never_kill_init(init: Init, home: Path) -> None:
    rng = random.Random(6)
    for turn in range(150):
        with contextlib.suppress(ConnectionError), init.connect(hello=turn % 10 != 0) as engine:
            engine.sock.settimeout(2)
            for _ in range(rng.randrange(1, 60)):
                with contextlib.suppress(TimeoutError, BlockingIOError):
                    engine.sock.sendall(
                        hostile_bytes(rng, home) if turn % 3 else rng.randbytes(rng.randrange(1, 300))
                    )
    init.assert_well()


def test_many_connections_leave_no_descriptor(init: Init, home: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{init.process.pid}/fd"))

    init.assert_well()
    before = descriptors()
    for n in range(60):
        with init.connect() as engine:
            engine.take(engine.ask(guest.Watch(*ME, os.fsencode(home), 1)), guest.Ok)
            engine.ask(read(b"/proc/cpuinfo", credit=1))
            engine.ask(guest.Write(*ME, os.fsencode(home / f"f{n}"), 0o644, 17, b""))
            engine.run("true")
    init.assert_well()
    assert until(lambda: descriptors() <= before)
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_many_execs_leave_memory_and_descriptors_flat(init: Init) -> None:
    def measure() -> tuple[int, int]:
        text = Path(f"/proc/{init.process.pid}/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]), len(os.listdir(f"/proc/{init.process.pid}/fd"))

    with init.connect() as engine:
        for n in range(1500):
            if n == 500:
                first = measure()
            id = b"flat%d" % n
            assert engine.run("/bin/true", id=id).exit.code == 0
            engine.take(engine.ask(guest.Forget(id)), guest.Ok)
        last = measure()
    assert last[1] <= first[1]
    assert "asan" in str(init.process.args) or last[0] <= first[0] + 64
