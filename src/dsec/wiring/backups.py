"""A copy of what a durable engine knows, to restore it from."""

from __future__ import annotations

import errno
from pathlib import Path

from dsec.errors import BadRequest, Conflict, Denied, DsecError, NotFound, StorageFull, Unsupported
from dsec.stores.backup import copy_checkpoints, copy_database, copy_key
from dsec.stores.control.store import DATABASE as CONTROL_DATABASE
from dsec.stores.parts import CHECKPOINTS
from dsec.stores.schema import DATABASE
from dsec.wiring.journals import remembered
from dsec.wiring.state import JOURNAL, KEY, KEYS
from dsec.wiring.tenants import CONTROL


def back_up(home: Path, target: Path) -> None:
    """Copy the journal, its checkpoints, its key and the control database of ``home`` into ``target``, as they lie there. Blocking.

    A server may run meanwhile. The parts fit together: the copy is a journal that ``dsec audit verify`` finds sound where the original is.

    Args:
        target: a directory that is not there yet; when this fails what was made of it stays, and is no copy.

    Raises:
        NotFound: there is no journal. Conflict: ``target`` is there. Unsupported: the journal is in PostgreSQL.
        StoreDamaged, StorageFull, Denied, Busy.
    """
    if remembered(home / JOURNAL):
        raise Unsupported(
            "the records are in PostgreSQL, which this does not copy",
            hint="stop the server, then pg_dump, and copy the home's journal and keys directories",
        )
    if not (home / JOURNAL / DATABASE).is_file():
        raise NotFound(f"there is no journal in {home}", hint="$DSEC_HOME names the place")
    try:
        _copy(home, target)
    except OSError as error:
        raise _told(error, target) from error


def _copy(home: Path, target: Path) -> None:
    target.mkdir(mode=0o700, parents=True)
    for name in (JOURNAL, KEYS, CONTROL):
        (target / name).mkdir(mode=0o700)
    copy_database(home / JOURNAL / DATABASE, target / JOURNAL / DATABASE)
    copy_checkpoints(
        home / JOURNAL / CHECKPOINTS, target / JOURNAL / CHECKPOINTS, target / JOURNAL / DATABASE
    )
    copy_key(home / KEYS / KEY, target / KEYS / KEY)
    control = home / CONTROL / CONTROL_DATABASE
    if control.exists():  # a home that no server ever had has none
        copy_database(control, target / CONTROL / CONTROL_DATABASE)


def _told(error: OSError, target: Path) -> DsecError:
    kinds = {
        errno.EEXIST: Conflict,
        errno.ENOSPC: StorageFull,
        errno.EDQUOT: StorageFull,
        errno.EACCES: Denied,
        errno.EPERM: Denied,
    }
    kind = kinds.get(error.errno or 0, BadRequest)
    hint = "name a directory that is not there yet" if kind is Conflict else ""
    return kind(f"{error.filename or target}: {error.strerror}", hint=hint)
