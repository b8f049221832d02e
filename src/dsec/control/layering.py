"""What lies over a base: packages, set-up, the files of a snapshot; each a read-only layer that is made once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from anyio import from_thread, to_thread

from dsec.control.building import RECIPE as BUILD_RECIPE
from dsec.control.building import Builder, Step, steps_of
from dsec.errors import BadRequest, IsolationUnavailable, Unsupported
from dsec.images.dependencies.bounds import Index
from dsec.images.dependencies.cache import WheelCache
from dsec.images.dependencies.install import RECIPE, install, settle, take_bytecode
from dsec.images.dependencies.lock import Lock, parse_lock
from dsec.images.dependencies.resolve import resolve
from dsec.images.dependencies.target import read_target
from dsec.images.disk import damaged, read_small, typed
from dsec.images.layer_copy import copy_layer, merge_layers
from dsec.images.shelf import write_whole
from dsec.model.ids import SnapshotId
from dsec.model.images import Progress, silent
from dsec.model.images import Step as Doing
from dsec.model.sandbox import SandboxSpec
from dsec.model.template import Template
from dsec.ports.engine import Changes
from dsec.ports.storage import Image, Images

Look = Callable[[Image], AbstractContextManager[Path]]
Keep = Callable[[str, Callable[[Path], None]], Awaitable[Image]]
MOST_LAYERS: Final = 30
"""Over a base. Beyond it they become one, so that a template made of templates stays as fast as the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What the files of a base tell. ``has_place``: commands can run where the template says. ``newest``: date of a file, ns."""

    has_place: bool
    lock: Lock | None
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

    async def over(
        self, template: Template, base: Image, strict: bool, update: bool
    ) -> tuple[tuple[str, ...], str]:
        """Digests of what lies over the base, topmost first, and of the lock."""
        try:
            return await self._over(template, base, strict, update)
        finally:
            self._progress(Doing("done", over=True))

    async def _over(
        self, template: Template, base: Image, strict: bool, update: bool
    ) -> tuple[tuple[str, ...], str]:
        seen = await to_thread.run_sync(self._examined, template, base, strict, update)
        layers: tuple[str, ...] = ()
        if seen.lock is not None:
            layers = ((await self._dependencies(base, seen.lock)).digest,)
        steps = steps_of(template)
        if steps:
            layers = ((await self._set_up(template, base, layers, steps, seen)).digest, *layers)
        return layers, seen.lock.digest if seen.lock is not None else ""

    def _examined(self, template: Template, base: Image, strict: bool, update: bool) -> _Seen:
        """What can be told from the base's own files."""
        with self._look(base) as tree:
            workdir = template.runtime.workdir
            has_place = _has_directory(tree, workdir)
            if not has_place and not template.runtime.setup:
                raise BadRequest(
                    f"runtime.workdir: there is no directory {workdir} in the base",
                    hint="/workspace is in every base; a command of runtime.setup can make another",
                    field="runtime.workdir",
                )
            wanted = template.runtime.dependencies
            if wanted and base.mutable:
                raise Unsupported(
                    f"runtime.dependencies: base {base.name!r} can change under what would be locked for its Python",
                    hint="take a base that cannot",
                    field="runtime.dependencies",
                )
            lock = self._locked(wanted, base, tree, strict, update) if wanted else None
            newest = _newest(tree) if steps_of(template) else 0
            return _Seen(has_place=has_place, lock=lock, newest=newest)

    async def _dependencies(self, base: Image, lock: Lock) -> Image:
        """The packages as one layer, with the byte code that the Python of the base makes of them."""
        key = _key("dependencies", RECIPE, lock.digest)
        plain = await self._keep(key, lambda tree: self._install(lock, tree))
        spec = SandboxSpec(base=base.name, base_digest=base.digest, layers=(plain.digest,))

        def fill(tree: Path) -> None:
            with self._look(plain) as files:
                copy_layer(files, tree)
            made = tree.with_name("bytecode")
            made.mkdir()
            if from_thread.run(self._builder.compile, spec, lock.target, made):
                take_bytecode(made, tree, lock.target)
            settle(tree)

        try:
            return await self._keep(_key("compiled", RECIPE, base.digest, plain.digest), fill)
        except IsolationUnavailable:
            return plain  # nothing runs here, and nothing was promised about speed

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
        about = [[step.argv for step in steps], dict(sorted(runtime.env.items())), spec.workdir]

        def fill(tree: Path) -> None:
            from_thread.run(lambda: self._builder.run(spec, steps, tree, latest=seen.newest))
            if not (seen.has_place or _has_directory(tree, runtime.workdir)):
                raise BadRequest(
                    f"runtime.workdir: there is no directory {runtime.workdir}, neither in the base nor after runtime.setup",
                    hint="let a command of runtime.setup make it",
                    field="runtime.workdir",
                )

        return await self._keep(_key("setup", BUILD_RECIPE, base.digest, *layers, json.dumps(about)), fill)

    def _locked(self, wanted: tuple[str, ...], base: Image, tree: Path, strict: bool, update: bool) -> Lock:
        """The lock of these requirements over this base: made once, and the same from then on."""
        about = json.dumps([base.digest, sorted(wanted)]).encode()
        path = self._locks / f"{hashlib.sha256(about).hexdigest()}.json"
        if not update:
            try:
                return parse_lock(read_small(path).decode())
            except FileNotFoundError:
                pass
            except (BadRequest, UnicodeDecodeError) as error:
                raise damaged(path, f"is no lock of dependencies: {error}") from error
        self._progress(Doing(f"locking {len(wanted)} dependencies"))
        lock = resolve(wanted, read_target(tree), cache=self._cache, index=self._index, strict=strict)
        with typed(self._locks):
            self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, lock.text.encode())  # others may be making the same one
        return lock

    def _install(self, lock: Lock, tree: Path) -> None:
        self._progress(Doing(f"installing {len(lock.packages)} packages"))
        install(lock, tree, cache=self._cache, index=self._index)

    async def of_snapshot(self, snapshot: SnapshotId, spec: SandboxSpec) -> tuple[str, ...]:
        """What lies over the base of a snapshot: its changes, over the layers that were below them; topmost first.

        Raises: NotFound. As :func:`~dsec.images.layer_copy.copy_layer`.
        """
        async with self._changes.changes(snapshot) as changed:
            image = await self._keep(_key("snapshot", snapshot), lambda tree: copy_layer(changed, tree))
        layers = (image.digest, *spec.layers)
        if len(layers) <= MOST_LAYERS:
            return layers
        return ((await self._merged(layers, spec.base_digest)).digest,)

    async def _merged(self, layers: Sequence[str], base: str) -> Image:
        """One layer that does over the base what several do."""
        found = [await self._images.get(digest) for digest in (*layers, base)]

        def fill(tree: Path) -> None:
            with ExitStack() as stack:
                *over, below = [stack.enter_context(self._look(image)) for image in found]
                merge_layers(over[::-1], tree, below=[below])

        return await self._keep(_key("merged", *layers, base), fill)


def _key(kind: str, *parts: str) -> str:
    """Of a layer: everything that it is made from."""
    return f"{kind}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


def _has_directory(tree: Path, path: str) -> bool:
    """Whether commands can run there."""
    place = tree / path.lstrip("/")
    return place.is_dir() and not place.is_symlink()


def _newest(tree: Path) -> int:
    """The latest date of a file, ns since the epoch."""
    newest = 0
    for directory, _, names in os.walk(tree):
        for name in (".", *names):
            newest = max(newest, os.lstat(os.path.join(directory, name)).st_mtime_ns)
    return newest
