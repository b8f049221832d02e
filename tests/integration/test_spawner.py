"""The spawner as its owner sees it: the real programs, plain and with sanitizers, spoken to over the documented socket.

What it does is judged by the machine: processes, descriptors, control groups. Its decoder is also driven by a fuzz program.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from dsec import Dsec, Level, Settings
from dsec.errors import Busy, CleanupFailed, DsecError, RuntimeUnavailable
from dsec.model.sandbox import State
from dsec.wire import spawn
from dsec.wire.spawn import CreateRequest, Op
from dsec.wiring import levels

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
PLAIN = ROOT / "src" / "dsec" / "_native"

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("images")]


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """The directory of both programs with address and undefined-behaviour sanitizers."""
    done = subprocess.run(
        ["make", "-s", "-C", NATIVE, "build/asan/spawner", "build/asan/init"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot find -lasan" in done.stderr or "libasan" in done.stderr:
        pytest.skip("this compiler has no address sanitizer")
    assert done.returncode == 0, done.stderr
    return NATIVE / "build" / "asan"


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image store, filled; what a process opens once for good (the event loop's pipe) is open from here on."""
    store = tmp_path_factory.mktemp("images")
    with Dsec(settings=Settings(images=store, pool=0)) as engine:
        engine.sandboxes.create(level="container" if os.geteuid() == 0 else "process").destroy()
    return store


