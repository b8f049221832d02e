"""What lies over a base: packages, set-up, the files of a snapshot; each a read-only layer that is made once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from anyio import CapacityLimiter

from dsec.control.building import RECIPE as BUILD_RECIPE
from dsec.control.building import Builder, Step, clear_scratch, steps_of
from dsec.errors import BadRequest, NotFound, Unsupported
from dsec.images.attended import Fill, Turns, attended, threaded
from dsec.images.dependencies.bounds import Index
from dsec.images.dependencies.cache import WheelCache
from dsec.images.dependencies.inside import find
from dsec.images.dependencies.install import RECIPE, install, settle, take_bytecode
from dsec.images.dependencies.lock import Lock, parse_lock
from dsec.images.dependencies.resolve import resolve
from dsec.images.dependencies.target import read_target
from dsec.images.disk import damaged, read_small, typed
from dsec.images.layer_copy import copy_layer, merge_layers
from dsec.images.shelf import write_whole
from dsec.images.tools import Check
from dsec.model.ids import SnapshotId
from dsec.model.images import Progress, silent
from dsec.model.images import Step as Doing
from dsec.model.sandbox import SandboxSpec
from dsec.model.template import Template
from dsec.ports.engine import Changes
from dsec.ports.storage import Image, Images

Look = Callable[[Image], AbstractContextManager[Path]]
Keep = Callable[[str, Fill], Awaitable[Image]]
MOST_LAYERS: Final = 30
"""Over a base. Beyond it they become one, so that a template made of templates stays as fast as the first."""

_BYTECODE: Final = "bytecode"
_LOCKING_AT_ONCE: Final = 4
_LOCKING_MOST: Final = 256
_LOOKING_AT_ONCE: Final = 4  # through all files of a base


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the files of a base tell. ``has_place``: commands can run where the template says. ``newest``: date of a file, ns."""

    has_place: bool
    newest: int


