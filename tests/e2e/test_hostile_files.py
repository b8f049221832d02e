"""The files API against a sandbox, an archive or a local tree that means harm.

Nothing outside the sandbox is read or written, whatever a path, a link or an archive says; every refusal is a typed error;
and afterwards no thread and no task hangs: the engine works on, and the census counts descriptors.
"""

from __future__ import annotations

import gzip
import io
import os
import secrets
import socket
import stat
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec import Dsec, Level, Limits, Settings
from dsec.client.sync import Sandbox
from dsec.errors import (
    BadRequest,
    DsecError,
    FileDenied,
    FileIsDirectory,
    FileKind,
    FileMissing,
    FileProblem,
    QuotaExceeded,
    TooLarge,
)

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(60)]

MIB = 2**20


@pytest.fixture(scope="module")
def engine(image_store: Path) -> Iterator[Dsec]:
    with Dsec(settings=Settings(images=image_store, shelf=4, pool=0)) as opened:
        for level in Level:
            held = [opened.sandboxes.create(level=level) for _ in range(2)]
            for sandbox in held:
                sandbox.files.write("a", b"x")
                sandbox.destroy()
        yield opened


@pytest.fixture(params=list(Level))
def box(engine: Dsec, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    yield from _box(engine, request.param)


@pytest.fixture
def container(engine: Dsec) -> Iterator[Sandbox]:
    yield from _box(engine, Level.CONTAINER)


def _box(engine: Dsec, level: Level) -> Iterator[Sandbox]:
    """Usable after whatever was done to it, with no thread more than before."""
    with engine.sandboxes.create(level=level, limits=Limits(disk_mib=64)) as sandbox:
        sandbox.files.write("still", b"here")
        threads = threading.active_count()
        yield sandbox
        assert sandbox.files.read("still") == b"here"
        assert threading.active_count() <= threads + 4, "nothing hangs"


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    """A file of the machine: neither read nor changed."""
    token = secrets.token_hex(16).encode()
    path = tmp_path / "outside" / "secret"
    path.parent.mkdir()
    path.write_bytes(token)
    before = path.stat()
    yield path, token
    after = path.stat()
    assert path.read_bytes() == token
    kept = ("st_ino", "st_mode", "st_uid", "st_nlink", "st_mtime_ns")
    assert [getattr(before, name) for name in kept] == [getattr(after, name) for name in kept]
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def attempt(act: Callable[[], object]) -> object:
    """What it gives, or the typed error that it raises: any other is a failure of ours."""
    try:
        return act()
    except DsecError as error:
        return error


# --- paths and links


def test_paths_and_links_end_inside(box: Sandbox, secret: tuple[Path, bytes]) -> None:
    path, token = secret
    assert Path(path).read_bytes() == token, "outside it can be read"
    links = {
        "plain": str(path),
        "climbs": "../" * 30 + str(path)[1:],
        "proc": f"/proc/1/root{path}",
        "dir": str(path.parent),
    }
    for name, target in links.items():
        box.exec(["ln", "-s", target, name])
    ways = [
        str(path),
        "../" * 30 + str(path)[1:],
        f"/proc/self/root{path}",
        f"/proc/1/root{path}",
        *links,
        "dir/secret",
    ]
    for way in ways:
        assert attempt(lambda way=way: box.files.read(way)) != token, way  # type: ignore[misc]
        assert attempt(lambda way=way: b"".join(box.files.pack(way))) != token, way  # type: ignore[misc]
        attempt(lambda way=way: box.files.write(way, b"changed", parents=False))  # type: ignore[misc]
        attempt(lambda way=way: box.files.write(way, b"changed", atomic=True, parents=False))  # type: ignore[misc]
        attempt(lambda way=way: box.files.move(way, "mine"))  # type: ignore[misc]
        attempt(lambda way=way: box.files.list(way))  # type: ignore[misc]
    attempt(lambda: box.files.write("dir/new", b"x", parents=False))
    attempt(lambda: box.files.mkdir("dir/new", parents=False))
    attempt(lambda: box.files.remove("dir/secret"))
    attempt(lambda: box.files.remove("dir", recursive=True))


def test_private_files_of_the_system_are_the_sandboxs_or_denied(box: Sandbox, container: Sandbox) -> None:
    ours = Path("/etc/shadow").read_bytes()
    assert ours
    box.exec(["ln", "-sf", "/etc/shadow", "shadow"])
    for way in ("shadow", "/etc/shadow", "/root/.bashrc", "/proc/1/environ", "/proc/1/mem"):
        got = attempt(lambda way=way: box.files.read(way))  # type: ignore[misc]
        assert isinstance(got, FileDenied | FileMissing | FileKind | FileProblem), (way, got)
    got = attempt(lambda: container.files.read("/etc/shadow", user="root"))
    assert got != ours


def test_links_that_are_swapped_meanwhile(
    container: Sandbox, secret: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, token = secret
    swap = f"""
        mkdir -p real && echo inside > real/secret
        while :; do ln -sfn real d; ln -sfn {path.parent} d; rm -f d; mkdir d; echo inside > d/secret; rm -r d; done
    """
    up = tmp_path / "up"
    up.mkdir()
    (up / "secret").write_bytes(b"changed")
    task = container.start(["sh", "-c", swap])
    seen = set()
    for number in range(150):
        got = attempt(lambda: container.files.read("d/secret"))
        seen.add(got if isinstance(got, bytes) else type(got).__name__)
        attempt(lambda: container.files.write("d/secret", b"changed", parents=False))
        if number % 30 == 0:
            attempt(lambda number=number: container.files.download(".", tmp_path / f"down{number}"))  # type: ignore[misc]
            attempt(lambda: container.files.upload(up, "d"))
    task.kill()
    assert token not in seen
    assert len(seen) > 1, "the swapping must have been seen"


def test_hard_links_share_nothing_with_the_image_or_outside(engine: Dsec, container: Sandbox) -> None:
    container.exec("ln /etc/passwd /workspace/p", user="root")
    container.files.write("p", b"changed", user="root")
    assert container.exec("cat /etc/passwd").stdout == b"changed"
    with engine.sandboxes.create() as other:
        assert b"root" in other.exec("cat /etc/passwd").stdout


@pytest.mark.parametrize("name", ["", "a\0b", "/" * 5000, "x" * 256, "a/" * 2100 + "b"])
def test_paths_that_cannot_be(box: Sandbox, name: str) -> None:
    for act in (box.files.read, box.files.list, box.files.stat, box.files.remove, box.files.mkdir):
        got = attempt(lambda act=act: act(name))  # type: ignore[misc]
        harmless = act in (box.files.list, box.files.stat, box.files.mkdir) and not name.strip("/")
        assert isinstance(got, DsecError) or harmless, (act, got)
    assert isinstance(attempt(lambda: box.files.write(name, b"x")), DsecError)


def test_a_path_that_is_no_text(container: Sandbox) -> None:
    with pytest.raises(BadRequest):
        container.files.read("\ud800")


# --- what is no file


def test_what_is_no_file_is_refused_at_once(container: Sandbox) -> None:
    make = "import os, socket; os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('sock'); os.mkdir('dir')"
    assert container.exec(["python3", "-c", make]).exit_code == 0
    for name in ("fifo", "sock", "/dev/null", "/dev/zero", "/dev/tty", "/dev/ptmx", "/dev/random"):
        started = time.monotonic()
        for act in (
            lambda name=name: container.files.read(name),
            lambda name=name: container.files.write(name, b"x"),
        ):  # type: ignore[misc]
            got = attempt(act)
            assert isinstance(got, FileKind | FileProblem), (name, got)
        assert time.monotonic() - started < 10, name
    assert isinstance(attempt(lambda: container.files.read("dir")), FileIsDirectory | FileKind)


def test_a_tree_with_everything_in_it_comes_down_without_it(container: Sandbox, tmp_path: Path) -> None:
    make = """
import os, socket
os.makedirs("t/sub")
os.mkfifo("t/fifo")
socket.socket(socket.AF_UNIX).bind("t/sock")
os.symlink("/etc/passwd", "t/absolute")
os.symlink("../../../etc/passwd", "t/climbs")
os.symlink("sub", "t/fine")
open(b"t/\\xff\\xfe", "w").write("odd")
open("t/" + "n" * 255, "w").write("long")
open("t/line\\nbreak", "w").write("line")
open("t/-rf", "w").write("dash")
open("t/setuid", "w").write("x")
os.chmod("t/setuid", 0o6755)
"""
    done = container.exec(["python3", "-c", make])
    assert done.exit_code == 0, done.stderr
    report = container.files.download("t", tmp_path / "down")
    found = {os.fsencode(entry.name): entry for entry in (tmp_path / "down").iterdir()}
    assert found.keys() >= {b"\xff\xfe", b"n" * 255, b"line\nbreak", b"-rf", b"sub"}
    assert not {b"fifo", b"sock", b"absolute", b"climbs"} & found.keys()
    skipped = {name for name, _ in report.skipped}
    assert {"fifo", "sock", "absolute", "climbs"} <= {name.rsplit("/", 1)[-1] for name in skipped}
    assert stat.S_IMODE((tmp_path / "down" / "setuid").stat().st_mode) & 0o6000 == 0
    for path in (tmp_path / "down").rglob("*"):
        assert path.resolve().is_relative_to((tmp_path / "down").resolve())


def test_a_local_link_is_not_followed_on_the_way_down(
    container: Sandbox, secret: tuple[Path, bytes], tmp_path: Path
) -> None:
    """Whoever can write the destination meanwhile cannot lead us out of it."""
    path, _ = secret
    container.exec("mkdir -p t/d && echo changed > t/d/secret && echo changed > t/secret")
    down = tmp_path / "down"
    down.mkdir()
    (down / "d").symlink_to(path.parent)
    (down / "secret").symlink_to(path)
    attempt(lambda: container.files.download("t", down))
    attempt(lambda: container.files.download("t/secret", down / "secret"))


def test_a_local_tree_goes_up_without_what_its_links_point_at(
    container: Sandbox, secret: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, token = secret
    up = tmp_path / "up"
    (up / "sub").mkdir(parents=True)
    (up / "link").symlink_to(path)
    (up / "dir").symlink_to(path.parent)
    (up / "file").write_bytes(b"fine")
    os.mkfifo(up / "fifo")
    with socket.socket(socket.AF_UNIX) as s:
        old = Path.cwd()
        os.chdir(up)
        try:
            s.bind("sock")
        finally:
            os.chdir(old)
    attempt(lambda: container.files.upload(up, "t"))
    assert token not in container.exec("cat -- t/* t/*/* 2>/dev/null; true").stdout
    for name in ("fifo", "sock"):
        assert isinstance(attempt(lambda name=name: container.files.upload(up / name, "x")), DsecError)  # type: ignore[misc]


def test_a_growing_file_ends_and_an_endless_one_is_refused(container: Sandbox) -> None:
    task = container.start("while :; do head -c 65536 /dev/zero >> grows; done")
    while not container.files.exists("grows"):
        time.sleep(0.01)
    assert len(container.files.read("grows")) <= 64 * MIB
    b"".join(container.files.pack("."))
    task.kill()
    container.exec("truncate -s 10T hole")
    with pytest.raises(TooLarge):
        container.files.read("hole", max_bytes=MIB)
    for pseudo in ("/proc/kmsg", "/proc/self/mem", "/proc/kcore"):
        assert isinstance(
            attempt(lambda pseudo=pseudo: container.files.read(pseudo, max_bytes=MIB)), DsecError
        )  # type: ignore[misc]


def test_a_file_that_shrinks_while_it_is_packed(container: Sandbox) -> None:
    container.exec("mkdir t; head -c 8M /dev/zero > t/f")
    task = container.start("while :; do truncate -s 0 t/f; truncate -s 8M t/f; done")
    for _ in range(5):
        data = attempt(lambda: b"".join(container.files.pack("t")))
        if isinstance(data, bytes):
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:  # whatever was in it, it is a whole archive
                tar.getmembers()
    task.kill()


def test_a_deep_tree(container: Sandbox, tmp_path: Path) -> None:
    """Deeper than a path may be long."""
    deep = "import os\nfor _ in range(2100):\n  os.mkdir('d'); os.chdir('d')\nopen('bottom', 'w').write('x')"
    assert (
        container.exec(["python3", "-c", "import os; os.mkdir('t'); os.chdir('t')\n" + deep]).exit_code == 0
    )
    attempt(lambda: container.files.download("t", tmp_path / "deep"))
    attempt(lambda: b"".join(container.files.pack("t")))
    container.files.remove("t", recursive=True)
    assert not container.files.exists("t")
    os.system(f"rm -rf {tmp_path}/deep")


def test_many_names(container: Sandbox, tmp_path: Path) -> None:
    container.exec("mkdir t; cd t; seq 2000 | xargs touch")
    assert len(container.files.list("t")) == 2000
    assert len(container.files.list("t", limit=10)) == 10
    assert container.files.download("t", tmp_path / "down").entries >= 2000


# --- archives


def _archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "members",
    [
        [(_member("/escaped"), b"x")],
        [(_member("../escaped"), b"x")],
        [(_member("a/../../../../escaped"), b"x")],
        [(_member("l", tarfile.SYMTYPE, "/tmp"), b""), (_member("l/escaped"), b"x")],
        [(_member("l", tarfile.SYMTYPE, "../.."), b""), (_member("l/escaped"), b"x")],
        [
            (_member("l", tarfile.SYMTYPE, "."), b""),
            (_member("l/l2", tarfile.SYMTYPE, "../.."), b""),
            (_member("l2/escaped"), b"x"),
        ],
        [(_member("h", tarfile.LNKTYPE, "/etc/passwd"), b"")],
        [(_member("h", tarfile.LNKTYPE, "../../etc/passwd"), b"")],
        [(_member("s", tarfile.SYMTYPE, "/etc/passwd"), b""), (_member("h", tarfile.LNKTYPE, "s"), b"")],
        [(_member("n", tarfile.CHRTYPE), b"")],
        [(_member("n", tarfile.BLKTYPE), b"")],
        [(_member("n", tarfile.FIFOTYPE), b"")],
        [(_member("n", b"Z"), b"")],
    ],
    ids=lambda members: "+".join(f"{info.type.decode()}:{info.name}>{info.linkname}" for info, _ in members),
)
def test_archives_that_reach_out(container: Sandbox, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    before = container.exec("cat /etc/passwd").stdout
    report = attempt(lambda: container.files.unpack(_archive(*members), "/workspace/deep/down", user="root"))
    known = members[0][0].type in tarfile.SUPPORTED_TYPES
    assert isinstance(report, BadRequest) or not known, report
    found = container.exec(
        "find / -xdev -name escaped; find deep -type p -o -type b -o -type c", user="root"
    ).text.split()
    assert [name for name in found if not name.startswith("/workspace/deep/down/")] == []
    assert container.exec("cat /etc/passwd").stdout == before


def test_archives_that_are_none(container: Sandbox) -> None:
    whole = _archive((_member("a"), b"x" * 100_000))
    for name, data in {
        "nothing": b"",
        "noise": os.urandom(50_000),
        "cut": whole[:40_000],
        "cut gzip": gzip.compress(whole)[:100],
        "wrong size": whole[:124] + b"7" * 11 + whole[135:],
    }.items():
        got = attempt(lambda data=data: container.files.unpack(data, "x"))  # type: ignore[misc]
        assert isinstance(got, DsecError) or name == "nothing", (name, got)


@pytest.mark.parametrize("kind", ["gzip", "sparse", "names", "header"])
def test_bombs_end_at_a_bound(container: Sandbox, kind: str) -> None:
    if kind == "gzip":
        raw = io.BytesIO()
        with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6) as out:
            head = _member("bomb")
            head.size = 2**30
            out.write(head.tobuf(tarfile.GNU_FORMAT))
            for _ in range(200):
                out.write(bytes(MIB))
        data = raw.getvalue()
    elif kind == "sparse":
        head = _member("bomb")
        head.size = 2**62
        data = head.tobuf(tarfile.GNU_FORMAT) + bytes(10_000)
    elif kind == "names":
        head = _member("n", tarfile.GNUTYPE_LONGNAME)
        head.size = 2**33
        data = head.tobuf(tarfile.GNU_FORMAT) + bytes(100_000)
    else:
        data = _archive((_member("a"), b"x")).replace(b"ustar", b"u\xfftar")
    got = attempt(lambda: container.files.unpack(data, "b"))
    assert isinstance(got, QuotaExceeded | TooLarge | BadRequest | DsecError), got


def test_an_archive_that_never_ends_can_be_left(container: Sandbox) -> None:
    """Its source fails in the middle: the error is the source's, and nothing hangs."""

    def source() -> Iterator[bytes]:
        yield _archive((_member("a"), b"x" * 100_000))[:50_000]
        raise OSError("the source is gone")

    with pytest.raises((OSError, DsecError)):
        container.files.unpack(source(), "x")


def test_packing_can_be_left(container: Sandbox) -> None:
    container.exec("mkdir t; head -c 30M /dev/urandom > t/f")
    for _ in range(20):
        pieces = container.files.pack("t")
        next(iter(pieces))
        del pieces
    assert container.exec("echo usable").stdout == b"usable\n"


# --- watching


def test_watching_a_storm(container: Sandbox) -> None:
    events = container.files.watch(".")
    container.files.write("first", b"x")
    assert next(events).path == "first"  # made after the call and before the first next()
    names: list[str] = []

    def collect() -> None:
        for event in events:
            names.append(event.path)
            if event.path == "last":
                return

    reader = threading.Thread(target=collect, daemon=True)
    reader.start()
    deadline = time.monotonic() + 10
    storm = "import os\nfor n in range(20_000):\n  open(f's{n}', 'w').close()\n  os.unlink(f's{n}')"
    assert container.exec(["python3", "-c", storm], timeout=30).ok
    while reader.is_alive() and time.monotonic() < deadline + 20:
        container.files.write("last", b"x")
        reader.join(0.1)
    assert not reader.is_alive()
