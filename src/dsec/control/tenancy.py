"""The engine as each principal may see it.

An admin sees everything of every project. A developer sees what is of its project, and everybody's templates and images; whatever it makes is its
project's. Whoever has a token of a sandbox acts in that one: it runs commands, reads and writes files, looks, posts decisions and reaches ports. It
does not end, pause, copy or prolong it: what becomes of a sandbox, and of what it costs, is for those whose it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from dsec.control.reach import Owners, Reach
from dsec.control.scoped_acts import ScopedExecs, ScopedFiles, ScopedObserve, ScopedPorts, ScopedTrees
from dsec.control.scoped_sandboxes import Allowed, ScopedSandboxes, ScopedSnapshots, allow_all
from dsec.control.scoped_stock import (
    ScopedImages,
    ScopedPool,
    ScopedSharing,
    ScopedTemplates,
    ScopedTenants,
    ScopedVolumes,
)
from dsec.model.tenants import Principal, Scope
from dsec.model.volumes import DEFAULT_PROJECT
from dsec.ports.engine import Services, SharingService, TemplateService, Workplace
from dsec.ports.tenants import TenantService

_ROOMS: Final = 1024  # of projects that were used last


@dataclass(frozen=True, slots=True)
class Room:
    """What a project has of its own, where it has any."""

    templates: TemplateService
    sharing: SharingService


Make = Callable[[str, Workplace], Room]


class Tenancy:
    """Args:
    services, place: the engine. tenants: keys and projects.
    room: makes the templates of a project, over what that project may build with.
    """

    def __init__(self, services: Services, place: Workplace, tenants: TenantService, room: Make) -> None:
        self._services = services
        self._place = place
        self._tenants = tenants
        self._make = room
        self._owners = Owners(services.sandboxes, services.snapshots)
        self._shared = Room(services.templates, services.sharing)
        self._rooms: OrderedDict[str, Room] = OrderedDict()

    def services(self, principal: Principal) -> Services:
        """The engine as that principal sees it; what it does is recorded as its."""
        reach = Reach(principal, self._owners, principal.id)
        room = self._room(principal)
        inner = self._services
        changes = reach.all or principal.project != DEFAULT_PROJECT
        templates = ScopedTemplates(room.templates, reach, changes=changes)
        allow = Allowed(templates).check
        return replace(
            inner,
            sandboxes=ScopedSandboxes(inner.sandboxes, reach, allow),
            snapshots=ScopedSnapshots(inner.snapshots, None, None, reach, allow),
            volumes=ScopedVolumes(inner.volumes, reach),
            templates=templates,
            sharing=ScopedSharing(room.sharing, reach, changes=changes),
            images=ScopedImages(inner.images, reach),
            execs=ScopedExecs(inner.execs, reach),
            files=ScopedFiles(inner.files, reach),
            trees=ScopedTrees(inner.trees, reach),
            observe=ScopedObserve(inner.observe, reach),
            ports=ScopedPorts(inner.ports, reach),
            pool=ScopedPool(inner.pool, reach),
            tenants=ScopedTenants(self._tenants, reach),
            close=_nothing,
        )

    def _room(self, principal: Principal) -> Room:
        return self._shared if principal.scope is Scope.ADMIN else self._of(principal.project)

    def _of(self, project: str) -> Room:
        room = self._rooms.get(project)
        if room is None:
            room = self._rooms[project] = self._make(project, self._workplace(project))
            if len(self._rooms) > _ROOMS:
                self._rooms.popitem(last=False)
        self._rooms.move_to_end(project)
        return room

    def _workplace(self, project: str) -> Workplace:
        """Where what a project builds is built: sandboxes there are its own, and what it does not see is not there."""
        builder = Principal(id="", scope=Scope.DEVELOPER, project=project)
        reach = Reach(builder, self._owners, None)
        place = self._place
        snapshots = ScopedSnapshots(place.snapshots, place.changes, place.arrivals, reach, allow_all)
        return Workplace(
            sandboxes=ScopedSandboxes(place.sandboxes, reach, allow_all),
            execs=ScopedExecs(place.execs, reach),
            snapshots=snapshots,
            changes=snapshots,
            arrivals=snapshots,
        )


async def _nothing() -> None:
    """Whoever sees an engine through the gate does not close it."""
