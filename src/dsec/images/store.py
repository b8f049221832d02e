"""The image store: EROFS files named by the digest of their tree, shared by all engines of a user.

``images``, ``names``, ``held``: see :mod:`dsec.images.shelf`. ``building/`` half-made things (of a builder that died: removed
by the next one), ``locks/<key>`` held while that name is built, ``lock`` for moments.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from anyio import CapacityLimiter, to_thread

from dsec.errors import Conflict, DsecError, NotFound, StorageFull
from dsec.images import debian, gc, host, oci, registry
from dsec.images.attended import attended
from dsec.images.bases import default_table, resolve, rule_for
from dsec.images.blobs import BlobCache
from dsec.images.builds import locked, work_directory
from dsec.images.catalogue import take_out
from dsec.images.disk import of_disk, typed
from dsec.images.names import HINT, HOST, SYSTEM, BaseName, parse
from dsec.images.packages import fingerprint, system_packages
from dsec.images.shelf import DIGEST, Meaning, Shelf, make_ready
from dsec.images.signatures import Rule
from dsec.images.system import RECIPE, build_tree, make_erofs, require_builder
from dsec.images.tools import Check
from dsec.images.tree import tree_digest
from dsec.images.unpack import Unpacked, unpack
from dsec.model.images import ImageInfo, Progress, Step, silent
from dsec.ports.storage import Image, ImageConfig, Images

_LOG: Final = logging.getLogger(__name__)
_THREADS: Final = 16
"""In which bases are looked for and built, waiting for one another: not the default ones, which everybody needs for moments."""
_STATUS: Final = Path("/var/lib/dpkg/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What is known of a tree that was just built. ``extra``: what tells later whether it is still current. ``blobs``: that the cache need not keep."""

    sources: Sequence[str] = ()
    config: ImageConfig | None = None
    unpacked: Unpacked | None = None
    extra: Meaning = field(default_factory=dict)
    blobs: tuple[str, ...] = ()


