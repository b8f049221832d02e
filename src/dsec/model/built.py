"""Built templates: a blueprint, and exactly what it was made of."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.model.template import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that a template says and that its author should know of.

    Attributes:
        field: its path in the template. line: where it is written, 0 = unknown. text: what it says. why: what there is to know.
    """

    field: str
    line: int
    text: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A template that was built: from here on nothing of it is looked up by name again.

    Attributes:
        digest: over the blueprint and everything that it was built of, ``sha256:…``. blueprint: over the template alone.
        template: what it says. base: the image that was used, with its digest. layers: digests of images over it, topmost first.
        lock: digest of the lock of its Python dependencies, "" = it has none.
        packages: what the lock holds, ``name==version`` each. origin: the snapshot that it was made of, "" = it was built.
        unenforced: what it declares and nothing enforces. floating: dependencies whose version is not pinned.
        built_at: seconds since the epoch.
    """

    digest: str
    blueprint: str
    template: Template
    base: str
    base_digest: str
    layers: tuple[str, ...]
    lock: str
    unenforced: tuple[Note, ...]
    floating: tuple[Note, ...]
    built_at: float
    packages: tuple[str, ...] = ()
    origin: str = ""

    @property
    def reference(self) -> str:
        """``name@sha256:…``: this one, whatever its tags mean later."""
        return f"{self.template.name}@{self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """What a tag means, or meant until another took its place.

    Attributes:
        name: of the template. tag: its own. digest: of the built template. at: when it was set, seconds since the epoch.
    """

    name: str
    tag: str
    digest: str
    at: float
