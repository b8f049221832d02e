"""What a tree may have, whoever makes it: an image, a layer, or an archive of one. One place, so that what one makes the others can read."""

from __future__ import annotations

from typing import Final

PATH_BYTES: Final = 3000
DEPTH: Final = 200
"""Directories in one another."""
IDS: Final = 65_536
"""Owners are below: what a sandbox's own user ids can express."""
LATEST_SECONDS: Final = 2**33 - 1
"""Since the epoch: a date (in 2242) that every file system can keep, and the eleven octal digits of an archive; none is before the epoch."""
LATEST: Final = LATEST_SECONDS * 10**9
"""The same in nanoseconds."""
