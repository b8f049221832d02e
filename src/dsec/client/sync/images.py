"""Images that sandboxes stand on. Generated from `aio/images.py` by `scripts/sync_client.py`: do not edit."""

from __future__ import annotations

from dsec.client.sync_link import Link
from dsec.model.checks import check_count, check_text
from dsec.model.images import MOST_BYTES, Freed, ImageInfo


class Images:
    """The images that sandboxes stand on, shared by all engines of a user.

    A ``name`` is that of a base, or ``sha256:…``.

    Every method raises:
        BadRequest: the name. NotFound: there is no such image. StoreDamaged, Denied: the store.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def list(self) -> tuple[ImageInfo, ...]:
        """What is stored, by name; what no name stands for comes last."""
        return self._link.call(self._link.services.images.list())

    def get(self, name: str) -> ImageInfo:
        """The image of that ``name``, built or fetched first when it is not stored.

        Raises:
            Conflict: its content is not that of the pinned digest. TooLarge: more than an image may have.
            Unsupported: it cannot be built here; the message says what is missing. RuntimeUnavailable, Busy, StorageFull.
        """
        check_text("name", name)
        return self._link.call(self._link.services.images.get(name))

    def refresh(self, name: str) -> ImageInfo:
        """The image of that ``name`` built or fetched anew. Sandboxes and templates keep what they have.  Raises: as :meth:`get`."""
        check_text("name", name)
        return self._link.call(self._link.services.images.refresh(name))

    def verify(self, name: str) -> ImageInfo:
        """The image of that ``name`` after all of its file was read.  Raises: StoreDamaged: it is not what was stored."""
        check_text("name", name)
        return self._link.call(self._link.services.images.verify(name))

    def remove(self, name: str) -> ImageInfo:
        """Take a ``name`` away, and the image when no other name stands for it; given a digest, the image and all its names.

        Raises:
            Conflict: templates, or engines with sandboxes or snapshots, need it; all are named.
        """
        check_text("name", name)
        return self._link.call(self._link.services.images.remove(name))

    def collect(self, budget: int | None = None) -> Freed:
        """Remove what nothing needs; with a ``budget`` of bytes also what nobody holds beyond it, the longest unused first."""
        if budget is not None:
            check_count("budget", budget, 0, MOST_BYTES)
        return self._link.call(self._link.services.images.collect(budget))
