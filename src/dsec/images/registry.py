"""Images from registries, fetched by skopeo into a layout that :mod:`dsec.images.oci` then reads with suspicion."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest, DsecError, NotFound, RuntimeUnavailable, TooLarge
from dsec.images.blobs import BlobCache
from dsec.images.names import host_of, is_loopback, untagged
from dsec.images.oci import child_for_here, descriptors, read_object
from dsec.images.shelf import DIGEST
from dsec.images.signatures import Rule, require_signed
from dsec.images.tools import Check, environment, require_tool, run, tail, unstoppable
from dsec.images.unpack import MAX_BYTES
from dsec.model.images import Progress, Step, silent

_SECONDS: Final = 900.0
_LOOK_SECONDS: Final = 60.0
_PURPOSE: Final = "images come from registries through skopeo"
_POLICIES: Final = (Path("/etc/containers/policy.json"),)
_MANIFEST_BYTES: Final = 4 * 2**20
_NESTED: Final = 3


@dataclass(frozen=True, slots=True)
class Fetched:
    """An image that arrived: its ``layout``, the ``digest`` that the registry gave it, and the ``blobs`` that the cache still keeps."""

    layout: Path
    digest: str
    blobs: tuple[str, ...]


def fetch(
    rest: str,
    pin: str,
    work: Path,
    *,
    cache: BlobCache | None = None,
    rule: Rule | None = None,
    max_bytes: int = MAX_BYTES,
    seconds: float = _SECONDS,
    check: Check = unstoppable,
    progress: Progress = silent,
) -> Fetched:
    """Copy an image into a layout in the empty directory ``work``. Blobs that arrived whole before are not fetched again.

    Args:
        rest: ``host[:port]/repository[:tag]``.
        pin: digest of the manifest or index that is wanted, or "": the tag decides.
        cache: of blobs, None = one in ``work``. It is on the file system of ``work``.
        rule: who must have signed it; looked at before anything but its manifest is fetched. None: nobody.
        max_bytes: of what is downloaded, checked while it arrives.
        check: called several times a second; what it raises ends the work.

    Raises:
        Unsupported: no skopeo, or no cosign where there is a rule.
        Denied: it is not signed as the rule says.
        NotFound: the registry does not have it, or does not show it to us.
        RuntimeUnavailable: the registry cannot be reached.
        TooLarge, Busy.
    """
    remote = _Remote(rest, work, check)
    digest = pin or remote.digest()
    if rule is not None:
        require_signed(rest, digest, rule, work, check=check)
    sizes = remote.blobs(digest)
    total = sum(sizes.values())
    if total > max_bytes:
        raise _too_large(max_bytes)
    blobs, layout = cache or BlobCache(work / "cache"), work / "layout"

    def watch() -> None:
        check()
        size = _bound(layout, max_bytes, blobs.size(sizes))
        progress(Step(f"fetching docker://{rest}", min(size, total), total, "bytes"))

    with blobs.fetching():
        blobs.settle(sizes, check)
        remote.copy(digest, layout, blobs.root, seconds, watch)
        watch()
        kept = _collected(layout, blobs)
    return Fetched(layout, digest, tuple(dict.fromkeys((*sizes, *kept))))


class _Remote:
    """One image of a registry, asked through skopeo."""

    def __init__(self, rest: str, work: Path, check: Check) -> None:
        self._rest, self._work, self._check = rest, work, check
        self._log = work / "log"

    def digest(self) -> str:
        """What the tag names now: asked first, so that what is copied is what was looked at."""
        return f"sha256:{hashlib.sha256(self._raw(self._rest)).hexdigest()}"

    def blobs(self, digest: str) -> Mapping[str, int]:
        """Digest and size of the config and layers for this machine; empty when only skopeo finds them."""
        for _ in range(_NESTED):
            manifest = json.loads(self._raw(f"{untagged(self._rest)}@{digest}", digest))
            if "manifests" not in manifest:
                return descriptors(manifest) if "config" in manifest else {}
            child = child_for_here(manifest)
            if child is None:
                return {}
            digest = child
        return {}

    def copy(self, digest: str, layout: Path, shared: Path, seconds: float, watch: Check) -> None:
        """Into ``layout``, whose blobs lie in the directory ``shared``."""
        source = f"{untagged(self._rest)}@{digest}"
        options = ["--dest-oci-accept-uncompressed-layers", f"--dest-shared-blob-dir={shared}"]
        command = [*_skopeo("copy", self._rest, "--src-tls-verify"), *options]
        status = run(
            [*command, f"docker://{source}", f"oci:{layout}:image"],
            seconds=seconds,
            env=environment(login=True) | {"TMPDIR": str(self._work)},
            log=self._log,
            watch=watch,
        )
        if status != 0:
            raise _failed(source, self._log)

    def _raw(self, name: str, digest: str = "") -> bytes:
        """A manifest or index, a JSON object; of that digest, when one is given."""
        out = self._work / "manifest"
        out.unlink(missing_ok=True)
        command = _skopeo("inspect", self._rest, "--tls-verify")
        status = run(
            [*command, "--raw", f"docker://{name}"],
            seconds=_LOOK_SECONDS,
            env=environment(login=True),
            log=self._log,
            out=out,
            watch=self._check,
        )
        if status != 0:
            raise _failed(name, self._log)
        with out.open("rb") as file:
            data = file.read(_MANIFEST_BYTES + 1)
        wrong = digest and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest
        if wrong or len(data) > _MANIFEST_BYTES or not _is_object(data):
            raise BadRequest(
                f"what {host_of(self._rest)} gives for {name} is no manifest, or not that one",
                hint="is it a registry of images?",
                name=name,
            )
        return data


def _collected(layout: Path, blobs: BlobCache) -> tuple[str, ...]:
    """Make the layout whole: every blob of its image beside its index. The digests of them all. Whoever reads it checks them."""
    index = read_object(layout / "index.json")
    (layout / "blobs/sha256").mkdir(parents=True, exist_ok=True)
    pending = [str(each.get("digest")) for each in index.get("manifests", ()) if isinstance(each, dict)]
    found: list[str] = []
    while pending:
        digest = pending.pop()
        target = layout / "blobs/sha256" / digest.removeprefix("sha256:")
        if digest in found or not DIGEST.fullmatch(digest) or not blobs.link(digest, target):
            continue
        found.append(digest)
        if len(found) == 1:
            pending.extend(descriptors(read_object(target)))
    return tuple(found)


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def _skopeo(verb: str, rest: str, verify: str) -> list[str]:
    """The command so far. A registry on this machine's loopback may do without TLS, as everywhere."""
    policy = () if any(path.exists() for path in _POLICIES) else ("--insecure-policy",)
    insecure = (f"{verify}=false",) if is_loopback(host_of(rest)) else ()
    return [require_tool("skopeo", "skopeo", _PURPOSE), *policy, verb, *insecure]


def _bound(directory: Path, most: int, size: int) -> int:
    """Bytes in it, and those besides.  Raises: TooLarge: they are too many."""
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # renamed while we look
    if size > most:
        raise _too_large(most)
    return size


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the image is more than {most} bytes", hint="use a smaller image", limit=most)


def _failed(source: str, log: Path) -> DsecError:
    words = tail(log)
    missing = any(
        mark in words for mark in ("manifest unknown", "name unknown", "unauthorized", "denied", "not found")
    )
    if missing:
        return NotFound(
            f"no image docker://{source}: {words}",
            hint="check the name; log in with: skopeo login HOST",
            name=source,
        )
    return RuntimeUnavailable(
        f"docker://{source} cannot be fetched: {words}", hint="is the registry reachable?", name=source
    )
