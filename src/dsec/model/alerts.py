"""Who is told of problems, and what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dsec.errors import BadRequest
from dsec.model.checks import check_seconds, shown
from dsec.model.sandbox import Problem


class Turn(StrEnum):
    """What became of a problem."""

    APPEARED = "appeared"
    PERSISTS = "persists"  # it is still there after the time that was set
    SOLVED = "solved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing to tell: ``at`` in seconds since the epoch."""

    turn: Turn
    at: float
    problem: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """How problems are told: to a command, or to a URL.

    Attributes:
        command: program and arguments, run without a shell; it reads JSON from its standard input. url: to which the same is posted.
        persists: seconds after which a problem that is still there is told once more. timeout: seconds for one delivery.

    Raises:
        BadRequest: not one of command and url.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    persists: float = 600.0
    timeout: float = 10.0

    def __post_init__(self) -> None:
        words: object = self.command
        if not isinstance(words, tuple) or not all(
            isinstance(word, str) and word and "\0" not in word for word in words
        ):
            raise BadRequest(f"alert.command: {shown(words)} is not a tuple of words", field="alert.command")
        if bool(self.command) is bool(self.url):
            raise BadRequest("alert: name a command or a URL", field="alert")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise BadRequest("alert.url: it does not begin with http:// or https://", field="alert.url")
        check_seconds("alert.persists", self.persists)
        check_seconds("alert.timeout", self.timeout)
