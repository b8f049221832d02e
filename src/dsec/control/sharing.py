"""Templates and snapshots as files: all that they stand on goes along, and nothing that comes in is believed."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from pathlib import Path
from typing import Any, Final

from anyio import to_thread

from dsec.control.allowance import Allowance
from dsec.control.carried import facts_of, spec_of
from dsec.control.composing import composed, known_base
from dsec.control.layering import MOST_LAYERS
from dsec.control.template_store import LATEST, TemplateStore, check_tag
from dsec.errors import BadRequest, Conflict, DsecError, NotFound, TooLarge, Unsupported
from dsec.images.bundle import Bundle
from dsec.images.carrier import Carrier
from dsec.images.layer_copy import copy_layer
from dsec.images.layer_store import check_tree
from dsec.images.names import HOST
from dsec.images.tools import Check
from dsec.images.tree import tree_digest
from dsec.model.built import Built
from dsec.model.checks import shown
from dsec.model.ids import SnapshotId
from dsec.model.sandbox import USERS, Level, SandboxSpec
from dsec.model.snapshots import SnapshotInfo, SnapshotKind
from dsec.ports.engine import SharingService, Workplace
from dsec.ports.storage import Image, Images
from dsec.templates.dump import canonical_json
from dsec.templates.restore import restore

Look = Callable[[Image], AbstractContextManager[Path]]
TEMPLATE: Final = "template"
SNAPSHOT: Final = "snapshot"
_CHANGES: Final = "changes"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_PACKAGES: Final = 10_000
_PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,200}==[A-Za-z0-9.!+_-]{1,200}")
_HINT: Final = "it was damaged on its way, or somebody made it to do harm: get it from its maker again"


class Sharing(SharingService):
    """See the module.

    Args:
        images: of the engine: what it asks for there is held as long as it is needed.
        look: the tree of an image, to be read. carrier: carries trees.
        store: where built templates are kept, with their images. place: whose snapshots.
        tidy: called when something came in: there are more images now.
        allowance: turns for what has arrived, and what of it may be kept.
    """

    def __init__(
        self,
        images: Images,
        look: Look,
        carrier: Carrier,
        store: TemplateStore,
        place: Workplace,
        tidy: Callable[[], None],
        allowance: Allowance | None = None,
    ) -> None:
        self._allowance = allowance or Allowance()
        self._images = images
        self._tidy = tidy
        self._look = look
        self._carrier = carrier
        self._store = store
        self._place = place

    # Templates

    async def export_template(self, reference: str) -> AsyncIterator[bytes]:
        built = await to_thread.run_sync(self._store.find, reference)
        facts = _facts(built)
        trees = await self._trees(built.base, (built.base_digest, *built.layers))
        async with aclosing(self._carrier.pack(TEMPLATE, facts, trees)) as pieces:
            async for piece in pieces:
                yield piece

    async def import_template(self, file: AsyncIterator[bytes], *, tag: str) -> Built:
        async with self._carrier.arrived(TEMPLATE, file) as bundle:
            built = _built(bundle)
            tag = tag or await to_thread.run_sync(self._free_tag, built)
            check_tag(built.template.name, tag)
            try:
                async with self._allowance.turn():
                    await self._carrier.images(bundle, (built.base_digest, *built.layers))
                    await self._allowance.put(self._store, built, tag)
            finally:  # also where it may not be kept
                await to_thread.run_sync(self._tidy)
        return await to_thread.run_sync(self._store.find, built.reference)

    def _free_tag(self, built: Built) -> str:
        """Whoever names no tag gives no stranger's template the name of his own.  Raises: Conflict."""
        reference = f"{built.template.name}:{LATEST}"
        with suppress(NotFound):
            mine = self._store.find(reference).digest
            if mine != built.digest:
                raise Conflict(
                    f"{reference} means another template here: {mine}",
                    hint=f"name a tag for the one that comes in; {LATEST!r} moves this one",
                    template=reference,
                )
        return LATEST

    async def _trees(
        self, base: str, digests: Sequence[str]
    ) -> list[tuple[str, AbstractContextManager[Path]]]:
        """Each once, however often it is named.  Raises: NotFound, StoreDamaged. Unsupported: the base shows what is of this machine."""
        found = [await self._images.get(digest) for digest in dict.fromkeys(digests)]
        if base == HOST or any(image.mutable for image in found):
            raise Unsupported(
                f"base {base!r} shows programs of this machine, which cannot go along",
                hint="use a base that does not change: system, debian:SUITE, an image",
                base=base,
            )
        return [(image.digest, self._look(image)) for image in found]

    # Snapshots

    async def export_snapshot(self, snapshot: SnapshotId) -> AsyncIterator[bytes]:
        info = await self._place.snapshots.get(snapshot)
        spec = known_base(info)
        trees = await self._trees(spec.base, (spec.base_digest, *spec.layers))
        async with (
            self._place.changes.changes(snapshot) as changed,
            self._carrier.tree(lambda tree, check: copy_layer(changed, tree, check=check)) as own,
        ):
            facts = {"kind": info.kind.value, "spec": facts_of(spec), _CHANGES: own.digest}
            if own.digest not in dict(trees):
                trees.append((own.digest, own.looked()))
            async with aclosing(self._carrier.pack(SNAPSHOT, facts, trees)) as pieces:
                async for piece in pieces:
                    yield piece

    async def import_snapshot(self, file: AsyncIterator[bytes]) -> SnapshotInfo:
        async with self._carrier.arrived(SNAPSHOT, file) as bundle:
            spec, kind, changes = _snapshot(bundle)
            beneath = (spec.base_digest, *spec.layers)
            async with self._allowance.turn():
                await self._carrier.images(bundle, beneath)
            for digest in beneath:  # the engine holds what it asks for
                await self._images.get(digest)
            await to_thread.run_sync(self._tidy)
            async with self._carrier.unpacked(bundle, changes) as own:

                def fill(upper: Path, check: Check) -> None:
                    copy_layer(own.path, upper, check=check)
                    check_tree(
                        changes, tree_digest(upper)
                    )  # whoever asked may have gone, and the tree with him

                return await self._place.arrivals.adopt(spec, kind, fill, own.size)


