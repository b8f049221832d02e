"""Snapshots that were not taken in a pool but put into it: read-only, bounded, and gone when they failed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from dsec.errors import Conflict, StorageFull
from dsec.model.ids import new_sandbox_id, new_snapshot_id
from dsec.stores.layers import BtrfsLayers

pytestmark = [pytest.mark.needs_root, pytest.mark.anyio]

MIB = 2**20


@pytest.fixture
async def layers(tmp_path: Path) -> AsyncIterator[BtrfsLayers]:
    opened = await BtrfsLayers.open(tmp_path, size_bytes=512 * MIB, shelf=2, durable=False)
    yield opened
    await opened.close()


def write(directory: Path, check: Callable[[], None] = lambda: None) -> None:
    (directory / "file").write_bytes(b"content")
    os.mknod(directory / "gone", 0o020000, os.makedev(0, 0))
    os.chown(directory / "file", 1000, 1000)
    directory.chmod(0o750)


async def test_sandboxes_begin_with_what_was_put(layers: BtrfsLayers) -> None:
    snapshot, sandbox = new_snapshot_id(), new_sandbox_id()
    await layers.snapshots.put(snapshot, write, 7)
    await layers.snapshots.secure()
    kept = layers.snapshots.changes(snapshot)
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        (kept / "more").touch()
    with pytest.raises(Conflict):
        await layers.snapshots.put(snapshot, write, 7)
    place = Path(f"/proc/self/fd/{layers.root_fd()}") / await layers.clone(snapshot, sandbox, 16)
    assert (place / "upper/file").read_bytes() == b"content"
    assert (place / "upper").stat().st_mode & 0o7777 == 0o750
    (place / "upper/more").touch()
    assert not os.listdir(place / "work")
    await layers.snapshots.drop(snapshot)
    assert await layers.snapshots.list() == ()
    assert (place / "upper/file").read_bytes() == b"content"


async def test_what_fails_is_dropped(layers: BtrfsLayers) -> None:
    snapshot = new_snapshot_id()

    def fill(directory: Path, check: Callable[[], None]) -> None:
        write(directory)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        await layers.snapshots.put(snapshot, fill, 7)
    await layers.snapshots.drop(snapshot)
    assert snapshot not in os.listdir(f"/proc/self/fd/{layers.root_fd()}")
    await layers.snapshots.put(snapshot, write, 7)


async def test_it_takes_no_more_than_was_said(layers: BtrfsLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.stores.snapshots._OVERHEAD", MIB)
    snapshot = new_snapshot_id()

    def fill(directory: Path, check: Callable[[], None]) -> None:
        with (directory / "big").open("wb", buffering=0) as file:
            for _ in range(64):
                file.write(os.urandom(MIB))
                os.fsync(file.fileno())

    with pytest.raises(StorageFull):
        await layers.snapshots.put(snapshot, fill, 16 * MIB)
    await layers.snapshots.drop(snapshot)
    await layers.snapshots.put(snapshot, fill, 64 * MIB)  # positive control


async def test_a_private_pool_forgets_and_a_durable_one_finds(tmp_path: Path) -> None:
    snapshot = new_snapshot_id()
    layers = await BtrfsLayers.open(tmp_path, size_bytes=256 * MIB, shelf=1, durable=True)
    await layers.snapshots.put(snapshot, write, 7)
    await layers.snapshots.secure()
    await layers.close()
    layers = await BtrfsLayers.open(tmp_path, shelf=1, durable=True)
    try:
        assert await layers.snapshots.list() == (snapshot,)
        assert (layers.snapshots.changes(snapshot) / "file").read_bytes() == b"content"
    finally:
        await layers.close()


async def test_it_takes_no_room_of_sandboxes_that_run(layers: BtrfsLayers) -> None:
    """512 MiB, of which 64 are kept: what would leave less is refused before the first byte is written."""
    with pytest.raises(StorageFull, match="kept for sandboxes that run"):
        await layers.snapshots.put(new_snapshot_id(), write, 460 * MIB)
    assert await layers.snapshots.list() == ()


async def test_sandboxes_do_not_wait_for_copies_and_closing_ends_them(tmp_path: Path) -> None:
    """Six copies that would take for ever: layers are made and given back beside them."""
    opened = await BtrfsLayers.open(tmp_path, size_bytes=512 * MIB, shelf=0, durable=True)
    begun, never = threading.Semaphore(0), threading.Event()
    ended: list[BaseException] = []

    def fill(directory: Path, check: Callable[[], None]) -> None:
        begun.release()
        while not never.wait(0.01):
            check()

    async def copy() -> None:
        try:
            await opened.snapshots.put(new_snapshot_id(), fill, MIB)
        except Conflict as error:
            ended.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(copy)
        await to_thread.run_sync(begun.acquire)
        for _ in range(3):
            sandbox = new_sandbox_id()
            await opened.create(sandbox, 16)
            await opened.discard(sandbox)
        await opened.close()
    assert len(ended) == 6
