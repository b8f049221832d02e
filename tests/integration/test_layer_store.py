"""Layers made once, by many at a time, however few threads there are; and nothing of those whose maker went away."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from dsec.errors import BadRequest, Busy, DsecError, StorageFull, StoreDamaged
from dsec.images import layer_store
from dsec.images.attended import threaded
from dsec.images.builds import open_lock, try_lock
from dsec.images.layer_store import LayerStore
from dsec.images.system import make_erofs
from dsec.images.tools import Check, Stopped
from dsec.images.tree import tree_digest
from dsec.testing.harness import until

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]
MANY = 41


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
async def one_thread() -> AsyncIterator[None]:
    """All that there is for everybody: who held one while others work for him would never be done."""
    limiter = to_thread.current_default_thread_limiter()
    before, limiter.total_tokens = limiter.total_tokens, 1
    yield
    limiter.total_tokens = before


def written(tree: Path, text: str) -> None:
    (tree / "file").write_text(text)
    os.utime(tree / "file", (1, 1))
    os.utime(tree, (1, 1))


def _filled(text: str, tree: Path, check: Check) -> None:
    written(tree, text)


class Filling:
    """Counts how often it fills, needing threads as builds do."""

    def __init__(self) -> None:
        self.count = self.now = self.most = 0

    async def __call__(self, tree: Path) -> None:
        self.count += 1
        text = str(self.count)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        await to_thread.run_sync(written, tree, text)
        self.now -= 1


@pytest.mark.anyio
@pytest.mark.usefixtures("one_thread")
async def test_many_who_ask_for_one_layer_make_it_once(root: Path) -> None:
    store, fill = LayerStore(root), Filling()
    images = await asyncio.gather(*(store.keep("layer", fill) for _ in range(MANY)))
    assert len({image.digest for image in images}) == 1
    assert fill.count == 1


@pytest.mark.anyio
@pytest.mark.usefixtures("one_thread")
async def test_many_layers_are_made_a_few_at_a_time(root: Path) -> None:
    store, fill = LayerStore(root), Filling()
    images = await asyncio.gather(*(store.keep(f"layer{number}", fill) for number in range(MANY)))
    assert len({image.digest for image in images}) == MANY
    assert fill.count == MANY
    assert 1 < fill.most <= layer_store.AT_ONCE


@pytest.mark.anyio
async def test_too_many_are_refused_at_once(root: Path) -> None:
    store, gate = LayerStore(root, at_once=1, most=2), asyncio.Event()

    async def fill(tree: Path) -> None:
        await gate.wait()

    tasks = [asyncio.create_task(store.keep(f"layer{number}", fill)) for number in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(Busy):
        await store.keep("another", fill)
    gate.set()
    await asyncio.gather(*tasks)
    await store.keep("another", fill)


def is_free(path: Path) -> bool:
    descriptor = open_lock(path)
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["task", "scope"])
@pytest.mark.parametrize("where", ["thread", "loop"])
async def test_a_maker_who_is_cancelled_leaves_nothing(root: Path, how: str, where: str) -> None:
    """Neither a thread nor a lock nor a file, when he hears of it."""
    store, begun, ended = LayerStore(root), threading.Event(), threading.Event()

    def work(tree: Path, check: Check) -> None:
        begun.set()
        try:
            while True:
                (tree / "more").touch()
                check()
        finally:
            ended.set()

    async def wait(tree: Path) -> None:
        begun.set()
        try:
            await anyio.sleep(600)
        finally:
            await asyncio.sleep(0.01)  # as ending a sandbox takes its time
            ended.set()

    fill = threaded(work) if where == "thread" else wait
    if how == "task":
        task = asyncio.create_task(store.keep("layer", fill))
        await until(begun.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        async with anyio.create_task_group() as group:
            group.start_soon(store.keep, "layer", fill)
            await until(begun.is_set)
            group.cancel_scope.cancel()
    assert ended.is_set()
    assert is_free(root / "locks/layer")
    assert await to_thread.run_sync(os.listdir, root / "building") == []
    await store.keep("layer", Filling())


@pytest.mark.anyio
async def test_who_waits_for_another_can_go(root: Path) -> None:
    store, gate = LayerStore(root), asyncio.Event()

    async def fill(tree: Path) -> None:
        await gate.wait()

    first = asyncio.create_task(store.keep("layer", fill))
    await until(lambda: (root / "locks/layer").exists() and not is_free(root / "locks/layer"))
    second = asyncio.create_task(store.keep("layer", fill))
    await asyncio.sleep(0.1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    assert (await first).digest == (await store.keep("layer", fill)).digest


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFull), (errno.EIO, StoreDamaged), (errno.EMFILE, Busy)],
)
async def test_errors_of_the_disk_are_told_by_name(root: Path, number: int, kind: type[DsecError]) -> None:
    def fill(tree: Path, check: Check) -> None:
        raise OSError(number, os.strerror(number), str(tree / "x"))

    with pytest.raises(kind) as caught:
        await LayerStore(root).keep("layer", threaded(fill))
    assert caught.value.hint
    assert await to_thread.run_sync(os.listdir, root / "building") == []


@pytest.mark.anyio
async def test_trees_are_adopted_all_together_and_without_a_name(root: Path, tmp_path: Path) -> None:
    digests = []
    for number in range(2):
        tree = tmp_path / str(number)
        await anyio.Path(tree).mkdir(mode=0o755)
        await to_thread.run_sync(written, tree, str(number))
        digests.append(await to_thread.run_sync(tree_digest, tree))
    fills = [threaded(partial(_filled, str(number))) for number in range(2)]
    store = LayerStore(root)
    with pytest.raises(BadRequest, match="what is said to be"):
        await store.adopt(dict(zip(digests, fills[::-1], strict=True)))
    with pytest.raises(BadRequest, match="what is said to be"):
        await store.adopt({digests[0]: fills[0], f"sha256:{'0' * 64}": fills[1]})
    assert await to_thread.run_sync(os.listdir, root / "images") == [], (
        "one of two was what it was said to be"
    )
    await store.adopt(dict(zip(digests, fills, strict=True)))
    names = await to_thread.run_sync(os.listdir, root / "images")
    assert sorted(f"sha256:{name[:64]}" for name in names if name.endswith(".erofs")) == sorted(digests)
    assert await to_thread.run_sync(os.listdir, root / "names") == []

    async def refuse(tree: Path) -> None:
        raise AssertionError("it is stored already")

    await store.adopt(dict.fromkeys(digests, refuse))


def test_a_maker_of_images_dies_when_nobody_waits(tmp_path: Path) -> None:
    tool, told = tmp_path / "mkfs", tmp_path / "pid"
    tool.write_text(f"#!/bin/sh\necho $$ > {told}.half && mv {told}.half {told}\nexec sleep 600\n")
    tool.chmod(0o700)
    tree = tmp_path / "tree"
    tree.mkdir()

    def check() -> None:
        if told.exists():
            raise Stopped

    with pytest.raises(Stopped):
        make_erofs(str(tool), tree, tmp_path / "image", "x", check=check)
    assert not os.path.exists(f"/proc/{told.read_text().strip()}")
