"""One connection to each sandbox's inside, made when needed and made again when lost."""

from __future__ import annotations

from contextlib import suppress

from dsec.errors import DsecError, NotFound, RuntimeUnavailable
from dsec.node.handles import Handle
from dsec.ports.guest import Guest


class Guests:
    """The connections."""

    async def get(self, handle: Handle) -> Guest:
        """The connection, made now when there is none.

        Raises:
            RuntimeUnavailable: the inside does not answer.
            SandboxFailed, UnknownOutcome: because the sandbox has ended.
        """
        guest = handle.guest
        if guest is not None and not guest.lost:
            return guest
        return await self._connect(handle)

    async def warm(self, handle: Handle) -> None:
        """Connect before the first act asks for it. Failing is for that act to tell."""
        with suppress(DsecError, OSError):
            await self.get(handle)

    async def _connect(self, handle: Handle) -> Guest:
        async with handle.connecting:
            if handle.guest is not None and not handle.guest.lost:
                return handle.guest
            await self.drop(handle)
            try:
                handle.guest = guest = await handle.runtime.connect(handle.id)
            except (NotFound, RuntimeUnavailable) as exc:
                loss = handle.loss("before it could be reached")
                if loss is not None:
                    raise loss from exc
                if isinstance(exc, NotFound):
                    raise RuntimeUnavailable(
                        f"{handle.id} does not run here any more", sandbox=handle.id
                    ) from exc
                raise
            return guest

    async def drop(self, handle: Handle) -> None:
        """Close the connection, if there is one; commands go on."""
        guest, handle.guest = handle.guest, None
        if guest is not None:
            await guest.close()
