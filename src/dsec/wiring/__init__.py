"""Composition: which back-ends an engine is made of. The only package that names concrete ones."""

from dsec.wiring.engines import AsyncDsec, Dsec, image_service
from dsec.wiring.health import Collected, collect, examine
from dsec.wiring.records import journal_reader, verify_journal
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
    "verify_journal",
]