@dataclass(slots=True)
class Running:
    """A spawner of level `process` and what it was given."""

    process: subprocess.Popen[bytes]
    lifeline: int
    path: str
    log: Path

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(self.path)
        sock.settimeout(20)
        return sock

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def children(self) -> list[int]:
        """Of the spawner, without those that it made ahead."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split() if not _ahead(pid)]


def _ahead(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() in ("dsec-zygote", "dsec-seed")
    except FileNotFoundError:
        return True  # it has ended


@contextlib.contextmanager
def running(programs: Path, top: Path, uid: int = 0) -> Iterator[Running]:
    """Started as the engine starts it: 3 a listener, 4 the lifeline, which is closed at the end."""
    top.mkdir()
    (top / "uids").mkdir()
    top.chmod(0o755)
    init = (programs if uid else PLAIN) / "init"
    path, log = f"/tmp/dt-{secrets.token_hex(6)}", top / "log"
    theirs, lifeline = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, log.open("wb") as error:
        listener.bind(path)
        os.chmod(path, 0o666)  # for strangers to try
        listener.listen(4)
        sources = {3: os.dup(listener.fileno()), 4: os.dup(theirs)}
        high = {target: os.dup2(source, 90 + target) for target, source in sources.items()}
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in high.items()]
        actions += [(os.POSIX_SPAWN_DUP2, error.fileno(), 2)]
        arguments = [
            str(programs / "spawner"),
            "--level",
            "process",
            "--state",
            str(top),
            "--init",
            str(init),
        ]
        for readable in ("/usr", "/bin", "/lib", "/lib64"):
            arguments += ["--readable", readable]
        arguments += ["--uids", str(top / "uids")] if os.geteuid() == uid == 0 else []
        shell = 'exec 3<&93 4<&94 93<&- 94<&-; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "-", *arguments],
            pass_fds=tuple(high.values()),
            stderr=error,
            user=uid or None,
            env={"ASAN_OPTIONS": "detect_leaks=0:exitcode=66", "UBSAN_OPTIONS": "print_stacktrace=1"},
        )
        for fd in (*sources.values(), *high.values(), theirs):
            os.close(fd)
        del actions
    found = Running(process, lifeline, path, log)
    try:
        yield found
    finally:
        with contextlib.suppress(OSError):
            os.close(found.lifeline)
        assert process.wait(20) in (0, -signal.SIGKILL), log.read_text()
        os.unlink(path)
        assert "Sanitizer" not in log.read_text()
        assert "runtime error" not in log.read_text()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Running]:
    with running(PLAIN, tmp_path / "s") as found:
        yield found


def ask(
    sock: socket.socket, op: int, body: bytes = b"", fds: tuple[int, ...] = (), seq: int = 7
) -> spawn.Answer:
    send(sock, struct.pack("<II", op, seq) + body, fds)
    while (answer := spawn.decode(sock.recv(spawn.MAX_MESSAGE))).seq != seq:
        pass
    return answer


def send(sock: socket.socket, message: bytes, fds: tuple[int, ...] = ()) -> None:
    sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


def greet(sock: socket.socket) -> None:
    answer = ask(sock, Op.HELLO, spawn.hello())
    assert answer.errno == 0
    assert spawn.decode_hello(answer.body)[0] > 0


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """A directory that a private user can reach."""
    top = Path(f"/var/tmp/dt-{secrets.token_hex(6)}")
    for path in (top, top / "tmp", top / "home"):
        path.mkdir()
        path.chmod(0o755)
    try:
        yield top
    finally:
        shutil.rmtree(top)


def request(directory: Path, name: str = "", **more: object) -> CreateRequest:
    values: dict[str, object] = {
        "id": name or "sb-" + secrets.token_hex(8),
        "hostname": "sandbox",
        "memory": 256 * 2**20,
        "pids": 20,
        "cpu_millis": 1000,
        "open_files": 256,
        "deadline": 0,
        "directory": str(directory),
    }
    return CreateRequest(**(values | more))  # type: ignore[arg-type]


@contextlib.contextmanager
def listener() -> Iterator[int]:
    """For init."""
    path = f"/tmp/dt-{secrets.token_hex(6)}"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen(1)
        try:
            yield sock.fileno()
        finally:
            os.unlink(path)


def make(sock: socket.socket, wanted: CreateRequest) -> spawn.Answer:
    with listener() as fd:
        return ask(sock, Op.CREATE, wanted.encode(), (fd,))


# --- requests


def test_what_is_no_request_is_said_to_be_none(plain: Running) -> None:
    with plain.connect() as sock, home() as directory:
        good = request(directory).encode()
        for op, body in (
            (0, b""),
            (99, b""),
            (Op.HELLO, b""),
            (Op.HELLO, spawn.hello() + b"x"),
            (Op.HELLO, struct.pack("<I", 99)),
            (Op.CREATE, b""),
            (Op.CREATE, good[:-1]),
            (Op.CREATE, good + b"x"),
            (Op.CREATE, good),  # without a descriptor
            (Op.DESTROY, b""),
            (Op.FREEZE, spawn.of_id("sb-x")),
            (Op.DEADLINE, spawn.of_id("sb-x", 1) + b"x"),
        ):
            assert ask(sock, op, body).errno == errno.EPROTO, (op, body)
        for op in (Op.TREE, Op.UNTREE):
            assert ask(sock, op, spawn.tree("x")).errno == errno.EINVAL
        assert ask(sock, Op.FREEZE, spawn.of_id("sb-x", 1)).errno == errno.ENOENT
        assert ask(sock, Op.DESTROY, spawn.of_id("sb-x")).errno == 0
        greet(sock)
        _until(lambda: not plain.children())


@pytest.mark.parametrize(
    "bad",
    [
        {"id": "../x"},
        {"id": "a/b"},
        {"id": ""},
        {"id": "x" * 64},
        {"id": ".hidden"},
        {"hostname": "a/b"},
        {"hostname": "h" * 64},
        {"writable": "../../x"},
        {"writable": "."},
        {"layers": ("..",)},
        {"layers": ("a/b",)},
        {"layers": tuple("x" for _ in range(65))},
        {"volumes": (("relative", False),)},
        {"directory": ""},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_names_that_climb_are_refused(plain: Running, bad: dict[str, object]) -> None:
    with plain.connect() as sock, home() as directory:
        values: dict[str, object] = {"directory": directory} | bad
        place = values.pop("directory")
        wanted = request(Path("/"), **values)
        wanted = request(Path(str(place)) if place else Path("/"), **values)
        body = (
            wanted.encode()
            if place
            else wanted.encode().replace(struct.pack("<I", 1) + b"/", struct.pack("<I", 0), 1)
        )
        with listener() as fd:
            assert ask(sock, Op.CREATE, body, (fd,) * (1 + len(wanted.volumes))).errno == errno.EPROTO
        _until(lambda: not plain.children())


@pytest.mark.needs_root
def test_a_set_up_that_fails_says_where_and_leaves_nothing(plain: Running) -> None:
    with plain.connect() as sock, home() as directory:
        greet(sock)
        before = plain.descriptors()
        for _ in range(50):
            answer = make(sock, request(directory / "absent"))
            assert (answer.errno, answer.step) == (errno.ENOENT, "directory")
        _until(lambda: not plain.children())
        assert plain.descriptors() <= before + 1  # the lock of the id block
        assert make(sock, request(directory)).errno == 0, "the control can be made"


@pytest.mark.needs_root
def test_two_of_one_name_are_refused(plain: Running) -> None:
    with plain.connect() as sock, home() as directory:
        assert make(sock, request(directory, "sb-one")).errno == 0
        assert make(sock, request(directory, "sb-one")).errno == errno.EEXIST
        _until(lambda: len(plain.children()) == 1)
        assert ask(sock, Op.DESTROY, spawn.of_id("sb-one")).errno == 0
        _until(lambda: not plain.children())


@pytest.mark.needs_root
def test_descriptors_do_not_pile_up(plain: Running) -> None:
    with plain.connect() as sock, home() as directory:
        greet(sock)
        for number in range(60):
            assert make(sock, request(directory, f"sb-{number}")).errno == 0
            with listener() as fd:  # descriptors that nobody asked for
                assert ask(sock, Op.HELLO, spawn.hello(), (fd,) * 20).errno == 0
            if number == 10:
                before = plain.descriptors()
            assert ask(sock, Op.DESTROY, spawn.of_id(f"sb-{number}")).errno == 0
        assert plain.descriptors() <= before + 24  # two for each zygote and seed, which come and go


# --- who may ask


@pytest.mark.needs_root
def test_strangers_are_not_heard(plain: Running) -> None:
    code = (
        "import socket, struct, sys\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.settimeout(5)\n"
        "s.connect(sys.argv[1])\n"
        f"try:\n  s.send(struct.pack('<III', 1, 7, {spawn.VERSION})); print(len(s.recv(100)))\n"
        "except OSError as error: print(error)\n"
    )
    said = {}
    for uid in (0, 65534):
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code, plain.path],
            user=uid,
            capture_output=True,
            text=True,
            check=False,
        )
        said[uid] = done.stdout.strip()
    assert said[0] == "24", "the control is heard"
    assert said[65534] in ("0", "[Errno 104] Connection reset by peer", "[Errno 32] Broken pipe")


def test_a_newer_owner_replaces_the_older(plain: Running) -> None:
    with plain.connect() as first:
        greet(first)
        with plain.connect() as second:
            greet(second)
            assert first.recv(100) == b""
            greet(second)
    with plain.connect() as third:
        greet(third)


OLD = 7  # every number that the older owner uses


class Heard:
    """A newer owner that keeps what it is told beside the answers to its own requests."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seq = 1000
        self.others: list[spawn.Answer] = []

    def ask(self, op: int, body: bytes) -> spawn.Answer:
        self._seq += 1
        send(self._sock, struct.pack("<II", op, self._seq) + body)
        while (answer := spawn.decode(self._sock.recv(spawn.MAX_MESSAGE))).seq != self._seq:
            self.others.append(answer)
        return answer

    def runs(self) -> list[str]:
        return [one.id for one in spawn.decode_list(self.ask(Op.LIST, spawn.bucket(0)).body)[1]]


