"""What is asked of the tables of keys and projects. Every function is one question, and runs in a transaction of its caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hmac import compare_digest
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from dsec.errors import BadRequest, Conflict, DsecError, StoreDamaged
from dsec.model.ids import KeyId, SandboxId, parse_key_id, parse_sandbox_id
from dsec.model.tenants import KeyInfo, ProjectInfo, Quota, Scope
from dsec.model.volumes import check_project
from dsec.stores.control.tables import API_KEY, PROJECT, inserted
from dsec.wire.values import decode, encode

MOST_KEYS: Final = 100_000
"""Of people and programs together."""
MOST_TOKENS: Final = 100
"""Of one sandbox."""
MOST_PROJECTS: Final = 100_000
_COLUMNS: Final = [column for column in API_KEY.columns if column.name != "digest"]


def key_of_digest(connection: Connection, digest: bytes) -> KeyInfo | None:
    """Whose key has that digest. The time that the look-up takes tells of digests, of which nobody comes back to a key."""
    row = connection.execute(select(API_KEY).where(API_KEY.c.digest == digest)).mappings().first()
    if row is None or not compare_digest(bytes(row["digest"]), digest):
        return None
    return _key(row)


def key_of_id(connection: Connection, key: KeyId) -> KeyInfo | None:
    row = connection.execute(select(*_COLUMNS).where(API_KEY.c.id == key)).mappings().first()
    return _key(row) if row is not None else None


def keys_of(connection: Connection, project: str, after: str, limit: int) -> tuple[KeyInfo, ...]:
    """By id, without tokens of sandboxes; ``project`` "" = of all."""
    asked = select(*_COLUMNS).where(API_KEY.c.sandbox.is_(None), API_KEY.c.id > after)
    if project:
        asked = asked.where(API_KEY.c.project == project)
    rows = connection.execute(asked.order_by(API_KEY.c.id).limit(limit)).mappings()
    return tuple(map(_key, rows))


def add_key(connection: Connection, info: KeyInfo, digest: bytes) -> None:
    """Raises: Conflict: there are too many."""
    most = MOST_KEYS if info.sandbox is None else MOST_TOKENS
    among = API_KEY.c.sandbox.is_(None) if info.sandbox is None else API_KEY.c.sandbox == info.sandbox
    if connection.execute(select(func.count()).where(among)).scalar_one() >= most:
        raise Conflict(
            f"there are {most} keys of that kind, the most there may be", hint="revoke some", keys=most
        )
    connection.execute(
        insert(API_KEY).values(
            id=info.id,
            digest=digest,
            scope=info.scope.value,
            project=info.project,
            label=info.label,
            sandbox=info.sandbox,
            created=info.created_at,
            used=info.used_at,
            expires=info.expires_at,
            revoked=info.revoked_at,
        )
    )


def revoke_key(connection: Connection, key: KeyId, at: float) -> KeyInfo | None:
    """As it is afterwards; None: there is none."""
    connection.execute(update(API_KEY).where(API_KEY.c.id == key, API_KEY.c.revoked == 0).values(revoked=at))
    return key_of_id(connection, key)


def note_use(connection: Connection, used: Mapping[KeyId, float]) -> frozenset[KeyId]:
    """Write when keys were used last; those of them that are no good any more."""
    gone = set()
    for key, at in sorted(used.items()):  # in one order: no two wait for each other
        among = (API_KEY.c.id == key, API_KEY.c.revoked == 0)
        if not connection.execute(update(API_KEY).where(*among).values(used=at)).rowcount:
            gone.add(key)
    return frozenset(gone)


def drop_old_keys(connection: Connection, before: float) -> int:
    """Those that were no good any more at that time already; how many there were."""
    ended = or_(
        (API_KEY.c.revoked > 0) & (API_KEY.c.revoked < before),
        (API_KEY.c.expires > 0) & (API_KEY.c.expires < before),
    )
    return connection.execute(delete(API_KEY).where(ended)).rowcount


def sandboxes_with_tokens(connection: Connection, after: str, limit: int) -> tuple[SandboxId, ...]:
    """By id, those after ``after``."""
    column = API_KEY.c.sandbox
    asked = select(column).where(column.is_not(None), column > after).distinct().order_by(column).limit(limit)
    return tuple([SandboxId(text) for text in connection.execute(asked).scalars() if text])


def drop_tokens(connection: Connection, sandboxes: Sequence[SandboxId]) -> int:
    """All of these sandboxes; how many there were."""
    return connection.execute(delete(API_KEY).where(API_KEY.c.sandbox.in_(sandboxes))).rowcount


def projects(connection: Connection) -> tuple[ProjectInfo, ...]:
    """All, by name."""
    return tuple(map(_project, connection.execute(select(PROJECT).order_by(PROJECT.c.name)).mappings()))


def put_project(connection: Connection, info: ProjectInfo) -> ProjectInfo:
    """As it is afterwards: its quota is set, whether or not it was there.  Raises: Conflict: there are too many."""
    quota = encode(info.quota).decode()
    among = PROJECT.c.name == info.name
    if not connection.execute(update(PROJECT).where(among).values(quota=quota)).rowcount:
        if connection.execute(select(func.count()).select_from(PROJECT)).scalar_one() >= MOST_PROJECTS:
            raise Conflict(
                f"there are {MOST_PROJECTS} projects, the most there may be", projects=MOST_PROJECTS
            )
        # Somebody else may have made it since the look.
        made = inserted(connection, PROJECT).values(name=info.name, quota=quota, created=info.created_at)
        connection.execute(made.on_conflict_do_update(index_elements=["name"], set_={"quota": quota}))
    return _project(connection.execute(select(PROJECT).where(among)).mappings().one())


def _key(row: Any) -> KeyInfo:
    """Raises: StoreDamaged: the row is not one of ours."""
    try:
        check_project("project", row["project"])
        return KeyInfo(
            id=parse_key_id(row["id"]),
            scope=Scope(row["scope"]),
            project=row["project"],
            label=str(row["label"]),
            created_at=float(row["created"]),
            used_at=float(row["used"]),
            expires_at=float(row["expires"]),
            revoked_at=float(row["revoked"]),
            sandbox=parse_sandbox_id(row["sandbox"]) if row["sandbox"] is not None else None,
        )
    except (DsecError, ValueError, TypeError) as error:
        raise StoreDamaged(f"the stored row of key {row['id']!r} cannot be read: {error}") from error


def _project(row: Any) -> ProjectInfo:
    """Raises: StoreDamaged."""
    try:
        check_project("project", row["name"])
        quota = decode(Quota, row["quota"].encode())
        return ProjectInfo(name=row["name"], quota=quota, created_at=float(row["created"]))
    except (BadRequest, AttributeError, ValueError, TypeError) as error:
        raise StoreDamaged(f"the stored row of project {row['name']!r} cannot be read: {error}") from error
