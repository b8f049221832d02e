"""The image store on disk, without building: which image a name means, whether its file is still what was stored.

``images/<digest>.erofs`` the image, ``.json`` what is known of it, ``.checked`` when it was last read in full, ``.used`` (its
time: when it was last asked for); ``names/<key>`` what a name means; ``made/<key>`` what was made from the things of that key, which keeps
nothing from being collected; ``held/<digest>.<owner>`` a reference (see :mod:`dsec.images.holds`). Whatever else is found in their places is an error of this project, with a hint.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dsec.errors import BadRequest, Denied, NotFound, StoreDamaged
from dsec.images.builds import locked
from dsec.images.disk import damaged, of_disk, read_small, typed
from dsec.images.holds import HOME_BYTES, reference_of, references
from dsec.images.names import HOST
from dsec.images.tree import file_digest
from dsec.ports.storage import SHOWABLE, Image, ImageConfig

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_OWNER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,159}")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_DIRECTORIES: Final = ("images", "names", "made", "building", "locks", "held")
_MADE: Final = re.compile(
    r"[a-z]+-[0-9a-f]{64}"
)  # keys of what is made from things; no key of a name is like that
_WAIT_SECONDS: Final = 60.0

Meaning = Mapping[str, Any]
"""What a name stands for: its ``digest``, and what :mod:`dsec.images.store` needs to know whether that is still current."""


class Shelf:
    """Below one directory.

    Args:
        root: of the store.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the directories (mode 0700) when absent.  Raises: Denied, StorageFull, StoreDamaged."""
        with typed(self.root):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in _DIRECTORIES:
                (self.root / name).mkdir(mode=0o700, exist_ok=True)
            for entry in os.scandir(self.root / "names"):  # where earlier releases had them
                if _MADE.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # another was faster
                        os.rename(entry.path, self._meaning(entry.name))

    def meaning(self, key: str) -> Meaning | None:
        """What a name stands for, or what was made from the things of a key; None when it never was.  Raises: StoreDamaged."""
        path = self._meaning(key)
        try:
            return _checked(path, read_json(path))
        except FileNotFoundError:
            return None

    def names(self) -> Iterator[tuple[str, Meaning]]:
        """Every name with what it stands for, sorted.  Raises: StoreDamaged."""
        found = []
        with typed(self.root):
            paths = sorted((self.root / "names").iterdir())
        for path in paths:
            meaning = None if path.name.startswith(".") else self.meaning(path.name)
            if meaning is not None:
                found.append((str(meaning.get("name", path.name)), meaning))
        return iter(sorted(found, key=lambda pair: pair[0]))

    def load(self, key: str, name: str, meaning: Meaning, *, full: bool = False) -> Image:
        """The image, its file checked: all of it once per boot, afterwards by its inode's data.  Raises: StoreDamaged."""
        image = self.image(name, meaning)
        stamp_path = image.path.with_suffix(".checked")
        try:
            facts = read_json(image.path.with_suffix(".json"))
            stamp = _stamp(image.path)
            if full or _read_text(stamp_path) != stamp:
                self._check(key, name, image.path, facts)
                with _writable(self.root):
                    write_whole(stamp_path, stamp.encode())
        except FileNotFoundError as error:
            raise self._damaged(key, name, f"{error.filename} is missing") from error
        if not full:  # who only checks does not use it
            with _writable(self.root):
                image.path.with_suffix(".used").touch(mode=0o600)
        return image

    def image(self, name: str, meaning: Meaning) -> Image:
        """Without a look at its file."""
        digest = str(meaning["digest"])
        config = meaning.get("config")
        shows = _shown(name, meaning.get("shows"))
        return Image(
            name=HOST if shows else name,  # whatever else is said of it: nothing else shows this machine
            digest=digest,
            path=self.root / "images" / f"{digest.removeprefix('sha256:')}.erofs",
            sources=_texts(meaning.get("sources")),
            shows=shows,
            config=_config(config) if isinstance(config, dict) else None,
        )

    def by_digest(self, name: str, digest: str, *, full: bool = False) -> Image | None:
        """The image of that tree, whether or not a name stands for it; None when it is not stored.  Raises: StoreDamaged."""
        path = self.root / "images" / f"{digest.removeprefix('sha256:')}.json"
        try:
            facts = _checked(path, read_json(path))
        except FileNotFoundError:
            return None
        if facts["digest"] != digest:
            raise damaged(path, f"is of {facts['digest']}")
        return self.load("", name, facts, full=full)

    def publish(
        self, key: str, name: str, file: Path, meaning: Meaning, ready: Meaning | None = None
    ) -> Image:
        """Take ``file`` in. File first, then facts, then the name ("" = none): who sees the name sees a whole image.

        Args:
            ready: what :func:`make_ready` said of it, before whoever calls this had the lock of the store; None = it is asked now.

        Raises: Denied, StorageFull, StoreDamaged.
        """
        with typed(self.root):
            return self._publish(key, name, file, meaning, make_ready(file) if ready is None else ready)

    def _publish(self, key: str, name: str, file: Path, meaning: Meaning, ready: Meaning) -> Image:
        image = self.image(name, meaning)
        config = {"config": asdict(image.config)} if image.config else {}
        shows = {"shows": image.shows} if image.shows else {}
        known = {"digest": image.digest, "sources": image.sources, **config, **shows}
        image.path.with_suffix(".used").touch(mode=0o600)
        if not self._is_whole(image.path):
            file.rename(image.path)
            facts = {**known, **ready, "created": int(time.time())}
            write_whole(image.path.with_suffix(".json"), json.dumps(facts).encode())
            write_whole(image.path.with_suffix(".checked"), _stamp(image.path).encode())
        if key:
            write_whole(self._meaning(key), json.dumps({"name": name, **meaning, **known}).encode())
        return image

    def _meaning(self, key: str) -> Path:
        """The file."""
        return self.root / ("made" if _MADE.fullmatch(key) else "names") / key

    def _is_whole(self, path: Path) -> bool:
        """Whether an image is stored there already, undamaged."""
        try:
            return file_digest(path) == read_json(path.with_suffix(".json")).get("file")
        except (FileNotFoundError, StoreDamaged):
            return False

    def hold(self, digest: str, owner: str, home: Path | None = None) -> None:
        """Note that ``owner`` needs an image, until :meth:`release` or, when a home is given, until that directory is gone.

        Raises: NotFound, BadRequest, Denied, StorageFull, StoreDamaged, Busy.
        """
        path = self._reference(digest, owner)
        with typed(self.root):
            content = reference_of(home)
        try:
            # Who collects looks first and removes then: between the two no reference may come to be.
            with locked(self.root / "lock", seconds=_WAIT_SECONDS, shared=True), typed(self.root):
                if _read_bytes(path) != content:
                    write_whole(path, content)
                else:
                    os.utime(path)  # it is young again
                self._require(digest, path)
        except Denied as error:
            if error.facts.get("errno") != errno.EROFS or _read_bytes(path) != content:
                raise
            self._require(digest)  # mounted read-only: nobody collects there

    def _require(self, digest: str, reference: Path | None = None) -> None:
        """Raises: NotFound: it is not stored. A reference to it goes."""
        if (self.root / "images" / f"{digest.removeprefix('sha256:')}.erofs").exists():
            return
        if reference is not None:
            reference.unlink(missing_ok=True)
        raise NotFound(f"no image {digest} is stored", hint="get it by name first", digest=digest)

    def release(self, digest: str, owner: str) -> None:
        """Absent is not an error.  Raises: BadRequest, Denied, StoreDamaged."""
        path = self._reference(digest, owner)
        with typed(self.root):
            path.unlink(missing_ok=True)

    def let_go(self, owner: str) -> None:
        """:meth:`release` of all that it holds.  Raises: BadRequest, Denied, StoreDamaged."""
        with typed(self.root):
            for path in references(self.root):
                digest, _, who = path.name.partition(".")
                if who == owner:
                    self.release(f"sha256:{digest}", owner)

    def _reference(self, digest: str, owner: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise BadRequest(
                f"digest: {digest!r:.100} is none", hint="sha256: and 64 of 0-9a-f", digest=digest[:100]
            )
        if not _OWNER.fullmatch(owner):
            raise BadRequest(
                f"owner: {owner!r:.200} is no name", hint="letters, digits, '.', '_', '-'; 160 at most"
            )
        return self.root / "held" / f"{digest.removeprefix('sha256:')}.{owner}"

    def _check(self, key: str, name: str, path: Path, facts: Meaning) -> None:
        with typed(self.root):
            found = file_digest(path)
        if found != facts.get("file"):
            raise self._damaged(key, name, f"{path} holds {found}, not {facts.get('file')}")

    def _damaged(self, key: str, name: str, what: str) -> StoreDamaged:
        hint = (
            f"remove {self._meaning(key)}; the image is built again" if key else "build what names it again"
        )
        return StoreDamaged(f"image {name!r}: {what}", hint=hint, name=name)


def make_ready(file: Path) -> Meaning:
    """Write the file of an image out, and read it: what is known of it from then on. As long as it is large.  Raises: OSError."""
    file.chmod(0o400)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    return {"file": file_digest(file), "size": file.stat().st_size}


def read_json(path: Path) -> Meaning:
    """Raises: FileNotFoundError, Denied, StoreDamaged."""
    try:
        value = json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise damaged(path, "is not a JSON object")
    return value


def _checked(path: Path, meaning: Meaning) -> Meaning:
    """Raises: StoreDamaged: it has no digest."""
    if not DIGEST.fullmatch(str(meaning.get("digest"))):
        raise damaged(path, "names no digest")
    return meaning


@contextmanager
def _writable(root: Path) -> Iterator[None]:
    """Notes of one who reads: a store that is mounted read-only is read all the same, and nobody collects there."""
    try:
        with typed(root):
            yield
    except Denied as error:
        if error.facts.get("errno") != errno.EROFS:
            raise


def write_whole(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one, also after a power loss.  Raises: OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _config(value: Mapping[str, Any]) -> ImageConfig:
    return ImageConfig(
        env=_texts(value.get("env")),
        working_dir=str(value.get("working_dir", "")),
        user=str(value.get("user", "")),
        entrypoint=_texts(value.get("entrypoint")),
        cmd=_texts(value.get("cmd")),
    )


def _shown(name: str, value: object) -> tuple[str, ...]:
    """Raises: StoreDamaged: something that no base may show."""
    paths = _texts(value)
    if not set(paths) <= set(SHOWABLE):
        raise StoreDamaged(
            f"image {name!r} would show {', '.join(paths):.200} of this machine",
            hint="remove it from the store; it is built again",
        )
    return paths


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _stamp(path: Path) -> str:
    """What must not have changed since a file was checked. A change time cannot be set, and a boot ends all trust.

    Raises: FileNotFoundError, StoreDamaged, Denied.
    """
    try:
        info = path.lstat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise of_disk(error, path) from error
    if not stat.S_ISREG(info.st_mode):
        raise damaged(path, "is no file")
    boot = _BOOT_ID.read_text().strip()
    return f"{boot} {info.st_dev} {info.st_ino} {info.st_mtime_ns} {info.st_ctime_ns} {info.st_size}"


def _read_text(path: Path) -> str:
    """Content, "" when absent or damaged."""
    return (_read_bytes(path) or b"").decode("utf-8", "replace")


def _read_bytes(path: Path) -> bytes | None:
    """Content of a few bytes, None when absent or damaged."""
    try:
        return read_small(path, HOME_BYTES)
    except (FileNotFoundError, StoreDamaged):
        return None
