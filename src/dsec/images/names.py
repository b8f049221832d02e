"""Names of bases: what a person writes, read once into what to do."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from dsec.errors import BadRequest

SYSTEM: Final = "system"
HOST: Final = "host"
HINT: Final = "names are: system, host, debian:SUITE, oci:PATH[:TAG], docker://HOST/REPOSITORY[:TAG], or one of bases.toml"

_PLAIN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:+-]{0,199}")
_SUITE: Final = re.compile(r"[a-z][a-z0-9-]{1,40}")
_PINNED: Final = re.compile(r"(?P<name>.+)@(?P<pin>sha256:[0-9a-f]{64})", re.DOTALL)
# host[:port]/path[:tag]: what the distribution protocol allows, so that nothing of it can be an option of a program.
_REMOTE: Final = re.compile(
    r"(?P<host>(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-f:]+\])(?::[0-9]{1,5})?)/"
    r"(?P<path>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
)
_LONGEST: Final = 1024
_HUB: Final = "docker.io"
_HUBS: Final = (_HUB, "index.docker.io")
_LIBRARY: Final = "library"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseName:
    """``kind``: system, host, debian, oci, docker or alias. ``rest``: without the kind. ``pin``: ``sha256:…`` or ""."""

    kind: str
    rest: str
    pin: str = ""

    @property
    def name(self) -> str:
        """Without the pin."""
        match self.kind:
            case "debian" | "oci":
                return f"{self.kind}:{self.rest}"
            case "docker":
                return f"docker://{self.rest}"
            case _:
                return self.rest

    @property
    def key(self) -> str:
        """Of the files that the store keeps for this name. A pin chooses what a registry gives: there it belongs to it."""
        if _PLAIN.fullmatch(self.name):
            return self.name
        text = f"{self.name}@{self.pin}" if self.kind == "docker" and self.pin else self.name
        return f"_{hashlib.sha256(text.encode()).hexdigest()}"


def parse(text: str) -> BaseName:
    """Raises: BadRequest."""
    name, pin = text, ""
    if match := _PINNED.fullmatch(text):
        name, pin = match["name"], match["pin"]
    elif "@" in text and not text.startswith("oci:"):
        raise _wrong(text, "what follows '@' is no digest (sha256: and 64 of 0-9a-f)")
    if len(name) > _LONGEST or not name.isprintable():
        raise _wrong(text[:100], "too long, or not printable")
    return _kind(name, pin)


def _kind(name: str, pin: str) -> BaseName:
    if name == HOST and pin:
        raise _wrong(name, "what this machine shows changes, and cannot be pinned")
    if name in (SYSTEM, HOST):
        return BaseName(kind=name, rest=name, pin=pin)
    if name.startswith("oci:"):
        path = name.removeprefix("oci:")
        if not path.startswith("/"):
            raise _wrong(name, "the path must be absolute")
        return BaseName(kind="oci", rest=path, pin=pin)
    if name.startswith("docker://"):
        rest = name.removeprefix("docker://")
        if not _REMOTE.fullmatch(rest):
            raise _wrong(name, "write docker://HOST[:PORT]/REPOSITORY[:TAG], the host included")
        return BaseName(kind="docker", rest=_spelt(rest), pin=pin)
    suite = name.removeprefix("debian:")
    if suite != name and _SUITE.fullmatch(suite):
        return BaseName(kind="debian", rest=suite, pin=pin)
    if not _ALIAS.fullmatch(name) or ".." in name:
        raise _wrong(name, "it has characters that no name has")
    return BaseName(kind="alias", rest=name, pin=pin)


def _spelt(rest: str) -> str:
    """One spelling for what is the same to whoever fetches it: Docker Hub has several names, and its own images lie in ``library``."""
    host, _, path = rest.partition("/")
    if _is_part(host):
        path = rest
    elif host not in _HUBS:
        return rest
    if "/" not in path:
        path = f"{_LIBRARY}/{path}"
    return f"{_HUB}/{path}"


def rule_names(name: str) -> tuple[str, ...]:
    """What a rule for ``docker://HOST[/REPOSITORY]`` is about, in the spelling of :func:`scopes_of`; what it says most exactly comes first."""
    whole = name.removeprefix("docker://")
    if _is_part(whole.partition("/")[0]):
        whole = f"{_HUB}/{whole}"
    host, _, path = whole.lower().partition("/")
    plain, port, number = host.partition(":") if "[" not in host else (host, "", "")
    host = _hub(f"{plain.rstrip('.')}{port}{number}")
    if not path:
        return (f"docker://{host}",)
    if host == _HUB and "/" not in path and path != _LIBRARY:
        return f"docker://{host}/{path}", f"docker://{host}/{_LIBRARY}/{path}"
    return (f"docker://{host}/{path}",)


def _is_part(host: str) -> bool:
    """Whether it is taken for the first part of a repository of Docker Hub, and for no host."""
    return not ("." in host or ":" in host or host == "localhost" or host != host.lower())


def _hub(host: str) -> str:
    """Docker Hub under one name, also where its images are taken from."""
    return _HUB if host in (*_HUBS, "registry-1.docker.io") else host


def host_of(rest: str) -> str:
    """Of what follows ``docker://``, without the port."""
    match = _REMOTE.fullmatch(rest)
    assert match is not None
    return re.sub(r":[0-9]{1,5}$", "", match["host"]).strip("[]")


def is_loopback(host: str) -> bool:
    """Whether a host without its port is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def scopes_of(rest: str) -> tuple[str, ...]:
    """What contains what follows ``docker://``, narrowest first: its repository, those above, its host with and without its port.

    Hosts are in lower case and without a final dot: in every spelling it is the same.
    """
    match = _REMOTE.fullmatch(rest)
    assert match is not None
    host, _, port = (
        match["host"].lower().partition(":") if "[" not in rest else (match["host"].lower(), "", "")
    )
    parts = match["path"].split("/")
    plain = _hub(host.rstrip("."))
    if plain == _HUB and len(parts) == 1:
        parts = [_LIBRARY, *parts]
    paths = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    hosts = (f"{plain}:{port}", plain) if port else (plain,)
    return tuple(f"docker://{each}/{path}" for path in paths for each in hosts) + tuple(
        f"docker://{each}" for each in hosts
    )


def untagged(rest: str) -> str:
    """What follows ``docker://``, without its tag."""
    match = _REMOTE.fullmatch(rest)
    assert match is not None
    return f"{match['host']}/{match['path']}"


def _wrong(name: str, why: str) -> BadRequest:
    return BadRequest(f"base: {name!r} is not the name of an image: {why}", hint=HINT, name=name)
