"""The templates that a project sees: its own, and beside them everybody's.

Its own are kept below a directory of their own; a name of its own goes before the same name of everybody's. What it does not see is not found:
there is no directory in which it could be.
"""

from __future__ import annotations

from pathlib import Path

from dsec.control.template_store import Keeping, TemplateStore
from dsec.errors import NotFound
from dsec.images.holds import PROJECTS
from dsec.model.built import Built, Tagged


class ProjectTemplateStore(TemplateStore):
    """What is put, tagged or removed is the project's own.

    Args:
        shared: everybody's.
        root: of everybody's. project: whose these are.
    """

    def __init__(self, shared: TemplateStore, root: Path, keeping: Keeping | None, project: str) -> None:
        super().__init__(root / PROJECTS / project, keeping, project=project)
        self._shared = shared

    def find(self, reference: str) -> Built:
        try:
            return super().find(reference)
        except NotFound:
            return self._shared.find(reference)

    def remembered(self, reference: str) -> Built | None:
        known = super().remembered(reference)
        if known is not None or self.has_tag(reference):
            return known
        return self._shared.remembered(reference)

    def tags(self) -> tuple[Tagged, ...]:
        own = {(each.name, each.tag): each for each in super().tags()}
        shared = {(each.name, each.tag): each for each in self._shared.tags()}
        return tuple([each for _, each in sorted({**shared, **own}.items())])

    def history(self, name: str) -> tuple[Tagged, ...]:
        return super().history(name) or self._shared.history(name)