class Layering:
    """Makes layers.

    Args:
        images: where layers are found by their digest. keep: makes a layer once. look: the tree of an image, to be read.
        changes: what snapshots hold. builder: runs what must run.
        root: of locks and wheels. index: where wheels come from; None = as pip is configured here.
        progress: told, from any thread, what a long build is doing.
    """

    def __init__(
        self,
        images: Images,
        keep: Keep,
        look: Look,
        changes: Changes,
        builder: Builder,
        root: Path,
        *,
        index: Index | None = None,
        progress: Progress = silent,
    ) -> None:
        self._progress = progress
        self._images = images
        self._keep = keep
        self._look = look
        self._changes = changes
        self._builder = builder
        self._index = index
        self._locks = root / "locks"
        self._cache = WheelCache(root / "wheels")
        self._locking = Turns(_LOCKING_AT_ONCE, _LOCKING_MOST)
        self._looking = CapacityLimiter(_LOOKING_AT_ONCE)

    async def over(
        self, template: Template, base: Image, strict: bool, update: bool
    ) -> tuple[tuple[str, ...], Lock | None]:
        """Digests of what lies over the base, topmost first, and the lock of the dependencies."""
        try:
            return await self._over(template, base, strict, update)
        finally:
            self._progress(Doing("done", over=True))

    async def _over(
        self, template: Template, base: Image, strict: bool, update: bool
    ) -> tuple[tuple[str, ...], Lock | None]:
        seen = await attended(partial(self._examined, template, base), limiter=self._looking)
        lock = await self._lock(template.runtime.dependencies, base, strict, update)
        layers: tuple[str, ...] = ()
        if lock is not None:
            layers = ((await self._dependencies(base, lock)).digest,)
        steps = steps_of(template)
        if steps:
            layers = _over((await self._set_up(template, base, layers, steps, seen)).digest, layers)
        return layers, lock

    def _examined(self, template: Template, base: Image, check: Check) -> _Seen:
        """What can be told from the base's own files."""
        runtime = template.runtime
        if runtime.dependencies and base.mutable:
            raise Unsupported(
                f"runtime.dependencies: base {base.name!r} can change under what would be locked for its Python",
                hint="take a base that cannot",
                field="runtime.dependencies",
            )
        with self._looked(base) as tree:
            has_place = _has_directory(tree, runtime.workdir)
            if not has_place and not runtime.setup:
                raise BadRequest(
                    f"runtime.workdir: there is no directory {runtime.workdir} in the base",
                    hint="/workspace is in every base; a command of runtime.setup can make another",
                    field="runtime.workdir",
                )
            return _Seen(has_place=has_place, newest=_newest(tree, check) if steps_of(template) else 0)

    @contextmanager
    def _looked(self, image: Image) -> Iterator[Path]:
        """Its tree, while it is read.  Raises: NotFound: it was collected. StoreDamaged, Busy, Denied, Unsupported."""
        with ExitStack() as stack, typed(image.path):
            try:
                tree = stack.enter_context(self._look(image))
            except FileNotFoundError as error:
                raise NotFound(
                    f"image {image.name!r} ({image.digest}) is stored no more",
                    hint="do this again; the image is built again then, if it has a name",
                    digest=image.digest,
                ) from error
            yield tree

    async def _dependencies(self, base: Image, lock: Lock) -> Image:
        """The packages as one layer, with the byte code that the Python of the base makes of them."""
        plain = await self._keep(
            _key("dependencies", RECIPE, lock.digest), threaded(partial(self._install, lock))
        )
        spec = SandboxSpec(base=base.name, base_digest=base.digest, layers=(plain.digest,))

        def copy(tree: Path, check: Check) -> None:
            with self._looked(plain) as files:
                copy_layer(files, tree, check=check)
            tree.with_name(_BYTECODE).mkdir()

        def finish(tree: Path, check: Check) -> None:
            take_bytecode(tree.with_name(_BYTECODE), tree, lock.target, check=check)
            settle(tree)

        async def fill(tree: Path) -> None:
            await threaded(copy)(tree)
            await self._builder.compile(spec, lock.target, tree.with_name(_BYTECODE))
            await threaded(finish)(tree)

        return await self._keep(_key("compiled", RECIPE, base.digest, plain.digest), fill)

    async def _set_up(
        self, template: Template, base: Image, layers: tuple[str, ...], steps: tuple[Step, ...], seen: _Seen
    ) -> Image:
        """What packages and set-up change, as a layer: made once from the same steps over the same layers."""
        runtime = template.runtime
        self._progress(Doing("setting up"))
        if base.mutable:
            raise Unsupported(
                f"runtime.setup: base {base.name!r} can change under what would be built over it",
                hint="take a base that cannot",
            )
        spec = SandboxSpec(
            base=base.name,
            base_digest=base.digest,
            layers=layers,
            env=runtime.env,
            workdir=runtime.workdir if seen.has_place else "/",
            template=template.name,
        )
        about = [
            [step.argv for step in steps],
            dict(sorted(runtime.env.items())),
            spec.workdir,
            runtime.workdir,
        ]

        async def fill(tree: Path) -> None:
            missing = "" if seen.has_place else runtime.workdir
            await self._builder.run(spec, steps, tree, latest=seen.newest, workdir=missing)

        return await self._keep(_key("setup", BUILD_RECIPE, base.digest, *layers, json.dumps(about)), fill)

    async def _lock(self, wanted: tuple[str, ...], base: Image, strict: bool, update: bool) -> Lock | None:
        """The lock of these requirements over this base: made once, and the same from then on. None: nothing is required."""
        if not wanted:
            return None
        about = json.dumps([base.digest, sorted(wanted)]).encode()
        path = self._locks / f"{hashlib.sha256(about).hexdigest()}.json"
        if not update:
            found = await attended(lambda _: _read_lock(path))
            if found is not None:
                return found
        with self._locking.admitted():
            async with self._locking.turn():
                return await attended(partial(self._resolve, path, wanted, base, strict))

    def _resolve(self, path: Path, wanted: tuple[str, ...], base: Image, strict: bool, check: Check) -> Lock:
        self._progress(Doing(f"locking {len(wanted)} {'dependency' if len(wanted) == 1 else 'dependencies'}"))
        with self._looked(base) as tree:
            target = read_target(tree)
        with typed(self._locks):
            lock = resolve(wanted, target, cache=self._cache, index=self._index, strict=strict, check=check)
            self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, lock.text.encode())  # others may be making the same one
        return lock

    def _install(self, lock: Lock, tree: Path, check: Check) -> None:
        self._progress(Doing(f"installing {len(lock.packages)} packages"))
        install(lock, tree, cache=self._cache, index=self._index, check=check)

    async def of_snapshot(self, snapshot: SnapshotId, spec: SandboxSpec) -> tuple[str, ...]:
        """What lies over the base of a snapshot: its changes, over the layers that were below them; topmost first.

        Raises: NotFound. As :func:`~dsec.images.layer_copy.copy_layer`.
        """
        async with self._changes.changes(snapshot) as changed:

            def copy(tree: Path, check: Check) -> None:
                copy_layer(changed, tree, check=check)
                clear_scratch(tree)

            image = await self._keep(_key("snapshot", snapshot), threaded(copy))
        layers = _over(image.digest, spec.layers)
        if len(layers) <= MOST_LAYERS:
            return layers
        return ((await self._merged(layers, spec.base_digest)).digest,)

    async def _merged(self, layers: Sequence[str], base: str) -> Image:
        """One layer that does over the base what several do."""
        found = [await self._images.get(digest) for digest in (*layers, base)]

        def merge(tree: Path, check: Check) -> None:
            with ExitStack() as stack:
                *over, below = [stack.enter_context(self._looked(image)) for image in found]
                merge_layers(over[::-1], tree, below=[below], check=check)

        return await self._keep(_key("merged", *layers, base), threaded(merge))


def _over(layer: str, layers: Sequence[str]) -> tuple[str, ...]:
    """One more on top. What it does is not done twice: below another, the same layer changes nothing that it does not change above."""
    return (layer, *[each for each in layers if each != layer])


def _key(kind: str, *parts: str) -> str:
    """Of a layer: everything that it is made from."""
    return f"{kind}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def _read_lock(path: Path) -> Lock | None:
    """None: it was not made yet.  Raises: StoreDamaged, Denied."""
    try:
        return parse_lock(read_small(path).decode())
    except FileNotFoundError:
        return None
    except (BadRequest, UnicodeDecodeError) as error:
        raise damaged(path, f"is no lock of dependencies: {error}") from error


def _has_directory(tree: Path, path: str) -> bool:
    """Whether commands can run there; links mean what they mean inside."""
    place = find(tree, path)
    return place is not None and place.is_dir()


def _newest(tree: Path, check: Check) -> int:
    """The latest date of a file, ns since the epoch."""
    newest = 0
    for directory, _, names in os.walk(tree):
        check()
        for name in (".", *names):
            newest = max(newest, os.lstat(os.path.join(directory, name)).st_mtime_ns)
    return newest