@pytest.mark.needs_root
@pytest.mark.parametrize("op", [Op.CREATE, Op.DESTROY])
def test_a_newer_owner_is_told_nothing_that_the_older_one_asked(plain: Running, op: Op) -> None:
    """Whatever moment the change comes at: the older one's sandbox is there as a whole, or nothing of it."""
    kept = 0
    with home() as directory, plain.connect() as first:
        greet(first)
        older = first
        for number in range(30):
            name = f"sb-{number}"
            with listener() as fd:
                wanted = struct.pack("<II", Op.CREATE, OLD) + request(directory, name).encode()
                if op is Op.DESTROY:
                    assert make(older, request(directory, name)).errno == 0
                    wanted = struct.pack("<II", Op.DESTROY, OLD) + spawn.of_id(name)
                held = number % 3 == 0  # both are there before it looks: a change in the midst of the act
                if held:
                    plain.process.send_signal(signal.SIGSTOP)
                send(older, wanted, (fd,) if op is Op.CREATE else ())
                time.sleep(0.0 if held else 0.0003 * number)
                newer = plain.connect()
                if held:
                    plain.process.send_signal(signal.SIGCONT)
                heard = Heard(newer)
                assert heard.ask(Op.HELLO, spawn.hello()).errno == 0
            _until(lambda heard=heard: len(plain.children()) == len(heard.runs()))
            assert heard.runs() in ([], [name])
            kept += heard.runs() == [name]
            assert heard.ask(Op.DESTROY, spawn.of_id(name)).errno == 0
            _until(lambda heard=heard: (heard.runs(), plain.children()) == ([], []))
            assert {answer.seq for answer in heard.others} <= {0}, "only events"
            older.close()
            older = newer
        older.close()
    assert kept < 30, "some change came in the midst"


