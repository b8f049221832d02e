"""Built templates on disk, shared by all engines of a user.

``built/<digest>.json`` one that was built, ``tags/<name>/<tag>`` what a tag means, ``history/<name>`` a line for each time that a
tag was set. A tag is set by renaming a file: whoever reads it sees the old meaning or the new one.

A record keeps the images that it names: references to them are made and taken away while nobody else changes what is here, and count for
as long as the record is there (:mod:`dsec.images.holds`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Final, Protocol, TypeVar

from dsec.control.built_json import from_json, to_json
from dsec.errors import BadRequest, Busy, Denied, DsecError, NotFound, StoreDamaged
from dsec.images.builds import open_lock
from dsec.images.disk import MOST_BYTES, damaged, read_small, typed
from dsec.images.holds import BUILT
from dsec.images.shelf import DIGEST, write_whole
from dsec.model.built import Built, Tagged
from dsec.model.checks import shown
from dsec.templates.dump import digest as blueprint_of

LATEST: Final = "latest"
_REFERENCE: Final = re.compile(
    r"(?P<name>[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_HISTORY: Final = 1000  # lines that are shown, and kept when there are more than
_HISTORY_MOST: Final = 2000
_TAG_BYTES: Final = 4096
_HINT: Final = "build the template again"

_REMEMBERED: Final = 256  # built templates that were asked for last
_Stamp = tuple[int, int, int, int]
_K = TypeVar("_K")
_V = TypeVar("_V")


class Keeping(Protocol):
    """Keeps images that no name stands for any more. Blocking."""

    def hold(self, digest: str, owner: str) -> None:
        """Raises: NotFound: it is not stored."""

    def let_go(self, owner: str) -> None:
        """Of all that it holds."""


class TemplateStore:
    """Below one directory, which it makes (mode 0700) when absent. Blocking.

    Args:
        keeping: the images that are named here; None: nobody ever removes one.
        project: whose they are, where they are not everybody's.
    """

    def __init__(self, root: Path, keeping: Keeping | None = None, *, project: str = "") -> None:
        self._root = root
        self._project = project
        self._keeping = keeping
        self._read: OrderedDict[str, tuple[_Stamp, Built]] = OrderedDict()  # by digest, last used last
        self._tags: OrderedDict[tuple[str, str], tuple[_Stamp, str]] = (
            OrderedDict()
        )  # what they meant, likewise
        self._reading = Lock()

    def put(self, built: Built, tag: str = LATEST) -> None:
        """Keep one with its images, and let a tag mean it.

        Raises: StorageFull, BadRequest. NotFound: an image of it is not stored.
        """
        name = built.template.name
        _parsed(f"{name}:{tag}")
        with self._alone():
            self._hold(built)
            if not self._is_whole(built.digest):
                write_whole(self._path(built.digest), json.dumps(to_json(built)).encode())
            self._set(name, tag, built.digest)

    def _hold(self, built: Built) -> None:
        """Before the record: whoever is killed in between has held nothing for longer than minutes."""
        if self._keeping is not None:
            for digest in dict.fromkeys((built.base_digest, *built.layers)):
                self._keeping.hold(digest, owner_of(built.digest, self._project))

    def find(self, reference: str) -> Built:
        """The one that ``name[:tag]`` or ``name@sha256:…`` means.  Raises: NotFound, BadRequest, StoreDamaged."""
        name, tag, digest = _parsed(reference)
        built = self._load(digest or self._meaning(name, tag, reference), reference)
        if built.template.name != name:
            raise _nothing(reference)
        return built

    def remembered(self, reference: str) -> Built | None:
        """As :meth:`find` where that needs no more than a look at whether two files are still the same; None: ask :meth:`find`.

        The one method that does not wait for a disk to read: whoever makes a sandbox of a template asks for it each time.
        """
        try:
            name, tag, digest = _parsed(reference)
        except BadRequest:
            return None
        with self._reading:
            if not digest:
                stamp, digest = self._tags.get((name, tag), (None, ""))
                if stamp is None or stamp != _stamp(self._tag_path(name, tag)):
                    return None
            known = self._read.get(digest)
            if known is None or known[0] != _stamp(self._path(digest)) or known[1].template.name != name:
                return None
            self._read.move_to_end(digest)
            return known[1]

    def has_tag(self, reference: str) -> bool:
        """Whether there is something here that it could mean; only a look, as :meth:`remembered`."""
        try:
            name, tag, digest = _parsed(reference)
        except BadRequest:
            return False
        return _stamp(self._path(digest) if digest else self._tag_path(name, tag)) is not None

    def tags(self) -> tuple[Tagged, ...]:
        """What every tag means, by name and tag.  Raises: StoreDamaged, Denied."""
        found = []
        for path in self._tag_files():
            with suppress(FileNotFoundError):
                digest, at = _meant(path), path.lstat().st_mtime
                found.append(Tagged(name=path.parent.name, tag=path.name, digest=digest, at=at))
        return tuple(found)

    def _tag_files(self, name: str = "") -> list[Path]:
        """Of one name or of all, without those that are being written.  Raises: StoreDamaged, Denied."""
        tags = self._root / "tags"
        with typed(self._root):
            directories = [tags / name] if name else _listed(tags)
            return [path for each in directories for path in _listed(each) if not path.name.startswith(".")]

    def history(self, name: str) -> tuple[Tagged, ...]:
        """The latest thousand times that a tag of that name was set, oldest first.  Raises: BadRequest, StoreDamaged, Denied."""
        name, _, _ = _parsed(name)
        try:
            lines = read_small(self._root / "history" / name).splitlines()[-_HISTORY:]
        except FileNotFoundError:
            return ()
        return tuple(tagged for line in lines if (tagged := _tagged(line)) is not None)

    def tag(self, reference: str, tag: str) -> Built:
        """Let a tag mean what ``reference`` means now.  Raises: NotFound, BadRequest, StorageFull."""
        built = self.find(reference)
        self.put(built, tag)
        return built

    def remove(self, reference: str) -> tuple[Built, ...]:
        """Take a tag away. With the last tag of a name goes everything that was built under it, which is returned.

        Raises: BadRequest.
        """
        name, tag, digest = _parsed(reference)
        if digest:
            raise BadRequest(f"template: {reference} names no tag", hint="NAME:TAG")
        with self._alone():
            self._tag_path(name, tag).unlink(missing_ok=True)
            if self._tag_files(name):
                return ()
            gone = tuple(self._of(name))
            for digest in (*(built.digest for built in gone), *self._broken()):
                self._path(digest).unlink(missing_ok=True)
                if self._keeping is not None:  # who is killed before leaves references that count for nothing
                    self._keeping.let_go(owner_of(digest, self._project))
        return gone

    def _of(self, name: str) -> Iterator[Built]:
        """All that were built under a name; damaged ones are passed over."""
        for digest in self._digests():
            with suppress(NotFound, StoreDamaged):
                built = self._load(digest, digest)
                if built.template.name == name:
                    yield built

    def _broken(self) -> Iterator[str]:
        """Damaged ones that no tag means: nobody can tell whose they were, or use them."""
        meant = set()
        for path in self._tag_files():
            with suppress(FileNotFoundError, StoreDamaged):
                meant.add(_meant(path))
        for digest in self._digests():
            if digest not in meant and not self._is_whole(digest):
                yield digest

    def images(self) -> frozenset[str]:
        """Digests of all images that its own records stand on; damaged ones stand on nothing that could be told."""
        found: set[str] = set()
        for digest in self._digests():
            with suppress(NotFound, StoreDamaged):
                built = self._load(digest, digest)
                found.update((built.base_digest, *built.layers))
        return frozenset(found)

    def _digests(self) -> Iterator[str]:
        """Of all records."""
        for path in sorted(self._root.glob(f"{BUILT}/*.json")):
            digest = f"sha256:{path.stem}"
            if DIGEST.fullmatch(digest):
                yield digest

    def _set(self, name: str, tag: str, digest: str) -> None:
        path = self._tag_path(name, tag)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError, StoreDamaged):  # what was damaged is whole again
            if _meant(path) == digest:
                return
        said = asdict(Tagged(name=name, tag=tag, digest=digest, at=time.time()))
        log = self._root / "history" / name
        log.parent.mkdir(mode=0o700, exist_ok=True)
        _note(log, json.dumps(said).encode())
        write_whole(path, digest.encode())

    def _meaning(self, name: str, tag: str, reference: str) -> str:
        path = self._tag_path(name, tag)
        stamp = _stamp(path)  # before it is read: a tag that is moved meanwhile is read again next time
        try:
            digest = _meant(path)
        except FileNotFoundError:
            raise _nothing(reference) from None
        if stamp is not None:
            with self._reading:
                _remember(self._tags, (name, tag), (stamp, digest))
        return digest

    def _tag_path(self, name: str, tag: str) -> Path:
        return self._root / "tags" / name / tag

    def _load(self, digest: str, reference: str) -> Built:
        """To read and check a record takes longer than to make a sandbox, so the last ones are remembered while their files are the same."""
        path = self._path(digest)
        try:
            stamp = _stamp(path)
            with self._reading:
                known = self._read.get(digest)
                if known is not None and known[0] == stamp is not None:
                    self._read.move_to_end(digest)
                    return known[1]
            value = json.loads(read_small(path))
            built = from_json(value)
        except FileNotFoundError:
            raise _nothing(reference) from None
        except (Denied, Busy):
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, DsecError) as error:
            raise StoreDamaged(f"{path} is no built template: {error}", hint=_HINT) from error
        said = made_of(built)
        if not built.digest == said == digest:
            raise StoreDamaged(f"{path} holds {said}, not {digest}", hint=_HINT)
        if stamp is not None:
            with self._reading:
                _remember(self._read, digest, (stamp, built))
        return built

    def _is_whole(self, digest: str) -> bool:
        try:
            self._load(digest, digest)
        except (NotFound, StoreDamaged):
            return False
        return True

    def _path(self, digest: str) -> Path:
        return self._root / BUILT / f"{digest.removeprefix('sha256:')}.json"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Changing what is there.  Raises: StorageFull, Denied, StoreDamaged."""
        with typed(self._root):
            for directory in (self._root, self._root / BUILT):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = open_lock(self._root / "lock")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)


