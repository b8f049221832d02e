"""Sinks of audit export, with real files, sockets and processes: nothing is lost, whoever dies, hangs or is full."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dsec.model.journal import Draft, Phase
from dsec.observe.destination import tls_context
from dsec.observe.file_sink import FileSink
from dsec.observe.http_sink import HttpSink
from dsec.observe.sink import Line, Refused, Sink
from dsec.observe.syslog import Messages, TcpSink, UdpSink
from dsec.stores.journal import SqliteStore

pytestmark = pytest.mark.anyio
OPENING = b'{"id":"'


def lines(count: int, start: int = 0, size: int = 10) -> list[Line]:
    return [
        Line(f"{n:032x}", 1000.0 + n, "exec", 6, b'{"id":"%d","x":"%b"}' % (n, b"y" * size))
        for n in range(start, start + count)
    ]


def ids(path: Path) -> list[int]:
    return [int(json.loads(line)["id"]) for line in path.read_text().splitlines()]


# Files


async def test_a_file_that_is_moved_or_removed_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    sink = FileSink(path, OPENING)
    await sink.send(lines(2))
    path.rename(tmp_path / "log.1")
    await sink.send(lines(2, 2))
    path.unlink()
    await sink.send(lines(2, 4))
    path.rename(tmp_path / "log.2")
    sink.reopen()
    await sink.send(lines(1, 6))
    await sink.close()
    assert ids(tmp_path / "log.1") == [0, 1]
    assert ids(tmp_path / "log.2") == [4, 5]
    assert ids(path) == [6]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", [b"{", b'{"id":"9', b'{"id":"9","x":"half'])
async def test_what_a_killed_export_left_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"id":"0"}\n' + torn)
    sink = FileSink(path, OPENING)
    await sink.send(lines(1, 1))
    await sink.close()
    assert ids(path) == [0, 1]


async def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_bytes(b"root:x:0")
    with pytest.raises(Refused, match="does not end"):
        await FileSink(path, OPENING).send(lines(1))
    assert path.read_bytes() == b"root:x:0"
    os.mkfifo(tmp_path / "fifo")
    for odd in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(Refused):
            await FileSink(odd, OPENING).send(lines(1))


async def test_one_export_writes_to_a_file(tmp_path: Path) -> None:
    first, second = FileSink(tmp_path / "log", OPENING), FileSink(tmp_path / "log", OPENING)
    await first.send(lines(1))
    with pytest.raises(Refused, match="another export"):
        await second.send(lines(1))
    await first.close()
    await second.send(lines(1, 1))
    await second.close()
    assert ids(tmp_path / "log") == [0, 1]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    target = tmp_path / "small"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", target], check=True)
    yield target
    subprocess.run(["umount", target], check=True)


@pytest.mark.needs_root
async def test_a_full_disk_leaves_no_half_line_and_heals(small: Path) -> None:
    path, filler = small / "log", small / "filler"
    sink = FileSink(path, OPENING)
    await sink.send(lines(5))
    filler.write_bytes(b"x" * 180_000)
    with pytest.raises(Refused, match="No space left"):
        await sink.send(lines(10, 5, size=20_000))
    assert ids(path) == [0, 1, 2, 3, 4]
    filler.unlink()
    await sink.send(lines(10, 5, size=20_000))
    await sink.close()
    assert ids(path) == list(range(15))


# Syslog


def messages(data: bytes) -> list[bytes]:
    """By octet counting."""
    found = []
    while data:
        size, _, rest = data.partition(b" ")
        found.append(rest[: int(size)])
        assert len(found[-1]) == int(size)
        data = rest[int(size) :]
    return found


class Receiver:
    """Takes TCP connections, and all that comes by them."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.deaf = False
        self.open: list[asyncio.StreamWriter] = []

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.append(writer)
        while not self.deaf and (piece := await reader.read(1 << 16)):
            self.data += piece

    def hang_up(self) -> None:
        for writer in self.open:
            writer.transport.abort()
        self.open.clear()


@asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Receiver, int]]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.take, "127.0.0.1", 0, ssl=tls)
    try:
        yield receiver, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        receiver.hang_up()


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)


async def _many(sink: Sink, some: Sequence[Line]) -> None:
    for _ in range(50):
        await sink.send(some)


async def test_syslog_over_tcp_counts_octets() -> None:
    async with receiving() as (receiver, port):
        sink = TcpSink("127.0.0.1", port, Messages("my host"))
        await sink.send(lines(300, size=2000))
        await sink.close()
        await _until(lambda: len(receiver.data) > 300 * 2000)
        found = messages(bytes(receiver.data))
    assert len(found) == 300
    assert found[0].startswith(
        b'<110>1 1970-01-01T00:16:40.000000Z my_host dsec - exec [meta sequenceId="1"] {"id":"0"'
    )
    assert b'sequenceId="300"' in found[-1]


async def test_a_receiver_that_hangs_up_gets_it_again() -> None:
    async with receiving() as (receiver, port):
        sink = TcpSink("127.0.0.1", port, Messages("h"))
        await sink.send(lines(1))
        await _until(lambda: bool(receiver.data))
        receiver.hang_up()
        taken = False
        for _ in range(3):
            try:
                await sink.send(lines(1, 1))
                taken = True
                break
            except Refused:
                continue
        assert taken
        await sink.close()
        await _until(lambda: b'"id":"1"' in receiver.data)


async def test_a_receiver_that_talks_is_still_seen_to_leave() -> None:
    """What it says is no sign of life: behind it the connection may have ended, and lines would count that nobody reads."""
    async with receiving() as (receiver, port):
        sink = TcpSink("127.0.0.1", port, Messages("h"))
        await sink.send(lines(1))
        await _until(lambda: bool(receiver.data))
        (writer,) = receiver.open
        writer.write(b"x" * 300_000)
        await writer.drain()
        await sink.send(lines(1, 1))
        writer.write_eof()
        with pytest.raises(Refused, match="closed the connection"):
            await _many(sink, lines(1, 2))
        await sink.close()


async def test_a_receiver_that_takes_nothing_is_given_up() -> None:
    async with receiving() as (receiver, port):
        receiver.deaf = True
        sink = TcpSink("127.0.0.1", port, Messages("h"), seconds=0.3)
        with pytest.raises(Refused, match="takes nothing"):
            await _many(sink, lines(100, size=50_000))


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(Refused):
        await TcpSink("127.0.0.1", port, Messages("h")).send(lines(1))
    udp = UdpSink("127.0.0.1", port, Messages("h"))
    with pytest.raises(Refused):  # the machine says that nobody listens, at the latest with the next one
        await _many(udp, lines(1))
    await udp.close()


async def test_syslog_over_udp() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        held.bind(("127.0.0.1", 0))
        held.settimeout(10)
        sink = UdpSink("127.0.0.1", held.getsockname()[1], Messages("h"))
        await sink.send(lines(3))
        got = [await asyncio.to_thread(held.recv, 65536) for _ in range(3)]
        await sink.close()
    assert [one.endswith(b'{"id":"%d","x":"yyyyyyyyyy"}' % n) for n, one in enumerate(got)] == [True] * 3


