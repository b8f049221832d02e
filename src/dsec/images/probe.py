"""Whether base `system` is there, or could be built."""

from __future__ import annotations

from pathlib import Path

from dsec.errors import DsecError
from dsec.images.packages import system_packages
from dsec.images.system import require_builder
from dsec.model.health import Layer, Status

NAME = "base system"


def image_layer(store: Path) -> Layer:
    """Looks, and builds nothing. Blocking, some 100 ms.

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
