"""Building templates: everything that a blueprint names becomes a digest, once.

The base is fetched or built, dependencies are locked for the Python that is *in* it and installed into a layer of their own, and the
result is kept under a digest over all of that. Building the same again changes nothing and takes no time: each part is found by what it is made from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from anyio import to_thread

from dsec.control.allowance import Allowance
from dsec.control.composing import composed, floats, known_base
from dsec.control.layering import Layering
from dsec.control.template_store import TemplateStore, check_tag
from dsec.errors import BadRequest, Conflict, NotFound
from dsec.model.built import Built, Tagged
from dsec.model.ids import SnapshotId
from dsec.model.sandbox import USERS, WORKSPACE, Level, SandboxSpec
from dsec.model.template import Resources, Runtime, Template
from dsec.ports.engine import SnapshotService, TemplateService
from dsec.ports.storage import Images
from dsec.templates.document import Document, parse


class Templates(TemplateService):
    """See the module.

    Args:
        images: where bases come from. layering: makes what lies over them. snapshots: what templates can be made of.
        store: where what is built is kept, with its images. tidy: called when something was built: there are more images now.
        allowance: turns, and what may be kept.
    """

    def __init__(
        self,
        images: Images,
        layering: Layering,
        snapshots: SnapshotService,
        store: TemplateStore,
        tidy: Callable[[], None],
        allowance: Allowance | None = None,
    ) -> None:
        self._allowance = allowance or Allowance()
        self._images = images
        self._tidy = tidy
        self._layering = layering
        self._snapshots = snapshots
        self._store = store

    async def build(self, text: bytes, *, source: str, tag: str, strict: bool, update: bool) -> Built:
        document = await to_thread.run_sync(lambda: parse(text, source=source))
        loose = floats(document.template, document.places)
        if strict and loose:
            raise BadRequest(
                f"{source}: {len(loose)} dependencies float: "
                + "; ".join(f"line {note.line}: {note.text} ({note.why})" for note in loose[:20]),
                hint="pin each with the version that is meant, or build without strict",
                count=len(loose),
            )
        template = document.template
        check_tag(template.name, tag)  # before what takes minutes
        _check_level(template)
        async with self._allowance.turn():
            return await self._build(document, source, tag, strict, update)

    async def _build(self, document: Document, source: str, tag: str, strict: bool, update: bool) -> Built:
        template = document.template
        base = await self._images.get(template.runtime.base)
        if base.mutable and strict:
            raise BadRequest(
                f"{source}: base {base.name!r} can change under a template", hint="take a base that cannot"
            )
        layers, lock = await self._layering.over(template, base, strict, update)
        built = composed(
            template,
            base=base.name,
            base_digest=base.digest,
            layers=layers,
            lock=lock.digest if lock is not None else "",
            packages=tuple(f"{each.name}=={each.version}" for each in lock.packages)
            if lock is not None
            else (),
            places=document.places,
        )
        return await self._publish(built, tag)

    async def _publish(self, built: Built, tag: str) -> Built:
        try:
            await self._allowance.put(self._store, built, tag)
        finally:  # also where it may not be kept
            await to_thread.run_sync(self._tidy)
        return await to_thread.run_sync(self._store.find, built.reference)

    async def promote(self, snapshot: SnapshotId, *, name: str, tag: str) -> Built:
        info = await self._snapshots.get(snapshot)
        spec = known_base(info)
        said, before = await self._said(spec, name)
        check_tag(said.name, tag)
        async with self._allowance.turn():
            layers = await self._layering.of_snapshot(snapshot, spec)
        built = composed(
            said,
            base=spec.base,
            base_digest=spec.base_digest,
            layers=layers,
            lock=before.lock if before is not None else "",
            packages=before.packages if before is not None else (),
            origin=snapshot,
        )
        return await self._publish(built, tag)

    async def _said(self, spec: SandboxSpec, name: str) -> tuple[Template, Built | None]:
        """The template that a sandbox was of, under another name, and what was built of it; or what its specification says."""
        if spec.template:
            with suppress(NotFound):
                origin = await self.find(spec.template)
                return replace(origin.template, name=name), origin
        runtime = Runtime(
            base=spec.base,
            level=spec.level,
            env=spec.env,
            user=spec.user or "user",
            workdir=spec.workdir or WORKSPACE,
        )
        return Template(
            name=name, version="1", runtime=runtime, resources=Resources(limits=spec.limits)
        ), None

    async def find(self, reference: str) -> Built:
        known = self._store.remembered(reference)  # a thread's turn would be a seventh of a create
        return known if known is not None else await to_thread.run_sync(self._store.find, reference)

    async def list(self) -> tuple[Tagged, ...]:
        return await to_thread.run_sync(self._store.tags)

    async def history(self, name: str) -> tuple[Tagged, ...]:
        return await to_thread.run_sync(self._store.history, name)

    async def tag(self, reference: str, tag: str) -> Built:
        built = await self.find(reference)
        await self._allowance.put(self._store, built, tag)
        return built

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
        await self._allowance.remove(self._store, reference)


def _check_level(template: Template) -> None:
    """Raises: BadRequest: it asks for files that its level would not show."""
    runtime, plain = template.runtime, Runtime()
    if runtime.user not in USERS:
        raise BadRequest(
            f"runtime.user: there is no user {runtime.user!r} in a sandbox",
            hint=f"one of {', '.join(USERS)}",
            field="runtime.user",
        )
    if runtime.level is not Level.PROCESS:
        return
    for name in ("base", "dependencies", "packages", "setup"):
        if getattr(runtime, name) != getattr(plain, name):
            raise BadRequest(
                f"runtime.{name}: level 'process' shows the files of this machine, and no image",
                hint="runtime.level: container",
                field=f"runtime.{name}",
            )
