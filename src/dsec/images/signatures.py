"""Signatures of images in registries, checked by cosign before anything of the image is fetched."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.errors import Denied, DsecError, Unsupported
from dsec.images.disk import read_small
from dsec.images.names import host_of, is_loopback, untagged
from dsec.images.tools import Check, environment, find_tool, run, tail, unstoppable

_SECONDS: Final = 120.0
_OUTPUT_BYTES: Final = 16 * 2**20
_KEY_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Who must have signed: the owner of a key, or an ``identity`` that an ``issuer`` vouches for."""

    key: str = ""
    identity: str = ""
    issuer: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """As cosign takes them."""
        if self.key:
            return (f"--key={self.key}",)
        return (f"--certificate-identity={self.identity}", f"--certificate-oidc-issuer={self.issuer}")

    @property
    def words(self) -> str:
        """What is remembered of an image that is signed so: with the digest of the key that the file holds now, another one asks anew.

        A key that is kept elsewhere (``kms://...``) is known by its name; a file that cannot be read is nobody's key.
        """
        if not self.key or "://" in self.key:
            return " ".join(self.options)
        try:
            found = hashlib.sha256(read_small(Path("/", self.key).resolve(), _KEY_BYTES)).hexdigest()
        except (OSError, DsecError):
            found = "cannot be read"
        return f"{self.options[0]} {found}"


def require_signed(rest: str, digest: str, rule: Rule, work: Path, *, check: Check = unstoppable) -> None:
    """That manifest or index, and no other, is signed as the rule says. Blocking.

    Args:
        rest: ``host[:port]/repository[:tag]``. digest: of what will be fetched, ``sha256:…``.
        work: a directory for what is needed meanwhile.

    Raises:
        Unsupported: no cosign. Denied: it is not. Busy.
    """
    name, found = f"{untagged(rest)}@{digest}", find_tool("cosign")
    if found is None:
        raise Unsupported(
            f"docker://{name} must be signed, and cosign, which checks that, is not installed",
            hint="install cosign, or take the rule for it out of [verify] in bases.toml",
            missing=["cosign"],
        )
    out, log = work / "signatures", work / "cosign.log"
    insecure = ("--allow-insecure-registry",) if is_loopback(host_of(rest)) else ()
    command = [found, "verify", "--output=json", *insecure, *rule.options, name]
    status = run(command, seconds=_SECONDS, env=environment(login=True), log=log, out=out, watch=check)
    if status != 0:
        raise _unsigned(name, tail(log))
    if not _names(out, digest):
        raise _unsigned(name, "cosign did not say that it is about this digest")


def _names(out: Path, digest: str) -> bool:
    """Whether a payload that was verified is about that digest."""
    with out.open("rb") as file:
        data = file.read(_OUTPUT_BYTES + 1)
    try:
        payloads = json.loads(data) if len(data) <= _OUTPUT_BYTES else []
        return any(each["critical"]["image"]["docker-manifest-digest"] == digest for each in payloads)
    except (ValueError, RecursionError, TypeError, KeyError):
        return False


def _unsigned(name: str, why: str) -> Denied:
    return Denied(
        f"docker://{name} is not signed as [verify] in bases.toml asks: {why}",
        hint="have it signed, or correct the rule",
        name=name,
    )
