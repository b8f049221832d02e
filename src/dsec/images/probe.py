"""Which bases are there, or could be had here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dsec.errors import DsecError
from dsec.images import host
from dsec.images.bases import default_table, has_rules
from dsec.images.packages import system_packages
from dsec.images.system import require_builder
from dsec.images.tools import find_tool, require_tool
from dsec.model.health import Layer, Status

NAME = "base system"


def image_layers(store: Path, bases: Path | None = None) -> tuple[Layer, ...]:
    """One for each kind of base, and one for signatures. Looks, and builds and fetches nothing. Blocking, some 100 ms.

    Args:
        store: root of the image store.
        bases: the table of bases, None = the usual place.
    """
    return (
        image_layer(store),
        _could("base host", _host),
        _could(
            "base debian:SUITE",
            lambda: _tool("mmdebstrap", "installed by mmdebstrap, from the sources of apt"),
        ),
        _could("base docker://", lambda: _tool("skopeo", "fetched by skopeo")),
        _signatures(bases or default_table()),
    )


def image_layer(store: Path) -> Layer:
    """Base `system`.

    Args:
        store: root of the image store.
    """
    built = (store / "names" / "system").exists()
    try:
        require_builder()
        packages = system_packages()
    except DsecError as error:
        if built:
            return Layer(
                NAME, Status.DEGRADED, f"built, and cannot be built again: {error.message}", error.hint
            )
        return Layer(NAME, Status.UNAVAILABLE, error.message, error.hint)
    words = "built" if built else "not built yet: the first sandbox does it (some seconds)"
    return Layer(NAME, Status.ACTIVE, f"{words}, from {len(packages)} Debian packages")


def _could(name: str, look: Callable[[], str]) -> Layer:
    try:
        require_builder()
        return Layer(name, Status.ACTIVE, look())
    except DsecError as error:
        return Layer(name, Status.UNAVAILABLE, error.message, error.hint)


def _host() -> str:
    return f"{', '.join(host.shown())} of this machine, read-only; not reproducible"


def _tool(name: str, words: str) -> str:
    require_tool(name, name, f"such bases are made with {name}")
    return words


def _signatures(bases: Path) -> Layer:
    name, found = "image signatures", find_tool("cosign")
    try:
        asked = has_rules(bases)
    except DsecError as error:
        return Layer(name, Status.UNAVAILABLE, error.message, error.hint)
    if asked and found is None:
        words = f"{bases} asks for them, and cosign is not installed: such images are refused"
        return Layer(name, Status.UNAVAILABLE, words, "install cosign")
    if asked:
        return Layer(name, Status.ACTIVE, f"checked with {found}, as {bases} says")
    hint = "rules under [verify] there" if found else "install cosign, and write rules under [verify] there"
    return Layer(name, Status.DEGRADED, f"nobody asks for them in {bases}", hint)
