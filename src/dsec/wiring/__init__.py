"""Composition: which back-ends an engine is made of. The only package that names concrete ones.

Names are loaded when they are first asked for: whoever reaches an engine behind a server loads nothing of what makes one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dsec.wiring.engines import AsyncDsec, Dsec, image_service
    from dsec.wiring.health import Collected, collect, examine
    from dsec.wiring.records import journal_reader, verify_journal
    from dsec.wiring.servers import server
    from dsec.wiring.settings import Settings, default_home, programs

__all__ = [
    "AsyncDsec",
    "Collected",
    "Dsec",
    "Settings",
    "collect",
    "default_home",
    "examine",
    "image_service",
    "journal_reader",
    "programs",
    "server",
    "verify_journal",
]

_HOME: Final = {
    "AsyncDsec": "engines",
    "Dsec": "engines",
    "image_service": "engines",
    "Collected": "health",
    "collect": "health",
    "examine": "health",
    "journal_reader": "records",
    "verify_journal": "records",
    "server": "servers",
    "Settings": "settings",
    "default_home": "settings",
    "programs": "settings",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dsec.wiring' has no attribute {name!r}")
    return getattr(import_module(f"dsec.wiring.{_HOME[name]}"), name)