@pytest.mark.needs_root
def test_an_owner_that_does_not_read_holds_nobody_up(plain: Running) -> None:
    with home() as directory:
        with plain.connect() as deaf:
            deaf.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for _ in range(20_000):
                    deaf.send(struct.pack("<II", Op.LIST, 1) + spawn.bucket(0))
        with plain.connect() as sock:
            greet(sock)
            assert make(sock, request(directory)).errno == 0


# --- ends


@pytest.mark.needs_root
def test_the_deadline_is_held_with_nobody_there(plain: Running) -> None:
    with home() as directory:
        with plain.connect() as sock:
            at = int((time.clock_gettime(time.CLOCK_BOOTTIME) + 0.5) * 1e9)
            assert make(sock, request(directory, deadline=at)).errno == 0
            _until(lambda: len(plain.children()) == 1)
        until = time.monotonic() + 10
        while plain.children() and time.monotonic() < until:
            time.sleep(0.02)
        _until(lambda: not plain.children())


@pytest.mark.needs_root
def test_when_its_owner_is_gone_everything_ends(tmp_path: Path) -> None:
    with home() as directory, running(PLAIN, tmp_path / "s") as spawner, spawner.connect() as sock:
        for number in range(5):
            assert make(sock, request(directory, f"sb-{number}")).errno == 0
        _until(
            lambda: len(spawner.children()) == 5
        )  # what is being forked to be ahead has another name in a moment
        pids = spawner.children()
        os.close(spawner.lifeline)
        assert spawner.process.wait(20) == 0
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
        spawner.lifeline = -1


