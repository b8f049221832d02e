"""Where built templates are, everybody's and those of projects, and what the images weigh that they stand on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsec.control.project_templates import ProjectTemplateStore
from dsec.control.template_store import TemplateStore
from dsec.errors import BadRequest, DsecError
from dsec.images.holds import PROJECTS, TEMPLATES
from dsec.images.shelf import Shelf
from dsec.model.volumes import DEFAULT_PROJECT, check_project

_FROM_REGISTRY: Final = "docker://"


def templates_of(store: Path) -> Path:
    """The directory of built templates of an image store."""
    return store / TEMPLATES


def built_in(store: Path, project: str | None) -> TemplateStore:
    """The templates of a project in an image store; None: everybody's."""
    root, shelf = templates_of(store), Shelf(store)
    shared = TemplateStore(root, shelf)
    if project in (None, DEFAULT_PROJECT):
        return shared
    return ProjectTemplateStore(shared, root, shelf, project)


def project_stores(store: Path) -> Mapping[str, TemplateStore]:
    """Those of every project that has its own, by its name. Blocking."""
    root = templates_of(store) / PROJECTS
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    return {name: built_in(store, name) for name in names if _is_project(name)}


def _is_project(name: str) -> bool:
    try:
        check_project("project", name)
    except BadRequest:
        return False
    return name != DEFAULT_PROJECT


def weigh(store: Path, digests: frozenset[str]) -> int:
    """Bytes of those images that tenants chose or made; what has a name here that is of no registry is everybody's. Blocking."""
    with suppress(DsecError, OSError):  # names that cannot be read: all of them count
        digests -= {
            str(meaning["digest"])
            for name, meaning in Shelf(store).names()
            if not name.startswith(_FROM_REGISTRY)
        }
    return sum(_size(store / "images" / f"{digest.removeprefix('sha256:')}.erofs") for digest in digests)


def _size(path: Path) -> int:
    """Bytes; 0: it is not there (base ``host`` never is)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