def owner_of(digest: str, project: str = "") -> str:
    """As whom a built template holds its images; ``project``: that has a record of its own."""
    return f"template-{digest.removeprefix('sha256:')}{'-' if project else ''}{project}"


def check_tag(name: str, tag: str) -> None:
    """Raises: BadRequest: a name or a tag that is none."""
    _parsed(f"{name}:{tag}")


def _remember(among: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Beside the others, and the one that was used longest ago goes when they are too many."""
    among[key] = value
    among.move_to_end(key)
    if len(among) > _REMEMBERED:
        among.popitem(last=False)


def _stamp(path: Path) -> _Stamp | None:
    """Changes when a file does; None: it cannot be looked at."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_ctime_ns, info.st_size


def made_of(built: Built) -> str:
    """The digest that one has by what it says."""
    return digest_of(blueprint_of(built.template), built.base_digest, built.layers, built.lock)


def digest_of(blueprint: str, base: str, layers: Sequence[str], lock: str) -> str:
    """What identifies a built template: all that it says and is made of, each by its digest."""
    whole = json.dumps([blueprint, base, list(layers), lock]).encode()
    return f"sha256:{hashlib.sha256(whole).hexdigest()}"


def _parsed(reference: str) -> tuple[str, str, str]:
    """Name, tag and digest ("" = not given).  Raises: BadRequest."""
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise BadRequest(
            f"template: {shown(reference)} is not the name of a template",
            hint="NAME, NAME:TAG or NAME@sha256:...",
        )
    return found["name"], found["tag"] or LATEST, found["digest"] or ""


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _meant(path: Path) -> str:
    """The digest that a tag means.  Raises: FileNotFoundError, StoreDamaged, Denied."""
    digest = read_small(path, _TAG_BYTES).decode("utf-8", "replace").strip()
    if not DIGEST.fullmatch(digest):
        raise damaged(path, "names no digest")
    return digest


def _note(log: Path, line: bytes) -> None:
    """One more line at the end; the oldest go when there are too many, so that it is never read but whole.

    A line that was cut off before is ended, so that it spoils no other.  Raises: OSError, StoreDamaged.
    """
    try:
        lines = read_small(log).splitlines()
    except FileNotFoundError:
        lines = []
    except StoreDamaged:
        if not log.is_file() or log.stat().st_size <= MOST_BYTES:
            raise
        lines = [b""] * _HISTORY_MOST  # far too long: begun anew
    if len(lines) >= _HISTORY_MOST:
        write_whole(log, b"".join(each + b"\n" for each in [*lines[1 - _HISTORY :], line] if each))
        return
    with log.open("ab+") as file:
        torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        file.write((b"\n" if torn else b"") + line + b"\n")


def _tagged(line: bytes) -> Tagged | None:
    """None: it was cut off, by a full disk or a loss of power."""
    try:
        found = Tagged(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    texts = all(isinstance(each, str) for each in (found.name, found.tag, found.digest))
    return found if texts and isinstance(found.at, int | float) else None


def _nothing(reference: str) -> NotFound:
    return NotFound(
        f"there is no template {shown(reference)}",
        hint="'base' always exists; `dsec template ls` shows those that were built",
        template=reference,
    )