@pytest.mark.needs_root
def test_without_root_nothing_outlives_the_spawner(tmp_path: Path) -> None:
    """There no control group tells a successor what runs."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(home())
        # This checkout may lie where nobody but root may look.
        programs = Path(shutil.copytree(PLAIN, directory / "programs"))
        spawner = stack.enter_context(running(programs, tmp_path / "s", uid=65534))
        sock = stack.enter_context(spawner.connect())
        for path in (directory, directory / "tmp", directory / "home"):
            os.chown(path, 65534, 65534)
        answer = make(sock, request(directory))
        assert answer.errno == 0, answer
        _until(lambda: len(spawner.children()) == 1)
        (init,) = spawner.children()
        spawner.process.kill()
        until = time.monotonic() + 10
        while _lives(init) and time.monotonic() < until:
            time.sleep(0.02)
        assert not _lives(init)


FREEZER = Path("/sys/fs/cgroup/freezer")


@contextlib.contextmanager
def undying(pid: int) -> Iterator[None]:
    """A process that no signal ends meanwhile: the old freezer keeps it from seeing any."""
    if not (FREEZER / "tasks").exists():
        pytest.skip("only the freezer of cgroup version 1 holds off SIGKILL")
    group = FREEZER / f"dt-{secrets.token_hex(6)}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        _until(lambda: (group / "freezer.state").read_text() == "FROZEN\n")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        # Where it is not to die it goes back, or the group could not be removed.
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (FREEZER / "cgroup.procs").write_text(left)
        _until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.needs_root
@pytest.mark.parametrize("asked", [True, False], ids=["destroyed", "its init died"])
def test_a_process_that_does_not_die_keeps_its_sandbox_from_being_gone(images: Path, asked: bool) -> None:
    """Its destruction is not said to be done, stays visible and is tried until it is true; nobody gets its ids before."""
    with Dsec(settings=Settings(images=images, pool=0)) as engine:
        sandbox = engine.sandboxes.create(level="process")
        told = next(iter(sandbox.start("echo $$; exec sleep 1000").output)).data
        pid, uid, init = int(told), os.stat(f"/proc/{int(told)}").st_uid, _real(sandbox.id)
        with undying(pid):
            if asked:
                with pytest.raises((Busy, CleanupFailed), match="do not die"):
                    sandbox.destroy()
            else:
                os.kill(init, signal.SIGKILL)
            _until(lambda: [problem.sandbox for problem in engine.problems()] == [sandbox.id])
            assert _lives(pid), "the control: nothing ended it"
            assert not _lives(init)
            with engine.sandboxes.create(level="process") as other:
                assert other.exec("id -u").text.strip() != str(uid), "its ids are nobody else's yet"
            assert "do not die" in engine.problems()[0].error
        _until(lambda: not engine.problems())
        assert not _lives(pid)
        sandbox.destroy()
        with pytest.raises(DsecError):
            sandbox.exec("true")


def _until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


# --- what is made ahead


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _children(pid: int) -> set[int]:
    return {int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.needs_root
@pytest.mark.parametrize("level", list(Level))
def test_what_is_made_ahead_can_be_killed_at_any_time(images: Path, level: Level) -> None:
    """Sandboxes are made all the same, nothing piles up, and the spawner does not spin."""
    seen: set[int] = set()
    with Dsec(settings=Settings(images=images, pool=0)) as engine:
        steady = engine.sandboxes.create(level=level)
        init = _real(steady.id)
        spawner = _parent(init)
        with contextlib.suppress(AssertionError):
            _until(lambda: bool(_children(spawner) - {init}), seconds=3)
        if not _children(spawner) - {init}:
            pytest.skip("nothing is made ahead here")
        for _ in range(3):  # until all of it is there
            engine.sandboxes.create(level=level).destroy()
        time.sleep(0.3)
        processes, descriptors = len(_children(spawner)), _descriptors(spawner)
        for _ in range(8):
            ahead = _children(spawner) - {init}
            seen |= ahead
            for pid in ahead:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _until(lambda ahead=ahead: not any(map(_lives, ahead)))
            time.sleep(0.02)
            with engine.sandboxes.create(level=level) as other:
                assert other.exec("echo made").stdout == b"made\n"
            assert steady.exec("echo on").stdout == b"on\n"
        _until(lambda: not [pid for pid in _children(spawner) if _state(pid) == "Z"])
        time.sleep(1.2)  # it may wait a while before it makes more
        engine.sandboxes.create(level=level).destroy()
        time.sleep(0.3)
        assert len(_children(spawner)) <= processes
        assert _descriptors(spawner) <= descriptors
        before = _ticks(spawner)
        time.sleep(0.6)
        assert _ticks(spawner) - before < 20, "it sleeps"
        assert _real(steady.id) == init
        seen |= _children(spawner) | {spawner}
    assert [pid for pid in seen if _lives(pid)] == []


@pytest.mark.needs_root
@pytest.mark.parametrize("level", list(Level))
def test_what_is_killed_while_it_becomes_a_sandbox_is_refused_and_not_given_out(
    images: Path, level: Level
) -> None:
    with Dsec(settings=Settings(images=images, pool=0)) as engine:
        steady = engine.sandboxes.create(level=level)
        init = _real(steady.id)
        spawner = _parent(init)
        made = 0
        for _ in range(40):
            for pid in _children(spawner) - {init}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # at once: the spawner does not know of it yet
            with contextlib.suppress(RuntimeUnavailable), engine.sandboxes.create(level=level) as sandbox:
                assert sandbox.exec("echo made").stdout == b"made\n"
                made += 1
            time.sleep(0.05)
        assert made > 0
        assert [one.id for one in engine.sandboxes.list() if one.state is State.RUNNING] == [steady.id]


# --- noise, with sanitizers


def test_the_decoder_survives_everything() -> None:
    subprocess.run(["make", "-s", "-C", NATIVE, "build/fuzz/spawner"], check=True, timeout=100)
    command = [NATIVE / "build/fuzz/spawner", "-n", "100000", str(secrets.randbits(32))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert int(done.stdout.split()[2]) > 10_000, "it must accept some"


@pytest.mark.needs_root
def test_noise_does_not_shake_it(sanitized: Path, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    random = Random(seed)
    with home() as directory, running(sanitized, tmp_path / "s") as spawner, listener() as fd:
        sock = spawner.connect()
        good = [
            struct.pack("<II", Op.CREATE, 3) + request(directory / "absent", "sb-noise").encode(),
            struct.pack("<II", Op.HELLO, 3) + spawn.hello(),
            struct.pack("<II", Op.DEADLINE, 3) + spawn.of_id("sb-noise", 5),
            struct.pack("<II", Op.LIST, 3) + spawn.bucket(0),
            struct.pack("<II", Op.TREE, 3) + spawn.tree("x"),
            struct.pack("<II", Op.UNTREE, 3) + spawn.tree("x"),
        ]
        for number in range(1500):
            message = bytearray(random.choice(good))
            for _ in range(random.randrange(6)):
                message[random.randrange(len(message))] = random.choice(
                    (0, 1, 0x7F, 0xFF, random.randrange(256))
                )
            message = message[: random.randrange(1, len(message) + 1)] if random.random() < 0.3 else message
            if message[:4] == struct.pack("<I", Op.SHUTDOWN):
                continue
            send(sock, bytes(message), (fd,) * random.randrange(4))
            if number % 50 == 0:  # its answers are not read: begin anew
                sock.close()
                sock = spawner.connect()
        sock.close()
        with spawner.connect() as sober:
            greet(sober)
            answer = make(sober, request(directory, "sb-sober"))
            assert answer.errno == 0, (seed, answer)
            assert ask(sober, Op.DESTROY, spawn.of_id("sb-sober")).errno == 0


@pytest.mark.needs_root
@pytest.mark.slow
def test_sandboxes_of_both_levels_under_sanitizers(
    sanitized: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spawner is the sanitized one; init is plain, since the sanitizers' own calls are not in its list."""
    both = tmp_path / "programs"
    both.mkdir()
    shutil.copy(sanitized / "spawner", both / "spawner")
    shutil.copy(PLAIN / "init", both / "init")
    monkeypatch.setattr(levels, "programs", lambda: both)
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0:exitcode=66")
    with Dsec(settings=Settings(images=images, pool=0)) as engine:
        for level in Level:
            with engine.sandboxes.create(level=level, volumes=_volumes(level, tmp_path)) as sandbox:
                assert sandbox.exec("echo hi").stdout == b"hi\n"
                sandbox.pause()
                sandbox.resume()
                assert sandbox.exec("echo again").stdout == b"again\n"
        logs = [path.read_text() for path in Path(os.environ["TMPDIR"]).glob("dsec-*/*/spawner.log")]
        assert len(logs) == 2
    for text in logs:
        assert "Sanitizer" not in text
        assert "runtime error" not in text


