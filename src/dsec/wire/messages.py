"""What every payload of the init protocol has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from dsec.errors import ProtocolError
from dsec.wire.frames import Kind, encode_frame
from dsec.wire.layouts import Layout, fields_of


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded payload. ``MOST`` bounds fields that have fewer values than their width: without it all are allowed."""

    KIND: ClassVar[Kind]
    LAYOUT: ClassVar[Layout] = Layout()
    MOST: ClassVar[tuple[tuple[str, int], ...]] = ()

    def check(self) -> None:
        """Raises: ProtocolError: a field has a value that the page does not name."""
        for name, most in self.MOST:
            if getattr(self, name) > most:
                raise ProtocolError(f"{self.KIND.name}.{name} is {getattr(self, name)}, at most {most}")

    def encode(self) -> bytes:
        """The payload.  Raises: ProtocolError."""
        self.check()
        return self.LAYOUT.encode(fields_of(self))

    def frame(self, channel: int, flags: int = 0) -> bytes:
        """The whole frame.  Raises: ProtocolError."""
        return encode_frame(self.KIND, channel, self.encode(), flags)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Raises: ProtocolError."""
        numbers = cls.LAYOUT.numbers
        if numbers is not None and len(payload) == numbers.size:
            message = cls(*numbers.unpack(payload))
        else:
            message = cls(*cls.LAYOUT.decode(payload))
        if cls.MOST:
            message.check()
        return message