def certificate(directory: Path, name: str) -> Path:
    """A certificate that signs itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = directory / f"{name}.pem"
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none) + made.public_bytes(pem))
    return path


async def test_tls_is_verified(tmp_path: Path) -> None:
    ours = await asyncio.to_thread(certificate, tmp_path, "localhost")
    theirs = await asyncio.to_thread(certificate, tmp_path, "other.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours)
    async with receiving(context) as (receiver, port):
        good = TcpSink("localhost", port, Messages("h"), tls=await asyncio.to_thread(tls_context, ours, None))
        await good.send(lines(2))  # the positive control
        await good.close()
        await _until(lambda: bool(receiver.data))
        assert len(messages(bytes(receiver.data))) == 2
        for name, ca in (("localhost", theirs), ("127.0.0.1", ours), ("localhost", None)):
            tls = await asyncio.to_thread(tls_context, ca, None)
            with pytest.raises(Refused, match="certificate is not good"):
                await TcpSink(name, port, Messages("h"), tls=tls).send(lines(1))


# HTTP


class Collector:
    """Answers what it is told to."""

    def __init__(self) -> None:
        self.answers: list[web.Response | float] = []
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.peers: list[object] = []

    async def take(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        body = await request.read()
        answer = self.answers.pop(0) if self.answers else web.Response(status=200)
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return web.Response(status=200)
        if answer.status < 300:
            self.got.append((dict(request.headers), body))
        return answer


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[tuple[Collector, int]]:
    collector = Collector()
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/in", collector.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield collector, runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_a_batch_is_a_post_with_secret_headers() -> None:
    async with collecting() as (collector, port):
        sink = HttpSink(
            f"http://127.0.0.1:{port}/in", "application/x-ndjson", lambda: {"Authorization": "Splunk s"}
        )
        await sink.send(lines(3))
        await sink.send(lines(3))
        await sink.close()
    (first, body), (second, again) = collector.got
    assert body.count(b"\n") == 3
    assert body == again
    assert (first["Authorization"], first["Content-Type"]) == ("Splunk s", "application/x-ndjson")
    assert first["Idempotency-Key"] == second["Idempotency-Key"]


async def test_a_connection_is_used_again_whatever_the_answer_says() -> None:
    """Collectors answer with a few bytes; one that talks on and on has the events all the same, and a new connection next time."""
    async with collecting() as (collector, port):
        collector.answers += [web.Response(text="x" * size) for size in (20, 20, 200_000, 20)]
        sink = HttpSink(f"http://127.0.0.1:{port}/in", "application/x-ndjson", dict)
        for _ in range(4):
            await sink.send(lines(1))
        await sink.close()
    first, second, third, fourth = collector.peers
    assert first == second == third != fourth


@pytest.mark.parametrize(
    ("status", "lasting", "large"),
    [
        (500, False, False),
        (503, False, False),
        (429, False, False),
        (408, False, False),
        (401, True, False),
        (404, True, False),
        (302, True, False),
        (413, False, True),
    ],
)
async def test_answers(status: int, lasting: bool, large: bool) -> None:
    async with collecting() as (collector, port):
        sink = HttpSink(f"http://127.0.0.1:{port}/in", "x/y", lambda: {"Authorization": "hush"})
        collector.answers = [
            web.Response(status=status, headers={"Retry-After": "7", "Location": "http://127.0.0.1:1/"})
        ]
        with pytest.raises(Refused, match=f"answers {status}") as caught:
            await sink.send(lines(1))
        assert (caught.value.lasting, caught.value.too_large, caught.value.after) == (lasting, large, 7.0)
        assert "hush" not in caught.value.reason
        await sink.send(lines(1))
        await sink.close()
    assert len(collector.got) == 1


async def test_a_collector_that_hangs_or_vanishes() -> None:
    async with collecting() as (collector, port):
        collector.answers = [20.0]
        sink = HttpSink(f"http://127.0.0.1:{port}/in", "x/y", dict, seconds=0.3)
        with pytest.raises(Refused, match="within the time"):
            await sink.send(lines(1))
        await sink.send(lines(1))
    with pytest.raises(Refused):
        await sink.send(lines(1, 1))
    async with collecting(port) as (collector, _):
        await sink.send(lines(1, 1))
        assert len(collector.got) == 1
    await sink.close()


# The whole, killed in the middle


async def journal(home: Path) -> SqliteStore:
    engine = home / "engine"
    for name in ("journal", "keys"):
        await asyncio.to_thread((engine / name).mkdir, parents=True, exist_ok=True)
    return await SqliteStore.open(
        engine / "journal", key=engine / "keys" / "journal.key", engine_id="en-test"
    )


async def grow(store: SqliteStore, start: int, count: int) -> None:
    for first in range(start, start + count, 100):
        drafts = [
            Draft(
                chain="engine",
                act="exec",
                phase=Phase.NOTE,
                ref=f"{n}",
                payload={"n": n, "text": "a\nb" * 30},
            )
            for n in range(first, first + 100)
        ]
        await store.append(*drafts)


def export(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "DSEC_HOME": str(home)}
    command = [sys.executable, "-m", "dsec", "audit", "export", "--follow", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes], signo: int) -> int:
    process.send_signal(signo)
    process.communicate(timeout=30)
    return process.returncode


@pytest.mark.slow
async def test_killed_again_and_again_it_loses_nothing(tmp_path: Path) -> None:
    out, store = tmp_path / "out", await journal(tmp_path)
    await grow(store, 0, 1000)
    count = 1000
    for round_ in range(6):
        process = export(tmp_path, "--name", "siem", "--to", str(out))
        enough = (out.stat().st_size if out.exists() else 0) + round_ * 50_000
        await grow(store, count, 2000)
        count += 2000
        await _until(partial(_grown, out, enough))
        assert await asyncio.to_thread(ended, process, signal.SIGKILL) == -signal.SIGKILL
    process = export(tmp_path, "--name", "siem", "--to", str(out))
    await _until(lambda: _last(out) == count)
    assert await asyncio.to_thread(ended, process, signal.SIGTERM) == 128 + signal.SIGTERM
    await store.close()
    _whole(out.read_bytes().splitlines(), count)


def _grown(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size > size


def _last(path: Path) -> int:
    data = path.read_bytes()
    tail = data[: data.rfind(b"\n")].rsplit(b"\n", 1)[-1]
    return int(json.loads(tail)["position"])


def _whole(found: Sequence[bytes], count: int) -> None:
    """Every record is there; what is there twice has the same id and is the same to the byte."""
    by_id: dict[str, bytes] = {}
    for line in found:
        event = json.loads(line)
        assert by_id.setdefault(event["id"], line) == line
    assert sorted(json.loads(line)["position"] for line in by_id.values()) == list(range(1, count + 1))


@pytest.mark.slow
async def test_a_collector_that_comes_and_goes_gets_everything(tmp_path: Path) -> None:
    store = await journal(tmp_path)
    await grow(store, 0, 1000)
    got: list[bytes] = []
    async with collecting() as (collector, port):
        collector.answers = [web.Response(status=500), web.Response(status=200), web.Response(status=503)]
        process = export(
            tmp_path, "--name", "siem", "--format", "jsonl", "--to", f"http://127.0.0.1:{port}/in"
        )
        await _until(lambda: len(collector.got) >= 1)
        assert await asyncio.to_thread(ended, process, signal.SIGKILL) == -signal.SIGKILL
        got += [line for _, body in collector.got for line in body.splitlines()]
    process = export(tmp_path, "--name", "siem", "--format", "jsonl", "--to", f"http://127.0.0.1:{port}/in")
    await store.close()  # the engine goes and comes back meanwhile
    store = await journal(tmp_path)
    await grow(store, 1000, 500)
    async with collecting(port) as (collector, _):
        await _until(lambda: sum(body.count(b"\n") for _, body in collector.got) + len(got) >= 1500)
        await asyncio.to_thread(ended, process, signal.SIGTERM)
        got += [line for _, body in collector.got for line in body.splitlines()]
    await store.close()
    _whole(got, 1500)


@pytest.mark.slow
async def test_sighup_begins_the_file_anew(tmp_path: Path) -> None:
    out, store = tmp_path / "out", await journal(tmp_path)
    await grow(store, 0, 100)
    process = export(tmp_path, "--name", "siem", "--to", str(out))
    await _until(lambda: out.exists() and out.stat().st_size > 0 and _last(out) == 100)
    out.rename(tmp_path / "out.1")
    process.send_signal(signal.SIGHUP)
    await grow(store, 100, 100)
    await _until(lambda: out.exists() and out.stat().st_size > 0 and _last(out) == 200)
    assert await asyncio.to_thread(ended, process, signal.SIGTERM) == 128 + signal.SIGTERM
    await store.close()
    _whole([*(tmp_path / "out.1").read_bytes().splitlines(), *out.read_bytes().splitlines()], 200)
