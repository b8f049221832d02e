"""From requirements to a lock, and from a lock to wheels on disk."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from dsec.errors import StorageFull, StoreDamaged, TooLarge, Unsupported
from dsec.images.dependencies.bounds import Bounds, Index
from dsec.images.dependencies.cache import WheelCache
from dsec.images.dependencies.graph import required_by
from dsec.images.dependencies.lock import Lock, Locked
from dsec.images.dependencies.pip import download
from dsec.images.dependencies.requirements import applies, floating, parse
from dsec.images.dependencies.target import PythonTarget
from dsec.images.dependencies.wheel import Described, broken, describe, opened
from dsec.images.tools import Check, unstoppable


def resolve(
    requirements: Iterable[str],
    target: PythonTarget,
    *,
    cache: WheelCache,
    index: Index | None = None,
    bounds: Bounds | None = None,
    strict: bool = False,
    check: Check = unstoppable,
) -> Lock:
    """Which wheels the requirements mean for the target; they are in the cache afterwards. Runs no code of a package. Blocking.

    The answer was checked against the wheels themselves: it holds what the requirements need on that Python, and nothing else.

    Args:
        requirements: PEP 508, without URLs; those whose markers exclude the target count for nothing.
        cache: where wheels are kept. index: where they come from; by default as pip is configured here.
        bounds: what it may take. strict: refuse requirements that are not pinned exactly.
        check: called again and again; what it raises ends the work.

    Raises:
        BadRequest: a requirement cannot be read or satisfied, or two contradict one another; the message names it.
        Unsupported: a package has no wheel for the target, or a broken one.
        RuntimeUnavailable: an index does not answer. StorageFull. TimedOut, TooLarge: over the bounds.
    """
    bounds = bounds or Bounds()
    given = parse(requirements)
    floating(map(str, given), strict=strict)
    wanted = [each for each in given if applies(each, target.markers)]
    packages: tuple[Locked, ...] = ()
    if wanted:
        with _storage(), cache.run() as work:
            lines = work / "requirements.txt"
            lines.write_text("".join(f"{_without_marker(each)}\n" for each in wanted))
            files = download(
                ["-r", str(lines)],
                target,
                work=work,
                http=cache.http,
                index=index or Index(),
                bounds=bounds,
                check=check,
            )
            packages = _lock_files(files, wanted, target, bounds)
            for locked, path in zip(packages, sorted(files, key=_name), strict=True):
                cache.take(path, locked.sha256)
    return Lock(target=target, requirements=tuple(map(str, given)), packages=packages)


def fetch(
    lock: Lock,
    *,
    cache: WheelCache,
    index: Index | None = None,
    bounds: Bounds | None = None,
    check: Check = unstoppable,
) -> None:
    """Bring the lock's wheels into the cache, each checked against its digest; those that are there are not fetched again. Blocking.

    Raises:
        StoreDamaged: the index has another file by that name. BadRequest, Unsupported: it has none any more.
        RuntimeUnavailable: it does not answer. StorageFull. TimedOut, TooLarge: over the bounds.
    """
    bounds = bounds or Bounds()
    check_lock(lock, bounds)
    with _storage():
        missing = [each for each in lock.packages if not cache.has(each)]
        if not missing:
            return
        with cache.run() as work:
            lines = work / "requirements.txt"
            lines.write_text("".join(f"{e.name}=={e.version} --hash=sha256:{e.sha256}\n" for e in missing))
            files = download(
                ["--no-deps", "--require-hashes", "-r", str(lines)],
                lock.target,
                work=work,
                http=cache.http,
                index=index or Index(),
                bounds=bounds,
                constrained=False,  # the lock has decided
                check=check,
            )
            found = {_sha256(path): path for path in files}
            for each in missing:
                if each.sha256 not in found:
                    raise StoreDamaged(
                        f"no index has {each.file} with the digest of the lock ({each.sha256})",
                        hint="lock the requirements again",
                        package=each.name,
                    )
                cache.take(found[each.sha256], each.sha256)


def check_lock(lock: Lock, bounds: Bounds) -> None:
    """Raises: TooLarge: more wheels or bytes than the bounds."""
    if len(lock.packages) > bounds.wheels or lock.size > bounds.download_bytes:
        raise TooLarge(
            f"{len(lock.packages)} wheels of {lock.size} bytes: {bounds.wheels} and {bounds.download_bytes} are the most",
            hint="require less, or raise the bounds",
        )


@contextmanager
def _storage() -> Iterator[None]:
    """A full disk by its own name.  Raises: StorageFull."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull("no space for wheels", hint="free some, or prune the cache") from exc
        raise


def _without_marker(requirement: Requirement) -> str:
    """Its marker was judged already; and pip's file format would put variables of this machine into one."""
    bare = Requirement(str(requirement))
    bare.marker = None
    return str(bare)


def _name(path: Path) -> str:
    return canonicalize_name(path.name.split("-", 1)[0])


def _lock_files(
    files: list[Path], wanted: list[Requirement], target: PythonTarget, bounds: Bounds
) -> tuple[Locked, ...]:
    """Raises: Unsupported, TooLarge."""
    if len(files) > bounds.wheels:
        raise TooLarge(f"{len(files)} wheels are needed, {bounds.wheels} are the most", hint="require less")
    described: dict[str, tuple[Described, Path]] = {}
    for path in files:
        package = _describe(path, target, bounds)
        described[package.name] = package, path
    reasons = required_by(wanted, {name: each for name, (each, _) in described.items()}, target.markers)
    return tuple(
        Locked(
            name=name,
            version=package.version,
            file=path.name,
            sha256=_sha256(path),
            size=path.stat().st_size,
            required_by=reasons[name],
        )
        for name, (package, path) in sorted(described.items())
    )


def _describe(path: Path, target: PythonTarget, bounds: Bounds) -> Described:
    """Raises: Unsupported: not a wheel, not of its name, or not for the target."""
    if path.suffix != ".whl":
        raise Unsupported(
            f"{path.name} is no wheel, and nothing is built here, since that runs the package's code",
            hint="require a version with a wheel",
        )
    name, version, _, tags = parse_wheel_filename(path.name)
    if not tags & target.tags():
        raise broken(path.name, f"is not for {target.abi} on {target.platforms[0]}")
    with path.open("rb") as file, opened(file, path.name, bounds) as archive:
        package = describe(archive)
    if (package.name, package.version) != (name, str(version)):
        raise broken(path.name, f"says that it is {package.name} {package.version}")
    return package


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
