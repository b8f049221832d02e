"""How a payload of the init protocol is laid out: its fields in order, each able to write and to read itself.

Whatever bytes come in, reading returns values or raises :class:`~dsec.errors.ProtocolError`; nothing is allocated that the bytes do not back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from dsec.errors import ProtocolError
from dsec.wire.frames import MAX_ARGUMENTS, MAX_ID, MAX_ITEMS, MAX_MESSAGE, MAX_PATH, MAX_PAYLOAD, U32


class Part:
    """One or more neighbouring fields of a payload."""

    __slots__ = ("count",)
    count: int

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        raise NotImplementedError

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        raise NotImplementedError


class Numbers(Part):
    """Numbers side by side, as one ``struct``."""

    __slots__ = ("_struct",)

    def __init__(self, form: str) -> None:
        self._struct = struct.Struct("<" + form)
        self.count = len(form)

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        out.append(self._struct.pack(*values))

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        out += self._struct.unpack_from(data, at)
        return at + self._struct.size


class Bytes(Part):
    """u32 length and that many bytes."""

    __slots__ = ("_least", "_most", "_nul")

    def __init__(self, most: int, *, least: int = 0, nul: bool = True) -> None:
        self.count = 1
        self._most, self._least, self._nul = most, least, nul

    def _check(self, value: bytes) -> None:
        if not self._least <= len(value) <= self._most:
            raise ProtocolError(f"{len(value)} bytes where {self._least} to {self._most} are allowed")
        if not self._nul and b"\0" in value:
            raise ProtocolError("a NUL byte in a path")

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        value = values[0]
        self._check(value)
        out.append(U32.pack(len(value)))
        out.append(value)

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        at += 4
        end: int = at + U32.unpack_from(data, at - 4)[0]
        if end > len(data):
            raise ProtocolError(f"bytes end {end - len(data)} beyond the payload")
        value = data[at:end]
        self._check(value)
        out.append(value)
        return end


class Rest(Part):
    """All bytes that remain, without a length."""

    __slots__ = ()

    def __init__(self) -> None:
        self.count = 1

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        out.append(values[0])

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        out.append(data[at:])
        return len(data)


class ListOf(Part):
    """u32 count and the items, each of at least ``least`` bytes (so a count cannot claim more than is there)."""

    __slots__ = ("_item", "_least", "_make", "_most", "_split")

    def __init__(
        self,
        item: Layout,
        make: Callable[..., Any],
        split: Callable[[Any], Sequence[Any]],
        *,
        least: int,
        most: int = MAX_PAYLOAD,
    ) -> None:
        self.count = 1
        self._item, self._make, self._split, self._least, self._most = item, make, split, least, most

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        items = values[0]
        if len(items) > self._most:
            raise ProtocolError(f"{len(items)} items, at most {self._most}")
        out.append(U32.pack(len(items)))
        for item in items:
            self._item.put(self._split(item), out)

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        (count,) = U32.unpack_from(data, at)
        at += 4
        if count > self._most or count * self._least > len(data) - at:
            raise ProtocolError(f"a list claims {count} items in {len(data) - at} bytes")
        items = []
        for _ in range(count):
            fields: list[Any] = []
            at = self._item.take(data, at, fields)
            items.append(self._make(*fields))
        out.append(tuple(items))
        return at


class Layout:
    """The fields of a payload or item, in order."""

    __slots__ = ("_parts", "numbers")

    def __init__(self, *parts: Part | str) -> None:
        self._parts = tuple(Numbers(part) if isinstance(part, str) else part for part in parts)
        only = parts[0] if len(parts) == 1 else None if parts else ""
        self.numbers = struct.Struct("<" + only) if isinstance(only, str) else None

    def put(self, values: Sequence[Any], out: list[bytes]) -> None:
        """Append the bytes of ``values``."""
        at = 0
        for part in self._parts:
            end = at + part.count
            part.put(values[at:end], out)
            at = end

    def take(self, data: bytes, at: int, out: list[Any]) -> int:
        """Append the values at ``at``; where they end."""
        for part in self._parts:
            at = part.take(data, at, out)
        return at

    def encode(self, values: Sequence[Any]) -> bytes:
        """Raises: ProtocolError: a value is out of range."""
        out: list[bytes] = []
        try:
            self.put(values, out)
        except (struct.error, TypeError) as wrong:
            raise ProtocolError(f"a field is out of range: {wrong}") from None
        return b"".join(out)

    def decode(self, data: bytes) -> Sequence[Any]:
        """All of ``data``.  Raises: ProtocolError: cut short, too long or out of range."""
        out: list[Any] = []
        try:
            end = self.take(data, 0, out)
        except struct.error:
            raise ProtocolError(f"payload of {len(data)} bytes is cut short") from None
        if end != len(data):
            raise ProtocolError(f"{len(data) - end} bytes after the end of the payload")
        return out


def same(value: Any) -> tuple[Any]:
    return (value,)


def fields_of(value: Any) -> list[Any]:
    return [getattr(value, name) for name in value.__match_args__]


def alone(value: Any) -> Any:
    return value


ID: Final = Bytes(MAX_ID, least=1)
PATH: Final = Bytes(MAX_PATH, nul=False)
STRING: Final = Bytes(MAX_ARGUMENTS, nul=False)
STRINGS: Final = ListOf(Layout(STRING), alone, same, least=4, most=MAX_ITEMS)
GROUPS: Final = ListOf(Layout("I"), alone, same, least=4, most=MAX_ITEMS)
TEXT: Final = Bytes(MAX_MESSAGE)
