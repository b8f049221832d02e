"""Building templates: everything that a blueprint names becomes a digest, once.

The base is fetched or built, dependencies are locked for the Python that is *in* it and installed into a layer of their own, and the
result is kept under a digest over all of that. Building the same again changes nothing and takes no time: each part is found by what it is made from.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

from anyio import to_thread

from dsec.control.template_store import TemplateStore, digest_of
from dsec.errors import BadRequest, Conflict, Unsupported
from dsec.images.dependencies.bounds import Index
from dsec.images.dependencies.cache import WheelCache
from dsec.images.dependencies.install import RECIPE, install
from dsec.images.dependencies.lock import Lock, parse_lock
from dsec.images.dependencies.resolve import resolve
from dsec.images.dependencies.target import read_target
from dsec.images.shelf import write_whole
from dsec.model.built import Built, Note, Tagged
from dsec.model.template import Template
from dsec.ports.engine import TemplateService
from dsec.ports.storage import Image, Images
from dsec.templates.document import Document, parse
from dsec.templates.dump import digest as blueprint_of
from dsec.templates.enforcement import unenforced
from dsec.templates.versions import floating

Look = Callable[[Image], AbstractContextManager[Path]]
Keep = Callable[[str, Callable[[Path], None]], Awaitable[Image]]
_NO_BUILD: Final = "no sandbox is started for building yet, and one would have no network"


class Holder(Protocol):
    """Keeps images that no name stands for any more."""

    async def hold(self, digest: str, owner: str) -> None:
        """Until ``owner`` releases it."""

    async def release(self, digest: str, owner: str) -> None:
        """Absent is no error."""


class Templates(TemplateService):
    """See the module.

    Args:
        images: where bases come from. holder: the same store, keeping what is built upon.
        keep: makes a layer once. look: the tree of an image, to be read.
        store: where what is built is kept. root: of locks and wheels. index: where wheels come from; None = as pip is configured here.
    """

    def __init__(
        self,
        images: Images,
        holder: Holder,
        keep: Keep,
        look: Look,
        store: TemplateStore,
        root: Path,
        *,
        index: Index | None = None,
    ) -> None:
        self._index = index
        self._images = images
        self._holder = holder
        self._keep = keep
        self._look = look
        self._store = store
        self._locks = root / "locks"
        self._cache = WheelCache(root / "wheels")

    async def build(self, text: bytes, *, source: str, tag: str, strict: bool, update: bool) -> Built:
        document = await to_thread.run_sync(lambda: parse(text, source=source))
        floats = _floats(document)
        if strict and floats:
            raise BadRequest(
                f"{source}: {len(floats)} dependencies float: "
                + "; ".join(f"line {note.line}: {note.text} ({note.why})" for note in floats[:20]),
                hint="pin each with the version that is meant, or build without strict",
                count=len(floats),
            )
        template = document.template
        _check_possible(template)
        base = await self._images.get(template.runtime.base)
        if base.mutable and strict:
            raise BadRequest(
                f"{source}: base {base.name!r} can change under a template", hint="take a base that cannot"
            )
        layers, lock = await self._layers(template, base, strict, update)
        built = _built(document, base, layers, lock, floats)
        for digest in (base.digest, *layers):
            await self._holder.hold(digest, _owner(built.digest))
        await to_thread.run_sync(self._store.put, built, tag)
        return await to_thread.run_sync(self._store.find, built.reference)

    async def _layers(
        self, template: Template, base: Image, strict: bool, update: bool
    ) -> tuple[tuple[str, ...], str]:
        """Digests of what lies over the base, and of the lock."""
        lock = await to_thread.run_sync(self._examined, template, base, strict, update)
        if lock is None:
            return (), ""
        key = f"dependencies-{RECIPE}-{lock.digest.removeprefix('sha256:')}"
        image = await self._keep(key, lambda tree: self._install(lock, tree))
        return (image.digest,), lock.digest

    def _examined(self, template: Template, base: Image, strict: bool, update: bool) -> Lock | None:
        """What can be told from the base's own files: the lock for its Python, and whether commands have a place to run."""
        with self._look(base) as tree:
            _check_directory(tree, template.runtime.workdir)
            wanted = template.runtime.dependencies
            return self._locked(wanted, base, tree, strict, update) if wanted else None

    def _locked(self, wanted: tuple[str, ...], base: Image, tree: Path, strict: bool, update: bool) -> Lock:
        """The lock of these requirements over this base: made once, and the same from then on."""
        about = json.dumps([base.digest, sorted(wanted)]).encode()
        path = self._locks / f"{hashlib.sha256(about).hexdigest()}.json"
        if not update:
            try:
                return parse_lock(path.read_text())
            except FileNotFoundError:
                pass
        lock = resolve(wanted, read_target(tree), cache=self._cache, index=self._index, strict=strict)
        self._locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, lock.text.encode())  # others may be making the same one
        return lock

    def _install(self, lock: Lock, tree: Path) -> None:
        install(lock, tree, cache=self._cache, index=self._index)

    async def find(self, reference: str) -> Built:
        return await to_thread.run_sync(self._store.find, reference)

    async def list(self) -> tuple[Tagged, ...]:
        return await to_thread.run_sync(self._store.tags)

    async def history(self, name: str) -> tuple[Tagged, ...]:
        return await to_thread.run_sync(self._store.history, name)

    async def tag(self, reference: str, tag: str) -> Built:
        return await to_thread.run_sync(self._store.tag, reference, tag)

    async def rollback(self, reference: str) -> Built:
        if "@" in reference:
            raise BadRequest(
                f"template: {reference} names no tag that could go back", hint="NAME or NAME:TAG"
            )
        built = await self.find(reference)
        name, _, tag = reference.partition(":")
        tag = tag or "latest"
        earlier = [each for each in await self.history(name) if each.tag == tag]
        before = next((each for each in reversed(earlier) if each.digest != built.digest), None)
        if before is None:
            raise Conflict(
                f"template {reference} has never meant anything else",
                hint="`dsec template history` shows what it meant",
            )
        return await self.tag(f"{name}@{before.digest}", tag)

    async def remove(self, reference: str) -> None:
        for built in await to_thread.run_sync(self._store.remove, reference):
            for digest in (built.base_digest, *built.layers):
                await self._holder.release(digest, _owner(built.digest))


