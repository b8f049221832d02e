"""Which paths of the host a volume may show: the operator's word, kept when the path is opened.

The path that was asked for is opened first, and judged by where that open file *is*: links, `..` and whatever is swapped before or
after that do not matter, for it is this open file that is mounted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest, Denied

_SETTING: Final = (
    "the operator allows paths with Settings.host_paths, and those of a server with $DSEC_HOST_PATHS as it was when the server started "
    "(what it is for this command changes nothing there): set it and start the server anew"
)


class HostPaths:
    """See the module.

    Args:
        allowed: directories (with all that lies in them) and files. None: whatever whoever asks names himself, and nothing that a
            template names, for that may be a stranger's. Links on the way to these are followed once, now.
    """

    def __init__(self, allowed: Sequence[Path] | None) -> None:
        self._allowed = None if allowed is None else tuple([Path(os.path.realpath(path)) for path in allowed])

    def open(self, source: Path, *, lent: bool) -> int:
        """An ``O_PATH`` descriptor of it, which the caller closes. Blocking.

        Args:
            lent: a template named it.

        Raises:
            Denied: it is not allowed; said alike of what is not there, so that it tells nothing of what is not allowed.
            BadRequest: it cannot be opened, and whoever asks may name what he likes.
        """
        if lent and self._allowed is None:
            raise Denied(
                f"volume source: {str(source)!r} is named by the template, and no path of this machine is allowed to templates",
                hint=f"name a volume with the same target yourself; {_SETTING}",
                source=str(source),
            )
        try:
            fd = os.open(source, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            if self._allowed is not None:
                raise _not_allowed(source) from None
            raise BadRequest(f"volume source: {str(source)!r}: {error.strerror}") from error
        try:
            if self._allowed is not None and not self._allows(fd):
                raise _not_allowed(source)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _allows(self, fd: int) -> bool:
        real = _real_path(fd)
        return real is not None and any(real.is_relative_to(root) for root in self._allowed or ())


def _not_allowed(source: Path) -> Denied:
    return Denied(
        f"volume source: nothing at {str(source)!r} is allowed by the operator of this engine",
        hint=f"choose another, or a named volume; {_SETTING}",
        source=str(source),
    )


def _real_path(fd: int) -> Path | None:
    """Where an open file is in our tree; None: it is in no place (removed, or of a mount that is none of ours)."""
    real = os.readlink(f"/proc/self/fd/{fd}")
    if not real.startswith("/"):
        return None
    try:
        there = os.lstat(real)
    except OSError:
        return None
    return Path(real) if os.path.samestat(there, os.fstat(fd)) else None
