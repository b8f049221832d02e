"""What a server answers, as values of the model. It is another machine's word: what does not fit is a broken protocol, and no bug of the caller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec

from dsec.errors import BadRequest, ProtocolError
from dsec.remote.connection import Call, Connection
from dsec.wire.values import decode

T = TypeVar("T")


class Items(msgspec.Struct, Generic[T]):
    """A list, or a part of one: ``next`` says where it goes on."""

    items: tuple[T, ...]
    next: str = ""


def read(kind: type[T], body: bytes) -> T:
    """Raises: ProtocolError: it is no such value."""
    try:
        return decode(kind, body)
    except (BadRequest, ValueError) as error:
        said = error.message if isinstance(error, BadRequest) else str(error)
        raise ProtocolError(f"the server's answer is not understood: {said[:300]}") from None


async def value(connection: Connection, kind: type[T], call: Call) -> T:
    """One value.  Raises: as :meth:`Connection.send`."""
    return read(kind, (await connection.send(call)).body)


async def part(connection: Connection, kind: type[T], call: Call) -> Items[T]:
    """A list, or a part of one.  Raises: as :meth:`Connection.send`."""
    listed: Any = Items[kind]  # type: ignore[valid-type]
    found: Items[T] = read(listed, (await connection.send(call)).body)
    return found


async def items(connection: Connection, kind: type[T], call: Call) -> tuple[T, ...]:
    """A list.  Raises: as :meth:`Connection.send`."""
    return (await part(connection, kind, call)).items


async def every(connection: Connection, kind: type[T], call: Call) -> tuple[T, ...]:
    """A list of which a server gives a page at a time, all of it.  Raises: as :meth:`Connection.send`."""
    found: list[T] = []
    while True:
        page = await part(connection, kind, call)
        found += page.items
        if not page.next or not page.items:
            return tuple(found)
        if page.next == call.query.get("cursor"):
            raise ProtocolError("the server's list does not go on: it says the same place twice")
        call = replace(call, query={**call.query, "cursor": page.next})


async def done(connection: Connection, call: Call) -> None:
    """Nothing but that it was done.  Raises: as :meth:`Connection.send`."""
    await connection.send(call)
