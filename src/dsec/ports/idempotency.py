"""Requests that must not be done twice: what is known of them by the keys that their callers gave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """An answer as it was given: HTTP status, media type, body."""

    status: int
    media_type: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What is known of a request.

    Attributes:
        at: when it was first asked, seconds since the epoch.
        fresh: that is now: nobody asked it before.
        answer: that it was given; None with ``fresh`` False: whoever began it did not finish, here or in a server that is gone.
    """

    at: float
    fresh: bool
    answer: Recorded | None = None


class IdempotencyStore(ABC):
    """By project and key. Durable: what was begun is known to have begun, also after a crash.

    Every method raises:
        StorageFull, StoreDamaged, RuntimeUnavailable, Busy: the store; the request is not to be done then.
    """

    @abstractmethod
    async def begin(self, project: str, key: str, request: str) -> Begun:
        """Record that it begins, unless it is known already; stored when this returns.

        Args:
            key: at most 300 characters of printable ASCII: what the caller gave, and before it whose it is. request: the digest of everything that was asked.

        Raises:
            Conflict: the key was given with another request.
        """

    @abstractmethod
    async def finish(self, project: str, key: str, answer: Recorded) -> None:
        """Record its answer; the first one stays."""

    @abstractmethod
    async def forget(self, project: str, key: str) -> None:
        """It is certain that nothing was done. One that was finished stays."""

    @abstractmethod
    async def sweep(self, before: float, limit: int) -> int:
        """Forget at most ``limit`` of those that were first asked ``before``; how many there were."""
