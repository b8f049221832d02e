"""The image store: EROFS files named by the digest of their tree, shared by all engines of a user.

``images/<digest>.erofs`` the image, ``images/<digest>.json`` what is known of it, ``names/<name>`` what a name means,
``building/`` half-made things (of a builder that died; removed by the next one), ``lock`` held while building.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from anyio import to_thread

from dsec.errors import BadRequest, Busy, NotFound, StorageFull, StoreDamaged
from dsec.images.packages import fingerprint, system_packages
from dsec.images.system import RECIPE, Progress, build_tree, make_erofs, require_builder
from dsec.images.tree import file_digest, tree_digest
from dsec.ports.storage import Image, Images

_SYSTEM: Final = "system"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_LOCK_SECONDS: Final = 300.0
_STATUS: Final = Path("/var/lib/dpkg/status")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def _silent(_: str) -> None:
    """No progress wanted."""


class ImageStore(Images):
    """Images below one directory, which it makes (mode 0700) when absent.

    Args:
        root: of the store.
        progress: told, from a worker thread, what a long build is doing.
    """

    def __init__(self, root: Path, *, progress: Progress = _silent) -> None:
        self._root = root
        self._progress = progress
        self._images = root / "images"
        self._names = root / "names"
        self._building = root / "building"

    async def get(self, name: str) -> Image:
        """See :class:`~dsec.ports.storage.Images`."""
        if not _NAME.fullmatch(name):
            raise BadRequest(f"base: {name!r} is not the name of an image", hint="a-z, 0-9, '.', '_', '-'")
        return await to_thread.run_sync(self._get, name)

    async def list(self) -> tuple[Image, ...]:
        """See :class:`~dsec.ports.storage.Images`."""
        return await to_thread.run_sync(self._list)

    async def verify(self, name: str) -> Image:
        """The image after reading all of its file, whatever was checked before.  Raises: NotFound, StoreDamaged."""
        return await to_thread.run_sync(lambda: self._load(name, self._meaning(name), full=True))

    def _get(self, name: str) -> Image:
        self._prepare()
        if name != _SYSTEM:
            return self._load(name, self._meaning(name))
        image = self._current_system()
        if image is not None:
            return image
        with self._lock():
            return self._current_system() or self._build_system()

    def _list(self) -> tuple[Image, ...]:
        self._prepare()
        names = sorted(path.name for path in self._names.iterdir() if _NAME.fullmatch(path.name))
        return tuple(self._image(name, str(self._meaning(name)["digest"])) for name in names)

    def _prepare(self) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self._images, self._names, self._building):
            directory.mkdir(mode=0o700, exist_ok=True)

    def _image(self, name: str, digest: str) -> Image:
        return Image(name=name, digest=digest, path=self._images / f"{digest.removeprefix('sha256:')}.erofs")

    def _meaning(self, name: str) -> Mapping[str, object]:
        """What a name stands for.  Raises: NotFound, StoreDamaged."""
        path = self._names / name
        try:
            meaning = _read_json(path)
        except FileNotFoundError:
            raise NotFound(
                f"no image is named {name!r}", hint=f"the base that is built here is {_SYSTEM!r}"
            ) from None
        if not _DIGEST.fullmatch(str(meaning.get("digest"))):
            raise StoreDamaged(f"{path} names no digest", hint=f"remove {path}; the image is built again")
        return meaning

    def _current_system(self) -> Image | None:
        """The stored base, unless it was never built or its packages have changed since."""
        status = _status_stamp()
        try:
            meaning = self._meaning(_SYSTEM)
        except NotFound:
            return None
        if meaning.get("status") != status and meaning.get("key") != _system_key():
            return None
        return self._load(_SYSTEM, meaning)

    def _load(self, name: str, meaning: Mapping[str, object], *, full: bool = False) -> Image:
        """The image, its file checked: all of it once per boot, afterwards by its inode's data.  Raises: StoreDamaged."""
        image = self._image(name, str(meaning["digest"]))
        facts_path = image.path.with_suffix(".json")
        stamp_path = image.path.with_suffix(".checked")
        try:
            facts = _read_json(facts_path)
            stamp = _stamp(image.path)
            if not full and _read_text(stamp_path) == stamp:
                return image
            found = file_digest(image.path)
        except FileNotFoundError as error:
            raise self._damaged(name, f"{error.filename} is missing") from error
        if found != facts.get("file"):
            raise self._damaged(name, f"{image.path} holds {found}, not {facts.get('file')}")
        _write_whole(stamp_path, stamp.encode())
        return image

    def _damaged(self, name: str, what: str) -> StoreDamaged:
        return StoreDamaged(
            f"image {name!r}: {what}", hint=f"remove {self._names / name}; the image is built again"
        )

    def _build_system(self) -> Image:
        """Build and publish; call with the lock held."""
        tool = require_builder()
        packages = system_packages()
        status, key = _status_stamp(), fingerprint(packages, RECIPE)
        for left in self._building.iterdir():
            shutil.rmtree(left)
        work = self._building / secrets.token_hex(8)
        work.mkdir(mode=0o700)
        try:
            tree, file = work / "tree", work / "image"
            tree.mkdir()
            build_tree(tree, packages, self._progress)
            self._progress("computing the digest")
            digest = tree_digest(tree)
            self._progress("writing the image")
            make_erofs(tool, tree, file, str(uuid.UUID(digest[7:39])))
            image = self._publish(_SYSTEM, digest, file, {"status": status, "key": key})
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(
                    f"no space to build base 'system' in {self._root}", hint="300 MB are needed"
                ) from error
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._progress("done")
        return image

    def _publish(self, name: str, digest: str, file: Path, meaning: Mapping[str, object]) -> Image:
        """File first, then facts, then the name: who sees the name sees a whole image."""
        image = self._image(name, digest)
        file.chmod(0o400)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        content = file_digest(file)
        file.rename(image.path)
        facts = {
            "digest": digest,
            "file": content,
            "size": image.path.stat().st_size,
            "created": int(time.time()),
        }
        _write_whole(image.path.with_suffix(".json"), json.dumps(facts).encode())
        _write_whole(image.path.with_suffix(".checked"), _stamp(image.path).encode())
        _write_whole(self._names / name, json.dumps({"digest": digest, **meaning}).encode())
        return image

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One builder at a time over all processes.  Raises: Busy: another one builds, and does not end."""
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise Busy(f"another process has been building in {self._root} for {_LOCK_SECONDS:.0f} s")
                time.sleep(0.05)
            yield
        finally:
            os.close(descriptor)


def _system_key() -> str:
    return fingerprint(system_packages(), RECIPE)


def _status_stamp() -> str:
    """Changes with every change of the package data base: a cheap way to see that nothing changed."""
    try:
        info = _STATUS.stat()
    except FileNotFoundError:
        return "none"
    return f"{RECIPE} {info.st_ino} {info.st_mtime_ns} {info.st_size}"


def _stamp(path: Path) -> str:
    """What must not have changed since a file was checked. A change time cannot be set, and a boot ends all trust."""
    info = path.stat()
    boot = _BOOT_ID.read_text().strip()
    return f"{boot} {info.st_dev} {info.st_ino} {info.st_mtime_ns} {info.st_ctime_ns} {info.st_size}"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_text(path: Path) -> str:
    """Content, "" when absent."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _read_json(path: Path) -> Mapping[str, object]:
    """Raises: FileNotFoundError, StoreDamaged."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise StoreDamaged(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StoreDamaged(f"{path} is not a JSON object")
    return value


def _write_whole(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one, also after a power loss."""
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
