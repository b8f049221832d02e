"""Templates: building, naming and moving them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsec.client.aio.sandboxes import AsyncSandboxes
from dsec.client.aio_link import AsyncLink
from dsec.client.requests import document_of
from dsec.client.residue import TRACES, Difference, differences, seen
from dsec.client.transfers import file_pieces, saved
from dsec.errors import BadRequest
from dsec.model.built import Built, Tagged
from dsec.model.checks import check_flag, check_text
from dsec.model.sandbox import Flag
from dsec.model.snapshots import SnapshotInfo


class AsyncTemplates:
    """Blueprints, built once and run many times. Those of one user are shared by all his engines."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def build(
        self, document: str | Path | bytes, *, tag: str = "latest", strict: bool = False, update: bool = False
    ) -> Built:
        """Build a template, and let a tag mean it. The same document over the same base gives the same digest.

        Args:
            document: path of a YAML file, or its content as bytes.
            tag: that means it afterwards.
            strict: refuse dependencies that float, and a base that can change.
            update: lock dependencies anew, instead of as they were locked before.

        Raises:
            BadRequest: the document: every error with line and field; dependencies that contradict one another.
            Unsupported: something that cannot be built here. NotFound: the file, or the base.
            RuntimeUnavailable: an index does not answer. StorageFull, TooLarge, TimedOut, Busy.
        """
        check_text("tag", tag)
        check_flag("strict", strict)
        check_flag("update", update)
        text, source = await self._link.call(document_of(document))
        return await self._link.call(
            self._link.services.templates.build(text, source=source, tag=tag, strict=strict, update=update)
        )

    async def promote(self, snapshot: SnapshotInfo, name: str, *, tag: str = "latest") -> Built:
        """Make a template of what a ``snapshot`` holds: sandboxes of it begin with those files, and need neither the snapshot nor this engine.

        What else it says is as in the template of the snapshot's sandbox; without one, as that sandbox was.

        Args:
            snapshot: whose files it is to have. name: of the template. tag: that means it afterwards.

        Raises:
            NotFound: there is no such snapshot. BadRequest: the name, or the tag. Unsupported: a file that no template can keep.
            TooLarge, StorageFull, Busy.
        """
        check_text("name", name)
        check_text("tag", tag)
        return await self._link.call(self._link.services.templates.promote(snapshot.id, name=name, tag=tag))

    async def export(self, reference: str, path: str | Path) -> None:
        """Write a template, with all that it is made of, to one file: :meth:`import_` takes it in elsewhere. The same template gives the same bytes.

        Args:
            reference: of the template. path: of the file; it is there when it is whole, and one that was there is replaced.

        Raises:
            NotFound, BadRequest: the template, or the path. StorageFull, StoreDamaged, Denied, Busy.
        """
        check_text("reference", reference)
        await self._link.call(saved(self._link.services.sharing.export_template(reference), path))

    async def import_(self, path: str | Path, *, tag: str | None = None) -> Built:
        """Take in a template that :meth:`export` wrote, under its own name. Nothing in the file is believed: it is what its digests say, or refused.

        Args:
            path: of the file. tag: that means it afterwards; None = "latest", unless that means another template of this name.

        Raises:
            Conflict: no tag was given, and there is one. NotFound: the file. BadRequest: it is no template, was damaged, or was made to do harm.
            TooLarge, StorageFull, Unsupported, Denied, Busy.
        """
        if tag is not None:
            check_text("tag", tag)
            if not tag:
                raise BadRequest("tag: it is empty", hint="leave it out")
        return await self._link.call(
            self._link.services.sharing.import_template(file_pieces("path", path), tag=tag or "")
        )

    async def get(self, reference: str) -> Built:
        """What a ``reference`` means now: ``name``, ``name:tag`` or ``name@sha256:…``.  Raises: NotFound, BadRequest."""
        check_text("reference", reference)
        return await self._link.call(self._link.services.templates.find(reference))

    async def list(self) -> tuple[Tagged, ...]:
        """What every tag means, by name."""
        return await self._link.call(self._link.services.templates.list())

    async def history(self, name: str) -> tuple[Tagged, ...]:
        """Each time that a tag of the template ``name`` was set, oldest first.  Raises: BadRequest."""
        check_text("name", name)
        return await self._link.call(self._link.services.templates.history(name))

    async def tag(self, reference: str, tag: str) -> Built:
        """Let ``tag`` mean what ``reference`` means now.  Raises: NotFound, BadRequest."""
        check_text("reference", reference)
        check_text("tag", tag)
        return await self._link.call(self._link.services.templates.tag(reference, tag))

    async def rollback(self, reference: str) -> Built:
        """Let the tag of a ``reference`` mean what it meant before.  Raises: NotFound, BadRequest. Conflict: it never meant anything else."""
        check_text("reference", reference)
        return await self._link.call(self._link.services.templates.rollback(reference))

    async def check(self, reference: str) -> tuple[Difference, ...]:
        """Run a template twice and compare everything that each run can see at its start; nothing is returned when they begin alike.

        Between the two looks the first run leaves what a run may leave: files in every place that it may write, and a process.

        Args:
            reference: of the template; "base" will do, too.

        Raises:
            NotFound, BadRequest: the template. As :meth:`AsyncSandboxes.create`.
        """
        first = await self._begun(reference)
        return differences(first, await self._begun(reference))

    async def _begun(self, reference: str) -> Mapping[str, str]:
        """What a run sees, which leaves its traces when it has looked: not in volumes, which are no part of it."""
        services = self._link.services
        sandbox = await AsyncSandboxes(self._link).create(reference)
        try:
            env = await sandbox.exec(["env", "-0"])
            found = await self._link.call(seen(services, sandbox.id, env.stdout))
            await sandbox.exec(TRACES, user="root" if Flag.USERS in sandbox.flags else "")
        finally:
            await sandbox.destroy()
        return found

    async def remove(self, reference: str) -> None:
        """Take the tag of a ``reference`` away. With the last tag of a name goes everything that was built under it. Twice is no error.  Raises: BadRequest."""
        check_text("reference", reference)
        await self._link.call(self._link.services.templates.remove(reference))