class ImageStore(Images):
    """Images below one directory, which it makes (mode 0700) when absent.

    Args:
        root: of the store.
        progress: told, from a worker thread, what a long build is doing.
        budget: bytes that images may have together: what nobody holds goes after a build that exceeds it, the one first that was asked
            for longest ago, never within an hour. None: no bound.
        bases: the alias table; None = where :func:`~dsec.images.bases.default_table` says.
    """

    def __init__(
        self,
        root: Path,
        *,
        progress: Progress = silent,
        bases: Path | None = None,
        budget: int | None = None,
    ) -> None:
        self._root = root
        self._budget = budget
        self._progress = progress
        self._bases = bases
        self._shelf = Shelf(root)
        self._blobs = BlobCache(root / "blobs")
        self._threads = CapacityLimiter(_THREADS)

    @property
    def root(self) -> Path:
        """Where it is."""
        return self._root

    async def get(self, name: str) -> Image:
        """See :class:`~dsec.ports.storage.Images`.

        ``system`` follows this machine's packages and ``oci:`` its path; ``debian:`` and ``docker://`` stay what they were
        when they were built, until :meth:`refresh`. When the caller is cancelled, a build ends within moments. A digest alone means the image of that tree, if it is stored.
        """
        if name.startswith("sha256:"):
            return await to_thread.run_sync(self._stored, name)
        asked = parse(name)
        return await self._attended(lambda check: self._get(asked, False, check))

    async def refresh(self, name: str) -> Image:
        """The same, built or fetched anew also when it is stored; images that were replaced stay until they are collected."""
        asked = parse(name)
        return await self._attended(lambda check: self._get(asked, True, check))

    async def list(self) -> tuple[Image, ...]:
        """See :class:`~dsec.ports.storage.Images`."""
        return await to_thread.run_sync(self._list)

    async def verify(self, name: str) -> Image:
        """The image after reading all of its file, whatever was checked before.  Raises: NotFound, StoreDamaged."""
        return await to_thread.run_sync(self._verify, name)

    async def hold(self, digest: str, owner: str, home: Path | None = None) -> None:
        """Keep the image of that tree until ``owner`` releases it, also when its name means another one.

        Args:
            home: of the engine that needs it, if one does: when that directory is gone, so is the need.

        Raises: NotFound, BadRequest, Denied, StorageFull.
        """
        await to_thread.run_sync(self._shelf.hold, digest, owner, home)

    async def release(self, digest: str, owner: str) -> None:
        """The end of :meth:`hold`; absent is not an error.  Raises: BadRequest."""
        await to_thread.run_sync(self._shelf.release, digest, owner)

    async def _attended(self, work: Callable[[Check], Image]) -> Image:
        with typed(self._root):
            return await attended(work, limiter=self._threads)

    def _get(self, asked: BaseName, anew: bool, check: Check) -> Image:
        self._shelf.prepare()
        used = self._resolve(asked)
        image = self._pinned(used) if used.pin and not anew else None
        if image is None:
            image = self._obtain(used, anew, check)
        if used.pin not in ("", image.digest, *image.sources):
            raise Conflict(
                f"image {used.name!r} is {image.digest} here, not {used.pin}",
                hint="pin what it is now, or get the image that was pinned from where it is",
                found=image.digest,
                pinned=used.pin,
            )
        return image if used.name == asked.name else replace(image, asked=asked.name)

    def _stored(self, digest: str, full: bool = False) -> Image:
        found = self._shelf.by_digest(digest, digest, full=full) if DIGEST.fullmatch(digest) else None
        if found is None:
            raise NotFound(
                f"no image {digest:.80} is stored", hint="build what it is of again", digest=digest[:80]
            )
        return found

    def _resolve(self, asked: BaseName) -> BaseName:
        return resolve(asked, self._bases or default_table())

    def _pinned(self, used: BaseName) -> Image | None:
        """What is pinned, when the pin is the digest of a tree that is stored; never what shows this machine: that is base host alone."""
        found = self._shelf.by_digest(used.name, used.pin)
        return None if found is None or found.mutable else found

    def _obtain(self, used: BaseName, anew: bool, check: Check) -> Image:
        image = None if anew else self._current(used)
        if image is not None:
            return image
        with locked(self._root / "locks" / used.key, check=check):
            return (None if anew else self._current(used)) or self._build(used, check)

    def _list(self) -> tuple[Image, ...]:
        self._shelf.prepare()
        return tuple(self._shelf.image(name, meaning) for name, meaning in self._shelf.names())

    async def remove(self, name: str) -> ImageInfo:
        """See :class:`~dsec.ports.engine.ImageService`."""
        return await to_thread.run_sync(self._remove, name)

    def collect(self, budget: int | None = None) -> tuple[Path, ...]:
        """What nothing needs goes: see :func:`dsec.images.gc.collect`. Blocking.  Raises: Denied, StoreDamaged."""
        return gc.collect(self._root, budget=self._budget if budget is None else budget)

    def _remove(self, name: str) -> ImageInfo:
        self._shelf.prepare()
        if DIGEST.fullmatch(name):
            return take_out(self._root, "", name)
        names = {each: str(meaning["digest"]) for each, meaning in self._shelf.names()}
        used = name if name in names else self._resolve(parse(name)).name
        if used not in names:
            raise NotFound(
                f"no image {name!r} is stored", hint="`dsec image ls` shows those that are", name=name
            )
        return take_out(self._root, used, names[used])

    def _verify(self, name: str) -> Image:
        if DIGEST.fullmatch(name):
            return self._stored(name, full=True)
        used = self._resolve(parse(name))
        meaning = self._shelf.meaning(used.key)
        if meaning is None:
            raise NotFound(f"no image {name!r} is stored", hint="get it first; it is built then", name=name)
        return self._shelf.load(used.key, used.name, meaning, full=True)

    def _current(self, used: BaseName) -> Image | None:
        """The stored image, unless it was never built or what it was made of has changed since."""
        # Before the meaning is read: what changes in between is seen the next time.
        status = _status_stamp() if used.kind == SYSTEM else ""
        meaning = self._shelf.meaning(used.key)
        if meaning is None:
            return None
        if used.kind == SYSTEM and meaning.get("status") != status and meaning.get("key") != _system_key():
            return None
        if used.kind == HOST and meaning.get("key") != host.fingerprint():
            return None
        if used.kind == "docker" and (words := _words(self._rule(used))) and meaning.get("signed") != words:
            return None  # a rule that is newer than the image
        if used.kind == "oci" and meaning.get("stamp") != _layout_stamp(_layout(used.rest)[0]):
            return None
        return self._shelf.load(used.key, used.name, meaning)

    def _build(self, used: BaseName, check: Check) -> Image:
        """Call with the name's lock held."""
        try:
            return self._made(used, check)
        finally:
            self._progress(Step("done", over=True))

    def _made(self, used: BaseName, check: Check) -> Image:
        """Build and publish."""
        tool = require_builder()
        try:
            with work_directory(self._root) as work:
                tree, file, parts = work / "tree", work / "image", work / "parts"
                tree.mkdir()
                parts.mkdir()
                made = self._make(used, tree, parts, check)
                check()
                self._tell("computing the digest")
                digest = tree_digest(tree, check=check)
                if shows := made.extra.get("shows"):
                    digest = host.identity(digest, shows)
                check()
                self._tell("writing the image")
                make_erofs(tool, tree, file, str(uuid.UUID(digest[7:39])), check=check)
                meaning = {"digest": digest, "sources": list(made.sources), **made.extra, **_told(made)}
                ready = make_ready(file)  # before: the lock is for moments
                with locked(self._root / "lock"):
                    image = self._shelf.publish(used.key, used.name, file, meaning, ready)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(
                    f"no space to build base {used.name!r} in {self._root}",
                    hint="300 MB are needed, or three times the image",
                    path=str(self._root),
                ) from error
            raise of_disk(error, self._root) from error
        self.tidy(made.blobs)
        return image

    def tidy(self, blobs: Sequence[str] = ()) -> None:
        """After a build: room within the budget; milliseconds. What cannot be removed fails nobody's build: the next collection tries again."""
        try:
            if blobs:
                self._blobs.drop(blobs)
            if self._budget is not None:
                gc.collect(self._root, budget=self._budget)
        except DsecError as error:
            _LOG.warning("%s", error)

    def _tell(self, what: str) -> None:
        self._progress(Step(what))

    def _make(self, used: BaseName, tree: Path, parts: Path, check: Check) -> _Made:
        """Fill the tree."""
        match used.kind:
            case "system":
                return self._make_system(tree)
            case "host":
                self._tell("making the skeleton")
                key, shows = host.fingerprint(), host.shown()
                host.build_skeleton(tree)
                return _Made(extra={"key": key, "shows": list(shows)})
            case "debian":
                return _Made(unpacked=debian.build(used.rest, tree, parts, self._tell, check=check))
            case "docker":
                return self._make_docker(used, tree, parts, check)
            case "oci":
                path, tag = _layout(used.rest)
                stamp = _layout_stamp(path)  # before it is read
                made = self._make_oci(path, tag, tree, parts, check)
                return replace(made, extra={"stamp": stamp})
            case _:
                raise NotFound(f"no image is named {used.name!r}", hint=HINT, name=used.name)

    def _make_system(self, tree: Path) -> _Made:
        packages = system_packages()
        extra = {"status": _status_stamp(), "key": fingerprint(packages, RECIPE)}
        build_tree(tree, packages, self._tell)
        return _Made(extra=extra)

    def _make_docker(self, used: BaseName, tree: Path, parts: Path, check: Check) -> _Made:
        rule = self._rule(used)
        words = _words(rule)  # before: a key that is replaced meanwhile asks again
        self._tell(f"fetching {used.name}")
        fetched = registry.fetch(
            used.rest,
            used.pin,
            parts,
            cache=self._blobs,
            rule=rule,
            check=check,
            progress=self._progress,
        )
        made = self._make_oci(fetched.layout, "image", tree, parts, check)
        extra = {"signed": words}
        sources = tuple(dict.fromkeys((*made.sources, fetched.digest)))
        return replace(made, sources=sources, extra=extra, blobs=fetched.blobs)

    def _rule(self, used: BaseName) -> Rule | None:
        """Who must have signed it."""
        return rule_for(used.rest, self._bases or default_table())

    def _make_oci(self, path: Path, tag: str, tree: Path, parts: Path, check: Check) -> _Made:
        self._tell("checking the layers")
        blobs = parts / "blobs"
        blobs.mkdir()
        found = oci.read_image(path, blobs, tag=tag)
        self._tell(f"unpacking {len(found.layers)} layers")
        unpacked = unpack(tree, found.layers, check=check)
        return _Made(sources=(found.source,), config=found.config, unpacked=unpacked)


