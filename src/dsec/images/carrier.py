"""Bundles going out of an image store and coming in, piece by piece, so that a connection can carry them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from anyio import CancelScope, CapacityLimiter, to_thread

from dsec.errors import BadRequest, StoreDamaged, TooLarge
from dsec.images.attended import attended, threaded
from dsec.images.builds import work_directory
from dsec.images.bundle import Bundle, Part, head, pack_tree, read_bundle, unpack_part
from dsec.images.disk import typed
from dsec.images.layer_store import LayerStore, check_tree
from dsec.images.shelf import Shelf
from dsec.images.tools import Check
from dsec.images.tree import content_bytes, tree_digest
from dsec.images.unpack import MAX_BYTES
from dsec.ports.storage import Image

Tree = AbstractContextManager[Path]
_PIECE: Final = 2**20
_THREADS: Final = 8
"""For what takes long: not the default ones, which everybody needs for moments."""


@dataclass(frozen=True, slots=True)
class OwnTree:
    """A tree in a directory of its own. ``size``: bytes of its files."""

    path: Path
    digest: str
    size: int

    def looked(self) -> Tree:
        """It, to be packed."""
        return nullcontext(self.path)


class Carrier:
    """Shares the directory of :class:`~dsec.images.store.ImageStore`.

    Args:
        root: of the store.
        max_bytes: of a bundle, and of the files of one tree.
    """

    def __init__(self, root: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._layers = LayerStore(root)
        self._threads = CapacityLimiter(_THREADS)

    async def pack(
        self, kind: str, about: Mapping[str, Any], trees: Sequence[tuple[str, Tree]]
    ) -> AsyncGenerator[bytes, None]:
        """A bundle, in pieces. All is packed before the first one leaves.

        Args:
            trees: of each its digest, and what it is while it is looked at.

        Raises: StorageFull, StoreDamaged, Denied, Busy. What ``trees`` raise.
        """
        async with self._work() as work:
            sizes = []
            for number, (_, tree) in enumerate(trees):
                packing = partial(self._pack, tree, work / str(number))
                sizes.append(await attended(packing, limiter=self._threads))
            begin = head(
                kind, about, [(digest, size) for (digest, _), size in zip(trees, sizes, strict=True)]
            )
            sums = hashlib.sha256(begin)
            yield begin
            for number in range(len(trees)):
                async for data in self._content(work / str(number)):
                    sums.update(data)
                    yield data
            yield sums.digest()

    def _pack(self, tree: Tree, file: Path, check: Check) -> int:
        """Bytes of the archive."""
        with typed(self._root), tree as path:
            pack_tree(path, file, check)
            return file.stat().st_size

    async def _content(self, path: Path) -> AsyncIterator[bytes]:
        with await to_thread.run_sync(path.open, "rb") as file:
            while data := await to_thread.run_sync(file.read, _PIECE):
                yield data

    @asynccontextmanager
    async def arrived(self, kind: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[Bundle]:
        """A bundle of that kind, taken in whole and undamaged; it goes at the end.

        Raises: BadRequest, TooLarge, StorageFull, Denied, Busy. What ``pieces`` raises.
        """
        async with self._work() as work:
            path = work / "bundle"
            await self._take(pieces, path)
            yield await attended(partial(self._read, path, kind), limiter=self._threads)

    def _read(self, path: Path, kind: str, check: Check) -> Bundle:
        with typed(self._root):
            return read_bundle(path, kind, check=check)

    async def _take(self, pieces: AsyncIterator[bytes], path: Path) -> None:
        size = 0
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context(await to_thread.run_sync(path.open, "xb"))
            async for piece in pieces:
                size += len(piece)
                if size > self._max_bytes:
                    raise TooLarge(
                        f"a bundle of more than {self._max_bytes:,} bytes",
                        hint="use smaller images",
                        limit=self._max_bytes,
                    )
                await to_thread.run_sync(self._write, file, piece)

    def _write(self, file: BinaryIO, piece: bytes) -> None:
        with typed(self._root):
            file.write(piece)
            file.flush()

    async def images(self, bundle: Bundle, digests: Sequence[str]) -> tuple[Image, ...]:
        """The images of trees of a bundle, made of it unless they are stored already. All trees are looked at before an image is made.

        Raises:
            BadRequest: the bundle does not have one, is hostile, has another tree in its place, or means an image that shows this machine.
            TooLarge, StorageFull, Unsupported, Busy, RuntimeUnavailable, Denied, StoreDamaged.
        """
        parts = [bundle.part(digest) for digest in dict.fromkeys(digests)]
        for part in parts:
            await attended(partial(self._stored, part))
        await self._layers.adopt(
            {part.digest: threaded(partial(self._unpack, bundle, part)) for part in parts}
        )
        found = [await attended(partial(self._stored, part)) for part in parts]
        return tuple(image for image in found if image is not None)

    def _stored(self, part: Part, _: Check) -> Image | None:
        """The image of a tree, None when there is none, or a damaged one.  Raises: BadRequest: it shows this machine."""
        with suppress(StoreDamaged):
            image = Shelf(self._root).by_digest(part.digest, part.digest)
            if image is not None and image.mutable:
                raise BadRequest(
                    f"a bundle with {image.digest}, which here is base {image.name!r}: that shows programs of this machine",
                    hint="get another one, with a base that does not change",
                    digest=image.digest,
                )
            return image
        return None

    def _unpack(self, bundle: Bundle, part: Part, tree: Path, check: Check) -> None:
        unpack_part(bundle, part, tree, max_bytes=self._max_bytes, check=check)

    @asynccontextmanager
    async def tree(self, fill: Callable[[Path, Check], None]) -> AsyncIterator[OwnTree]:
        """A tree that ``fill`` writes into an empty directory, in a thread; it goes at the end.

        Raises: StorageFull, Denied, Busy. What ``fill`` raises.
        """
        async with self._work() as work:
            yield await attended(partial(self._fill, work / "tree", fill), limiter=self._threads)

    @asynccontextmanager
    async def unpacked(self, bundle: Bundle, digest: str) -> AsyncIterator[OwnTree]:
        """The tree of a bundle that has this digest; it goes at the end.  Raises: as :meth:`images`."""
        part = bundle.part(digest)

        def fill(tree: Path, check: Check) -> None:
            unpack_part(bundle, part, tree, max_bytes=self._max_bytes, check=check)

        async with self.tree(fill) as own:
            check_tree(digest, own.digest)
            yield own

    def _fill(self, tree: Path, fill: Callable[[Path, Check], None], check: Check) -> OwnTree:
        with typed(self._root):
            tree.mkdir(mode=0o755)
            fill(tree, check)
            check()
            return OwnTree(tree, tree_digest(tree, check=check), content_bytes(tree))

    @asynccontextmanager
    async def _work(self) -> AsyncIterator[Path]:
        """A directory that goes at the end, or with the process."""
        stack = ExitStack()
        try:
            yield await attended(lambda _: self._begin(stack))
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(stack.close)

    def _begin(self, stack: ExitStack) -> Path:
        Shelf(self._root).prepare()
        return stack.enter_context(work_directory(self._root))
