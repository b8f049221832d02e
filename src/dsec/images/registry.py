"""Images from registries, fetched by skopeo into a layout that :mod:`dsec.images.oci` then reads with suspicion."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
from pathlib import Path
from typing import Final

from dsec.errors import BadRequest, DsecError, NotFound, RuntimeUnavailable, TooLarge
from dsec.images.names import host_of, untagged
from dsec.images.tools import Check, environment, require_tool, run, tail, unstoppable
from dsec.images.unpack import MAX_BYTES

_SECONDS: Final = 900.0
_LOOK_SECONDS: Final = 60.0
_PURPOSE: Final = "images come from registries through skopeo"
_POLICIES: Final = (Path("/etc/containers/policy.json"),)
_MANIFEST_BYTES: Final = 4 * 2**20


def fetch(
    rest: str,
    pin: str,
    work: Path,
    *,
    max_bytes: int = MAX_BYTES,
    seconds: float = _SECONDS,
    check: Check = unstoppable,
) -> tuple[Path, str]:
    """Copy an image into a layout in the empty directory ``work``: its path, and the digest that the registry gave the image.

    Args:
        rest: ``host[:port]/repository[:tag]``.
        pin: digest of the manifest or index that is wanted, or "": the tag decides.
        max_bytes: of what is downloaded, checked while it arrives.
        check: called several times a second; what it raises ends the work.

    Raises:
        Unsupported: no skopeo.
        NotFound: the registry does not have it, or does not show it to us.
        RuntimeUnavailable: the registry cannot be reached.
        TooLarge, Busy.
    """

    def watch() -> None:
        check()
        _bound(layout, max_bytes)

    digest = pin or _digest(rest, work, check)
    source, layout, log = f"{untagged(rest)}@{digest}", work / "layout", work / "log"
    command = _skopeo("copy", rest, "--src-tls-verify")
    status = run(
        [*command, f"docker://{source}", f"oci:{layout}:image"],
        seconds=seconds,
        env=environment(login=True) | {"TMPDIR": str(work)},
        log=log,
        watch=watch,
    )
    _bound(layout, max_bytes)
    if status != 0:
        raise _failed(source, log)
    return layout, digest


def _digest(rest: str, work: Path, check: Check) -> str:
    """What the tag names now: asked first, so that what is copied is what was looked at."""
    out, log = work / "manifest", work / "log"
    command = _skopeo("inspect", rest, "--tls-verify")
    status = run(
        [*command, "--raw", f"docker://{rest}"],
        seconds=_LOOK_SECONDS,
        env=environment(login=True),
        log=log,
        out=out,
        watch=check,
    )
    if status != 0:
        raise _failed(rest, log)
    data = out.read_bytes()
    if len(data) > _MANIFEST_BYTES or not _is_object(data):
        raise BadRequest(
            f"what {host_of(rest)} gives for {rest} is no manifest",
            hint="is it a registry of images?",
            name=rest,
        )
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def _skopeo(verb: str, rest: str, verify: str) -> list[str]:
    """The command so far. A registry on this machine's loopback may do without TLS, as everywhere."""
    policy = () if any(path.exists() for path in _POLICIES) else ("--insecure-policy",)
    insecure = (f"{verify}=false",) if _is_loopback(host_of(rest)) else ()
    return [require_tool("skopeo", "skopeo", _PURPOSE), *policy, verb, *insecure]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound(directory: Path, most: int) -> None:
    """Raises: TooLarge: it holds too much."""
    size = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # renamed while we look
    if size > most:
        raise TooLarge(f"the image is more than {most} bytes", hint="use a smaller image", limit=most)


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