def _volumes(level: Level, top: Path) -> list[str]:
    return (
        [f"{top}:/data/deep:ro", f"{top / 'programs' / 'init'}:/data/file:ro"]
        if level is Level.CONTAINER
        else []
    )


# --- a spawner that died

IMPOSTOR = """
import ctypes, os, sys, time
# Over its own arguments: those of an init, of this sandbox and of another.
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[45]), int(fields[46])
claim = b"dsec-init\\0--id\\0" + sys.argv[1].encode() + b"\\0--pidns\\0"
claim = claim.ljust(end - start, b"\\0")
ctypes.memmove(start, claim, len(claim))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.needs_root
@pytest.mark.slow
@pytest.mark.parametrize("level", list(Level))
def test_a_successor_is_not_deceived(images: Path, tmp_path: Path, level: Level) -> None:
    """Processes inside that look like an init, of this sandbox and of another one, are not adopted in its place."""
    with Dsec(tmp_path / "home", settings=Settings(images=images, pool=0)) as engine:
        victim, hostile = (engine.sandboxes.create(level=level) for _ in range(2))
        for claimed in (hostile.id, victim.id):
            for _ in range(4):
                task = hostile.start(["python3", "-I", "-c", IMPOSTOR + " " * 300, claimed])
                next(iter(task.output))
        assert len(_claimants(victim.id)) > 2, "they must look the part"
        inits = {sandbox.id: _real(sandbox.id) for sandbox in (victim, hostile)}
        (spawner,) = {_parent(pid) for pid in inits.values()}
        os.kill(spawner, signal.SIGKILL)
        _gone(spawner)
        assert victim.exec("echo hi", timeout=20).stdout == b"hi\n"
        assert hostile.exec("echo hi", timeout=20).stdout == b"hi\n"
        assert {sandbox.id: _real(sandbox.id) for sandbox in (victim, hostile)} == inits
        hostile.destroy()
        assert not _lives(inits[hostile.id])
        assert _claimants(hostile.id) == []
        assert victim.exec("echo on").stdout == b"on\n", "the other one is untouched"
        successor = next(
            pid for pid in _spawners(tmp_path) if pid != spawner and level.value in _command(pid)
        )
        before = _ticks(successor)
        time.sleep(0.6)
        assert _ticks(successor) - before < 20, (
            "it sleeps: nothing tells it again and again of one that ended"
        )
        victim.destroy()


def _claimants(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(
                f"dsec-init\0--id\0{name}\0".encode()
            ):
                found.append(int(entry.name))
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _real(name: str) -> int:
    """Its init, by what it runs: impostors run Python, and monitors are children of the init."""
    ours = [pid for pid in _claimants(name) if os.readlink(f"/proc/{pid}/exe").startswith("/memfd:dsec-init")]
    (init,) = [pid for pid in ours if _parent(pid) not in ours]
    return init


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _spawners(top: Path) -> list[int]:
    """Without their helpers, which are children of theirs."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = [pid for pid in found if "/spawner --level" in _command(pid) and str(top) in _command(pid)]
    return [pid for pid in found if _parent(pid) not in found]


def _ticks(pid: int) -> int:
    """Processor time, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _lives(pid: int) -> bool:
    """A zombie does not: it waits for whoever inherited it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _gone(pid: int) -> None:
    until = time.monotonic() + 10
    while _lives(pid) and time.monotonic() < until:
        time.sleep(0.01)