def _words(rule: Rule | None) -> str:
    return rule.words if rule is not None else ""


def _told(made: _Made) -> dict[str, Any]:
    """Of the unpacking and the config, for the files of the store."""
    told: dict[str, Any] = {}
    if made.config is not None:
        told["config"] = {name: getattr(made.config, name) for name in made.config.__slots__}
    if made.unpacked is not None:
        told["dropped"] = {**made.unpacked.dropped, "skipped": made.unpacked.skipped}
    return told


def _layout(rest: str) -> tuple[Path, str]:
    """Path and tag of what follows ``oci:``."""
    path, separator, tag = rest.rpartition(":")
    if not separator or "/" in tag or oci.has_layout(Path(rest)):
        return Path(rest), ""
    return Path(path), tag


def _layout_stamp(path: Path) -> str | None:
    """Changes when a layout or an archive does."""
    try:
        info = (path / "index.json" if path.is_dir() else path).stat()
    except OSError:
        return None
    return f"{info.st_dev} {info.st_ino} {info.st_mtime_ns} {info.st_size}"


def _system_key() -> str:
    return fingerprint(system_packages(), RECIPE)


def _status_stamp() -> str:
    """Changes with every change of the package data base: a cheap way to see that nothing changed."""
    try:
        info = _STATUS.stat()
    except FileNotFoundError:
        return "none"
    return f"{RECIPE} {info.st_ino} {info.st_mtime_ns} {info.st_size}"
