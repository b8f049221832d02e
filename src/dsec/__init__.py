"""DSec: the execution environment that agents run in.

``Dsec`` and ``AsyncDsec`` are loaded when first named, so that importing a part of the package loads only that part;
``__version__`` is looked up when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    __version__: str
    from dsec.model.sandbox import Level, Limits, Volume
    from dsec.wiring import AsyncDsec, Dsec, Settings

__all__ = ["AsyncDsec", "Dsec", "Level", "Limits", "Settings", "Volume", "__version__"]

_HOME: Final = {
    "AsyncDsec": "dsec.wiring",
    "Dsec": "dsec.wiring",
    "Settings": "dsec.wiring",
    "Level": "dsec.model.sandbox",
    "Limits": "dsec.model.sandbox",
    "Volume": "dsec.model.sandbox",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'dsec' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def _version() -> str:
    """Of the installed distribution.  Raises: AttributeError: none is installed."""
    metadata = import_module("importlib.metadata")  # slow to load, and needed for nothing else
    try:
        return str(metadata.version("dsec-engine"))
    except metadata.PackageNotFoundError:
        raise AttributeError("dsec has no version: the distribution 'dsec-engine' is not installed") from None
