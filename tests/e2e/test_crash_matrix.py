"""A server is killed at every failpoint there is; what its successor knows, and what the kernel has, must agree.

The server is a real ``dsec serve`` (most are forked after its imports, which are two seconds of a start), asked over its socket by the SDK, which asks again when an answer is lost: the same request, by its key, of the next
server. Beside each act a command runs that ends while no server does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from dsec import Dsec, Settings
from dsec.client.sync import Exec, Sandbox
from dsec.errors import DsecError
from dsec.failpoints import NAMES
from dsec.model.sandbox import State
from dsec.stores.layers import BtrfsLayers
from dsec.testing.crash_acts import ACTS, Act, Case
from dsec.testing.crashes import Home, Server, until
from dsec.testing.databases import NewDatabase
from dsec.testing.nursery import Nursery
from dsec.wiring import verify_journal

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(90)]

POOL_BYTES = 256 * 2**20
UNSURE = ("unknown_outcome", "sandbox_failed")
LIVE = (State.RUNNING, State.PAUSED)
WAITS = "trap 'echo over; exit 5' USR1; echo ran >> ran; while :; do sleep 0.01; done"
LEVEL = "container"
BARE = ("create", "destroy", "pause", "resume", "exec", "upload", "journal")
"""First words of the failpoints that level `process` reaches, which has no layers."""
STRIKES = (
    ("create.recorded", "both"),
    ("create.made", "both"),
    ("fork.copied", "both"),
    ("exec.started", "both"),
    ("pause.frozen", "both"),
    ("hibernate.recorded", "both"),
    ("wake.made", "both"),
    ("destroy.recorded", "both"),
)


ALONE = (
    "create.recorded",
    "create.made",
    "destroy.recorded",
    "pause.recorded",
    "exec.recorded",
    "fork.copied",
    "snapshot.recorded",
    "hibernate.recorded",
    "wake.recorded",
    "wake.made",
)
"""A spawner is killed while its server stands still there."""
IN_POSTGRESQL = (
    "create.made",
    "destroy.recorded",
    "pause.frozen",
    "resume.recorded",
    "snapshot.secured",
    "fork.made",
    "rollback.made",
    "exec.ended",
    "upload.written",
    "journal.begin",
    "journal.written",
    "journal.committed",
    "wake.made",
    "hibernate.parked",
)
"""The steps of a transaction, and one of each act."""


class Matrix:
    """One home for all cases, and the server that is not armed, which judges one case and prepares the next."""

    def __init__(self, path: Path, images: Path, database: str) -> None:
        self.home = Home(path)
        (path / "store").symlink_to(images)
        settings = Settings(images=images, pool=0, pool_bytes=POOL_BYTES, database=database)
        with Dsec(self.home.engine, settings=settings) as dsec:
            dsec.sandboxes.create(level=LEVEL).destroy()  # so small is the file of its layers from now on
        self.nursery = Nursery()
        self.server = Server(self.home, nursery=self.nursery)
        until(self.server.answers, "a first server")  # with the imports of the nursery

    def arm(self, failpoint: str) -> None:
        """Let the server end there; one that has heard of it."""
        if not self.server.arms:
            self.restart()
        self.server.arm(failpoint)

    def restart(self, *, whole: bool = False) -> None:
        """Kill this server; the next one must answer in time. ``whole``: its imports are part of that."""
        self.server.kill()
        self.server = Server(self.home, nursery=None if whole else self.nursery)
        self.server.ready()

    def clear(self) -> None:
        """Destroy all that is there, so that a case that failed fails alone."""
        self.restart()
        with Dsec(self.home.url) as dsec:
            for info in dsec.sandboxes.list():
                if info.state in (*LIVE, State.HIBERNATED):
                    dsec.sandboxes.get(info.id).destroy()

    def close(self) -> None:
        """Nothing is left when the last sandbox is gone, neither of kernel objects nor of files."""
        self.clear()
        assert self.server.stop() == 0
        assert verify_journal(self.home.engine) == ()
        until(lambda: not self.home.traces(), f"removal of {self.home.traces()}", 5)
        assert anyio.run(_layers, self.home.engine) == ()


async def _layers(engine: Path) -> tuple[str, ...]:
    layers = await BtrfsLayers.open(engine, size_bytes=POOL_BYTES, durable=True)
    try:
        return await layers.list()
    finally:
        await layers.close()


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> None:
    """The server outlives a case; what a case leaves is judged by :func:`crash`, and at the end by the census of the module."""


@pytest.fixture(scope="module")
def matrix(
    tmp_path_factory: pytest.TempPathFactory, image_store: Path, new_database: NewDatabase
) -> Iterator[Matrix]:
    with new_database() as url:
        one = Matrix(tmp_path_factory.mktemp("m") / "h", image_store, url)
        try:
            yield one
            one.close()
        finally:
            one.server.kill()
            one.nursery.close()
            one.home.kill_spawners()
            (one.home.engine / "layers.img").unlink(missing_ok=True)  # big


@contextmanager
def asked(act: Act, case: Case) -> Iterator[threading.Thread]:
    """The act, under way at a server that will be killed; it has been answered, by whichever server, afterwards."""

    def ask() -> None:
        try:
            case.answer = act.do(case)
        except DsecError as error:
            case.error = error

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)
        assert not thread.is_alive()


def prepared(matrix: Matrix, act: Act, level: str = LEVEL) -> tuple[Case, Sandbox, Exec]:
    """What the act is done to, and a bystander with a command."""
    with Dsec(matrix.home.url) as dsec:
        case = Case(dsec, dsec.sandboxes.create(level=level), level)
        act.prepare(case)
        beside = dsec.sandboxes.create(level=level)
        waits = beside.start(WAITS)
        until(lambda: beside.files.exists("ran"), "the command beside")
        return case, beside, waits


def end_beside(home: Home) -> None:
    """Let the command beside end, and see that it has; no server is asked."""
    (pid,) = home.running(WAITS)
    os.kill(pid, signal.SIGUSR1)
    until(lambda: not home.running(WAITS), "the end of the command beside")


def struck(matrix: Matrix, act: Act, case: Case, failpoint: str, victim: str) -> None:
    """Do it at a server that dies there, let the command beside end, and start another server."""
    if failpoint == "journal.written":
        matrix.restart()  # a record is one statement without it, where the end of its chain is in memory
    matrix.arm(failpoint)
    with Dsec(matrix.home.url) as dsec:
        case.dsec, case.sandbox = dsec, dsec.sandboxes.get(case.sandbox.id)
        with asked(act, case) as thread:
            until(lambda: matrix.server.killed or not thread.is_alive(), f"{failpoint} is reached")
            until(lambda: matrix.server.killed, f"{failpoint} is reached: {case.error!r}", 5)
            if victim == "both":
                assert matrix.home.kill_spawners()
            end_beside(matrix.home)
            matrix.restart(whole=victim == "both")


def bereft(matrix: Matrix, act: Act, case: Case, failpoint: str, victim: str) -> None:
    """Do it at a server that loses its spawners there, and lives. What failed for that, and says that it can be asked again, is."""
    del victim
    matrix.arm(f"{failpoint}:1:stop")
    with Dsec(matrix.home.url) as dsec:
        case.dsec, case.sandbox = dsec, dsec.sandboxes.get(case.sandbox.id)
        with asked(act, case):
            until(lambda: matrix.server.halted, f"{failpoint} is reached: {case.error!r}")
            assert matrix.home.kill_spawners()
            until(lambda: not matrix.home.spawners(), "the end of the spawners")
            matrix.server.go_on()
        if case.error is not None and case.error.retryable:
            case.error = None
            with asked(act, case):
                pass
        end_beside(matrix.home)


def judged(matrix: Matrix, act: Act, case: Case, failpoint: str, before: set[str]) -> None:
    """What the successor knows of the act, and whether the kernel agrees."""
    with Dsec(matrix.home.url) as dsec:
        assert case.error is None or (not act.sure and case.error.code in UNSURE), f"{case.error!r}"
        fresh = act.judge(case, dsec)
        state = dsec.sandboxes.get(case.sandbox.id).info.state
        assert state is not State.LOST or failpoint in act.ends
        living = {info.id for info in dsec.sandboxes.list() if info.state in LIVE}
        assert living - before == set(fresh)
        assert living == set(matrix.home.inits())
        assert dsec.problems() == ()
        assert verify_journal(matrix.home.engine) == ()
        for sandbox in fresh:
            dsec.sandboxes.get(sandbox).destroy()


def ended_truly(matrix: Matrix, beside: Sandbox, waits: Exec) -> None:
    """The command that ended while no server ran has its outcome, and ran once."""
    with Dsec(matrix.home.url) as dsec:
        one = dsec.sandboxes.get(beside.id)
        result = one.attach(waits.id).wait()
        assert (result.exit_code, result.stdout) == (5, b"over\n")
        assert one.files.read("ran") == b"ran\n"
        told = [record for record in one.events() if record.ref == waits.id and record.act == "exec"]
        assert [record.phase.value for record in told] == ["intent", "result"]


def crash(matrix: Matrix, failpoint: str, victim: str = "server", level: str = LEVEL) -> None:
    try:
        _crash(matrix, failpoint, victim, level)
    except BaseException:
        matrix.clear()
        raise


def _crash(matrix: Matrix, failpoint: str, victim: str, level: str) -> None:
    act = ACTS[failpoint.partition(".")[0]]
    case, beside, waits = prepared(matrix, act, level)
    with Dsec(matrix.home.url) as dsec:
        before = {info.id for info in dsec.sandboxes.list() if info.state in LIVE} | {case.sandbox.id}
    (bereft if victim == "spawners" else struck)(matrix, act, case, failpoint, victim)
    judged(matrix, act, case, failpoint, before)
    ended_truly(matrix, beside, waits)
    with Dsec(matrix.home.url) as dsec:
        for sandbox in (case.sandbox.id, beside.id):
            dsec.sandboxes.get(sandbox).destroy()
    assert matrix.home.inits() == {}


@pytest.mark.parametrize("failpoint", NAMES)
def test_killed_at(matrix: Matrix, failpoint: str) -> None:
    crash(matrix, failpoint)


@pytest.mark.parametrize(("failpoint", "victim"), STRIKES)
def test_killed_with_its_spawners_at(matrix: Matrix, failpoint: str, victim: str) -> None:
    crash(matrix, failpoint, victim)


@pytest.mark.parametrize("failpoint", [name for name in NAMES if name.partition(".")[0] in BARE])
def test_killed_at_level_process_at(matrix: Matrix, failpoint: str) -> None:
    crash(matrix, failpoint, level="process")


@pytest.mark.parametrize("failpoint", ALONE)
def test_its_spawners_are_killed_at(matrix: Matrix, failpoint: str) -> None:
    crash(matrix, failpoint, "spawners")


@pytest.mark.in_postgresql
@pytest.mark.parametrize("failpoint", IN_POSTGRESQL)
def test_killed_in_postgresql_at(matrix: Matrix, failpoint: str) -> None:
    crash(matrix, failpoint)


def test_a_failpoint_that_is_not_reached_is_no_success(matrix: Matrix) -> None:
    act = ACTS["pause"]
    case, _, _ = prepared(matrix, act)
    with pytest.raises(AssertionError, match=r"fork\.made is reached"):
        struck(matrix, act, case, "fork.made", "server")
    matrix.clear()
