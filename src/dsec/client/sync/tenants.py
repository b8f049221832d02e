"""Keys and projects of a server. Generated from `aio/tenants.py` by `scripts/sync_client.py`: do not edit."""

from __future__ import annotations

from dsec.client.sync_link import Link
from dsec.model.ids import parse_key_id
from dsec.model.tenants import Coinage, KeyInfo, NewKey, ProjectInfo, Quota, Scope, coinage_of, scope_of
from dsec.model.volumes import DEFAULT_PROJECT


class Keys:
    """Keys of a server; for its admins."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def create(
        self,
        scope: Scope | str = Scope.DEVELOPER,
        *,
        project: str = DEFAULT_PROJECT,
        label: str = "",
        ttl: float = 0.0,
        coinage: Coinage | str = Coinage.DSEC,
    ) -> NewKey:
        """Make a key, which is shown this once: only its SHA-256 is kept.

        Args:
            scope: "developer" (everything within ``project``) or "admin" (everything). project: is made where it is not there.
            label: your own words. ttl: seconds for which it is good, 0 = until it is revoked.
            coinage: how it is written, "dsec" or "e2b" (as SDKs of that maker want it).

        Raises:
            BadRequest. Denied: the key in use is not an admin's. Unsupported: the engine has no keys.
        """
        chosen = scope_of(scope), coinage_of(coinage)
        return self._link.call(
            self._link.services.tenants.create_key(
                chosen[0], project=project, label=label, ttl=ttl, coinage=chosen[1]
            )
        )

    def list(self, project: str = "", *, after: str = "", limit: int = 1000) -> tuple[KeyInfo, ...]:
        """Keys of one ``project`` or of all, by id, the first ``limit`` of those after the id ``after``; none of them is shown."""
        return self._link.call(self._link.services.tenants.keys(project, after=after, limit=limit))

    def revoke(self, id: str) -> KeyInfo:
        """Make the key of that ``id`` no good, from now on. Twice is no error.  Raises: NotFound, BadRequest."""
        return self._link.call(self._link.services.tenants.revoke_key(parse_key_id(id)))


class Projects:
    """Projects of a server, and what they may have."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def list(self) -> tuple[ProjectInfo, ...]:
        """All that the key in use can see, by name."""
        return self._link.call(self._link.services.tenants.projects())

    def get(self, name: str) -> ProjectInfo:
        """What is known of the project ``name``.  Raises: NotFound."""
        return self._link.call(self._link.services.tenants.project(name))

    def set(self, name: str, quota: Quota) -> ProjectInfo:
        """Let the project ``name`` have what ``quota`` says from now on; it is made where it is not there.  Raises: BadRequest. Denied: the key in use is not an admin's."""
        return self._link.call(self._link.services.tenants.set_quota(name, quota))