def _owner(digest: str) -> str:
    return f"template-{digest.removeprefix('sha256:')}"


def _check_possible(template: Template) -> None:
    """Raises: Unsupported: something would have to run, and cannot."""
    for field in ("packages", "setup"):
        if getattr(template.runtime, field):
            raise Unsupported(
                f"runtime.{field}: {_NO_BUILD}",
                hint="take a base that has what is needed",
                field=f"runtime.{field}",
            )


def _check_directory(tree: Path, workdir: str) -> None:
    """Raises: BadRequest: commands would have no place to run."""
    path = tree / workdir.lstrip("/")
    if path.is_symlink() or not path.is_dir():
        raise BadRequest(
            f"runtime.workdir: there is no directory {workdir} in the base",
            hint="/workspace is in every base",
            field="runtime.workdir",
        )


def _floats(document: Document) -> tuple[Note, ...]:
    return tuple(
        Note(field=each.field, line=each.place.line, text=each.requirement, why=each.why)
        for each in floating(document.template, document.places)
    )


def _built(
    document: Document, base: Image, layers: tuple[str, ...], lock: str, floats: tuple[Note, ...]
) -> Built:
    blueprint = blueprint_of(document.template)
    declared = tuple(
        Note(field=each.field, line=each.place.line, text=str(each.value), why=each.why)
        for each in unenforced(document.template, document.places)
    )
    return Built(
        digest=digest_of(blueprint, base.digest, layers, lock),
        blueprint=blueprint,
        template=document.template,
        base=base.name,
        base_digest=base.digest,
        layers=layers,
        lock=lock,
        unenforced=declared,
        floating=floats,
        built_at=time.time(),
    )