def _facts(built: Built) -> dict[str, Any]:
    """What it is, and not when and where it was made."""
    return {
        "digest": built.digest,
        "template": json.loads(canonical_json(built.template)),
        "base_digest": built.base_digest,
        "layers": list(built.layers),
        "lock": built.lock,
        "packages": list(built.packages),
    }


def _built(bundle: Bundle) -> Built:
    """What a bundle says of a template, as far as it can be true: what follows from the template is made of it here, and what no digest
    covers is not taken over, but for the versions that its maker says are locked.

    Raises: BadRequest, TooLarge.
    """
    about: Mapping[str, Any] = bundle.about
    try:
        template, lock = restore(about["template"]), about["lock"]
        layers, packages = tuple(about["layers"]), tuple(about["packages"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, DsecError) as error:
        raise _refused(f"what it says of a template is wrong: {str(error)[:500]}") from error
    base = template.runtime.base
    _check_images(base, about.get("base_digest"), layers)
    if lock != "" and not (isinstance(lock, str) and _DIGEST.fullmatch(lock)):
        raise _refused("its lock is none")
    if len(packages) > _PACKAGES or not all(
        isinstance(each, str) and _PACKAGE.fullmatch(each) for each in packages
    ):
        raise _refused("its list of packages is none")
    built = composed(
        template,
        base=base,
        base_digest=about["base_digest"],
        layers=layers,
        lock=lock,
        packages=packages,
    )
    if about.get("digest") != built.digest:
        raise _refused(f"what it says is of the template {built.digest}, not {shown(about.get('digest'))}")
    return built


def _snapshot(bundle: Bundle) -> tuple[SandboxSpec, SnapshotKind, str]:
    """What a bundle says of a snapshot: its specification, what it holds, and the digest of that.  Raises: BadRequest."""
    about: Mapping[str, Any] = bundle.about
    try:
        spec, kind = spec_of(about["spec"]), SnapshotKind(about["kind"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, DsecError) as error:
        raise _refused(f"what it says of a snapshot is wrong: {str(error)[:500]}") from error
    if spec.level is not Level.CONTAINER:
        raise _refused(f"level {spec.level.value!r} has no snapshots")
    if spec.user not in ("", *USERS):
        raise _refused(f"no sandbox has a user {shown(spec.user)}")
    changes = str(about.get(_CHANGES))
    _check_images(spec.base, spec.base_digest, (*spec.layers, changes))
    return spec, kind, changes


def _check_images(base: object, base_digest: object, layers: Sequence[object]) -> None:
    """Raises: BadRequest: a name is none, or a digest."""
    if not (isinstance(base, str) and 0 < len(base) <= 1000 and base.isprintable()):
        raise _refused(f"{shown(base)} is no name of a base")
    if base == HOST:
        raise _refused("its base shows programs of another machine")
    for digest in (base_digest, *layers):
        if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise _refused(f"{shown(digest)} is no digest")
    if len(layers) > MOST_LAYERS + 1:
        raise TooLarge(
            f"this file is not let in: it has {len(layers)} layers, and {MOST_LAYERS} are the most",
            hint=_HINT,
        )
    if len({base_digest, *layers}) != 1 + len(layers):
        raise _refused("one of its layers is there twice")


def _refused(why: str) -> BadRequest:
    return BadRequest(f"this file is not let in: {why}", hint=_HINT)
