"""What a sandbox starts from: what ``--template`` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dsec.client.aio import AsyncDsec
from dsec.errors import BadRequest, DsecError, NotFound
from dsec.images.bases import default_table, read_table
from dsec.images.names import parse
from dsec.model.ids import is_snapshot
from dsec.model.snapshots import SnapshotInfo

_ADVICE: Final = (
    "{name!r} is a base, not a template: name it in a template (`runtime: {{base: {name}}}`) and build that with "
    "`dsec template build`; `-t base` is base system alone"
)


async def origin(engine: AsyncDsec, name: str) -> str | SnapshotInfo:
    """What :meth:`~dsec.client.aio.AsyncSandboxes.create` takes for it.  Raises: NotFound, BadRequest."""
    return await engine.snapshots.get(name) if is_snapshot(name) else name


@contextmanager
def bases_explained(name: str) -> Iterator[None]:
    """Meanwhile, where there is no template ``name``, the hint says what to do with a base of that name."""
    try:
        yield
    except (NotFound, BadRequest) as error:
        if error.message.startswith(("template: ", "there is no template ")) and _is_base(name):
            error.hint = _ADVICE.format(name=name)
        raise


def _is_base(name: str) -> bool:
    """Also by an alias of this machine; a table of them that is wrong is told elsewhere."""
    try:
        return parse(name).kind != "alias" or name in read_table(default_table())
    except (DsecError, OSError):
        return False
