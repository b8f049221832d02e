"""Who may come in, and what of an engine is theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dsec.model.tenants import Principal
from dsec.ports.engine import Services


class Gate(ABC):
    """Between the server and the engine: every request passes it once."""

    @abstractmethod
    async def principal(self, key: str) -> Principal:
        """Whose key that is.  Raises: Unauthenticated. Busy: the project asks more often than it may."""

    async def check(self, principal: Principal) -> None:  # noqa: B027 - fakes have keys that never end
        """Whether the key by which that principal came in is still good: asked each second of whoever is being answered for long.

        A gate whose keys never end need not say anything.

        Raises:
            Unauthenticated: it has expired, was revoked, or its sandbox has ended.
        """

    @abstractmethod
    def services(self, principal: Principal) -> Services:
        """The engine as that principal may see it: what is somebody else's does not exist. The same object for the same principal, as long as it is used."""
