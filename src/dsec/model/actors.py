"""Who acts, as the journal names them: told once where somebody comes in, and read where a record is made.

It goes with the task, as everything does that is in its context: what a request begins is that request's, also in tasks that outlive it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

LOCAL: Final = "local"
"""The owner of the engine on its own machine, and the engine itself."""

_actor: Final[ContextVar[str]] = ContextVar("dsec.actor", default=LOCAL)

actor: Final = _actor.get
"""Who acts now: the id of a key, or ``local``."""


@contextmanager
def acting(who: str) -> Iterator[None]:
    """Within, and in tasks that are started within, ``who`` acts."""
    token = _actor.set(who)
    try:
        yield
    finally:
        _actor.reset(token)
