"""Copies that are made of a journal while it is written to."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from dsec.errors import Conflict, NotFound, StoreDamaged
from dsec.model.journal import Draft, Finding, Phase
from dsec.stores.backup import copy_checkpoints, copy_database
from dsec.stores.journal import SqliteStore
from dsec.stores.keeper import Pace
from dsec.stores.reader import verify
from dsec.wiring.backups import back_up

pytestmark = pytest.mark.anyio


async def opened(home: Path) -> SqliteStore:
    pace = Pace(records=20, seconds=0.01)
    return await SqliteStore.open(
        home / "journal", key=home / "keys" / "journal.key", engine_id="en-test", pace=pace
    )


def note(n: int) -> Draft:
    return Draft(chain=f"c{n % 7}", act="a", phase=Phase.NOTE, payload={"n": n})


def found_in(home: Path) -> tuple[Finding, ...]:
    return verify(home / "journal", home / "keys" / "journal.key")


def modes(home: Path) -> set[int]:
    return {one.stat().st_mode & 0o077 for one in (home, *home.rglob("*"))}


async def test_a_copy_is_sound_however_much_is_written_meanwhile(tmp_path: Path) -> None:
    home, done = tmp_path / "home", False
    store = await opened(home)

    async def write() -> None:
        n = 0
        while not done:
            await store.append(note(n))
            n += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        for number in range(5):
            target = tmp_path / "copies" / str(number)
            await anyio.to_thread.run_sync(back_up, home, target)
            assert await anyio.to_thread.run_sync(found_in, target) == ()
            assert modes(target) == {0}
        done = True
    await store.close()


async def test_a_copy_can_be_gone_on_with(tmp_path: Path) -> None:
    store = await opened(tmp_path / "home")
    await store.append(note(1))
    await anyio.to_thread.run_sync(back_up, tmp_path / "home", tmp_path / "copy")
    await store.append(note(8))
    await store.close()
    store = await opened(tmp_path / "copy")
    assert [one.payload for one in await store.read("c1")] == [{"n": 1}]
    assert (await store.append(note(1)))[0].seq == 2
    await store.close()
    assert await anyio.to_thread.run_sync(found_in, tmp_path / "copy") == ()


async def test_files_that_are_copied_one_after_the_other_do_not_fit_together(tmp_path: Path) -> None:
    """What the whole copy is for: later checkpoints sign what an earlier journal does not hold."""
    home, copy = tmp_path / "home", tmp_path / "copy"
    (copy / "journal").mkdir(parents=True)
    store = await opened(home)
    await store.append(note(1))
    await anyio.to_thread.run_sync(copy_database, home / "journal/journal.db", copy / "journal/journal.db")
    await store.append(note(1))
    await store.close()  # which signs what there is
    await anyio.to_thread.run_sync(shutil.copytree, home / "keys", copy / "keys")
    later = copy / "journal/checkpoints.jsonl"
    await anyio.to_thread.run_sync(shutil.copy, home / "journal/checkpoints.jsonl", later)
    assert await anyio.to_thread.run_sync(found_in, copy) != ()
    later.unlink()
    await anyio.to_thread.run_sync(
        copy_checkpoints, home / "journal/checkpoints.jsonl", later, copy / "journal/journal.db"
    )
    assert await anyio.to_thread.run_sync(found_in, copy) == ()


async def test_a_file_of_checkpoints_that_was_cut_is_told_of(tmp_path: Path) -> None:
    store = await opened(tmp_path / "home")
    await store.append(note(1))
    await store.close()
    (tmp_path / "home/journal/checkpoints.jsonl").write_bytes(b"")
    with pytest.raises(StoreDamaged, match="checkpoints"):
        await anyio.to_thread.run_sync(back_up, tmp_path / "home", tmp_path / "copy")


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        back_up(tmp_path / "home", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    (tmp_path / "home/journal").mkdir(parents=True)
    (tmp_path / "home/journal/journal.db").touch()
    (tmp_path / "copy").mkdir()
    with pytest.raises(Conflict, match="copy"):
        back_up(tmp_path / "home", tmp_path / "copy")
