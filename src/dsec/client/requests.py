"""From what people write to what an engine takes: checked here, at the edge."""

from __future__ import annotations

import asyncio
import itertools
import signal as signals
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

from dsec.errors import BadRequest, DsecError, NotFound, TooLarge, Unsupported
from dsec.model.built import Built
from dsec.model.checks import (
    check_count,
    check_mapping,
    check_text,
    check_user,
    encoded,
    local_path,
    shown,
)
from dsec.model.execs import ExecRequest, PtySize
from dsec.model.sandbox import MIB, RESERVED, WORKSPACE, Hibernate, Level, Limits, SandboxSpec, State, Volume
from dsec.model.snapshots import SnapshotKind
from dsec.model.volumes import DEFAULT_PROJECT
from dsec.ports.engine import ExecSession

T = TypeVar("T")

Argv = str | Sequence[str | bytes | Path]
"""One string for a shell, or a program and its arguments."""

GIB: Final = 2**30
_KEPT: Final = (
    "level",
    "base",
    "base_digest",
    "template",
    "layers",
    "workdir",
    "user",
    "limits",
    "env",
    "hibernate",
)
PIECE: Final = 1 << 20
BASE: Final = "base"
SIGKILL: Final = int(signals.SIGKILL)
NEVER_HAD: Final = "its creator was interrupted"
_LISTS: Final = (list, tuple)
_END: Final = object()  # None may be a piece, by mistake: it must not pass for the end
_NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})


class Readable(Protocol):
    """An open binary file."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes, b"" at the end."""


Content = bytes | Readable | AsyncIterator[bytes] | Iterable[bytes]
"""Bytes, an open binary file, or an iterator of bytes; files and iterators are read on a thread, piece by piece."""
VolumeList = Iterable[Volume | str]
"""Volumes, each also as ``SOURCE:TARGET`` or ``SOURCE:TARGET:ro``; a source that begins with / or . is a path of the host, another a volume's name."""


def argv_of(command: Argv) -> tuple[bytes, ...]:
    """Arguments as bytes; a string is run by /bin/sh.  Raises: BadRequest."""
    if isinstance(command, str):
        if not command:
            raise BadRequest(
                "command: it is empty", hint="give a shell command, or a list of program and arguments"
            )
        return b"/bin/sh", b"-c", encoded("command", command)
    words: object = command
    if type(words) not in _LISTS and (
        isinstance(words, bytes | bytearray) or not isinstance(words, Sequence)
    ):
        raise BadRequest(
            f"command: {shown(words)} is neither a str nor a list of str",
            hint="a shell command as one str, or a list of program and arguments",
        )
    try:
        return tuple(
            [
                value.encode("utf-8", "surrogateescape") if type(value) is str else _argument(place, value)
                for place, value in enumerate(command)
            ]
        )
    except UnicodeEncodeError:
        return tuple([_argument(place, value) for place, value in enumerate(command)])


def _argument(place: int, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return encoded(f"command[{place}]", value)
    if isinstance(value, Path):
        return encoded(f"command[{place}]", str(value))
    raise BadRequest(
        f"command[{place}]: {shown(value)} is neither str nor bytes", hint="convert numbers with str()"
    )


def exec_request(
    command: Argv,
    *,
    env: Mapping[str, str] | None,
    cwd: str,
    user: str,
    timeout: float | None,
    stdin: bytes | None = None,
    stdin_open: bool = False,
    pty: PtySize | None = None,
    scratch: bool = False,
) -> ExecRequest:
    """Raises: BadRequest, TooLarge: the message names the argument."""
    check_mapping("env", env)
    check_user(user)
    return ExecRequest(
        argv=argv_of(command),
        env=MappingProxyType(dict(env)) if env else _NO_VARIABLES,
        cwd=cwd,
        user=user,
        timeout=0.0 if timeout is None else timeout,
        stdin=stdin,
        stdin_open=stdin_open,
        pty=pty,
        scratch=scratch,
    )


def fed_at_start(stdin: object) -> tuple[bytes | None, bool]:
    """All of standard input, and whether more comes later.  Raises: BadRequest."""
    if stdin is None or isinstance(stdin, bool):
        return None, stdin is True
    if isinstance(stdin, bytes | bytearray | memoryview):
        return bytes(stdin), False
    raise BadRequest(
        f"stdin: {type(stdin).__name__} is neither bytes nor True",
        hint="stdin=True, then send_stdin() and close_stdin()",
    )


def pty_size(rows: int, cols: int) -> PtySize:
    """Raises: BadRequest."""
    check_count("rows", rows, 1, 65535)
    check_count("cols", cols, 1, 65535)
    return PtySize(rows=rows, cols=cols)


def spec_of(
    meant: SandboxSpec | Built | None,
    *,
    level: Level | str | None,
    limits: Limits | None,
    ttl: float,
    idle: float,
    read_only: bool,
    env: Mapping[str, str] | None,
    volumes: VolumeList,
    labels: Mapping[str, str] | None,
    project: str = DEFAULT_PROJECT,
    hibernate: Hibernate | str | None = None,
) -> SandboxSpec:
    """What is asked for, over what it begins with: a template, the specification of a snapshot, or nothing.

    Raises: BadRequest.
    """
    begun = _begun(meant)
    check_mapping("env", env)
    check_mapping("labels", labels)
    if isinstance(volumes, str | Volume) or not isinstance(volumes, Iterable):
        raise BadRequest(f"volumes: {shown(volumes)} is not a list", hint="volumes=[Volume(...)]")
    for name, value in (labels or {}).items():
        check_text("labels", name)
        check_text(f"labels: {shown(name)}", value)
    reserved = next((name for name in labels or () if name.startswith(RESERVED)), None)
    if reserved is not None:
        raise BadRequest(f"labels: {shown(reserved)} begins with {RESERVED!r}, which is DSec's own")
    given = [volume_of(volume) for volume in volumes]
    named = {volume.target for volume in given}
    lent = [volume for volume in begun.volumes if volume.target not in named]
    if len(lent) + len(given) > 1:
        check_apart([*lent, *given])
    return replace(
        begun,
        level=begun.level if level is None else _level(level),
        limits=begun.limits if limits is None else limits,
        ttl=ttl,
        idle=idle,
        read_only=read_only,
        env=MappingProxyType({**begun.env, **(env or {})}),
        volumes=(*lent, *given),
        labels=MappingProxyType(dict(labels or {})),
        project=project,
        lent=tuple([volume.target for volume in lent]),
        hibernate=begun.hibernate if hibernate is None else _hibernate(hibernate),
    )


def _begun(meant: SandboxSpec | Built | None) -> SandboxSpec:
    """What a sandbox is before anything is asked for. Of a snapshot's sandbox: its files, and what commands need to find them."""
    if meant is None:
        return SandboxSpec()
    if isinstance(meant, SandboxSpec):
        return replace(SandboxSpec(), **{name: getattr(meant, name) for name in _KEPT})
    template = meant.template
    zone = {} if template.strategy.timezone == "UTC" else {"TZ": template.strategy.timezone}
    return SandboxSpec(
        level=template.runtime.level,
        base=meant.base,
        base_digest=meant.base_digest,
        template=meant.reference,
        layers=meant.layers,
        workdir="" if template.runtime.workdir == WORKSPACE else template.runtime.workdir,
        user="" if template.runtime.user == "user" else template.runtime.user,
        limits=template.resources.limits,
        env=MappingProxyType({**zone, **template.runtime.env}),
        volumes=template.volumes,
        hibernate=template.isolation.hibernate,
    )


def not_cold() -> DsecError:
    """A cold one has no files yet, and so nothing could keep those of a snapshot for it."""
    return Unsupported(
        "cold: a sandbox of a snapshot is made at once", hint="promote the snapshot, and name that template"
    )


def _hibernate(hibernate: Hibernate | str) -> Hibernate:
    """Raises: BadRequest."""
    try:
        return Hibernate(hibernate)
    except ValueError:
        raise BadRequest(
            f"hibernate: there is no way {shown(hibernate)}", hint=f"choose one of {', '.join(Hibernate)}"
        ) from None


def _level(level: Level | str) -> Level:
    """Raises: BadRequest."""
    try:
        return Level(level)
    except ValueError:
        have = ", ".join(Level)
        raise BadRequest(f"level: there is no level {shown(level)}", hint=f"choose one of {have}") from None


async def document_of(document: str | Path | bytes) -> tuple[bytes, str]:
    """A template's text, and its name in errors.

    Raises:
        BadRequest, TooLarge: neither a path nor bytes; larger than 1 MiB. NotFound: there is no such file.
    """
    if isinstance(document, bytes):
        return document, "template"
    path = local_path("document", document)
    try:
        text = await asyncio.to_thread(_read_bounded, path)
    except FileNotFoundError:
        raise NotFound(
            f"document: there is no file {shown(str(path))}", hint="the path of a YAML file"
        ) from None
    except OSError as error:
        raise BadRequest(
            f"document: {shown(str(path))} cannot be read: {error.strerror}", hint="the path of a YAML file"
        ) from error
    return text, str(path)


def _read_bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        text = file.read(MIB + 1)
    if len(text) > MIB:
        raise TooLarge(f"document: {path} is larger than 1 MiB", hint="a template is a short text")
    return text


def check_apart(volumes: Sequence[Volume]) -> None:
    """A place below another would have to be made in the other's directory of this machine, and which of them shows would
    depend on their order.

    Raises: BadRequest.
    """
    targets = sorted(f"{volume.target}/" for volume in volumes)  # what lies below a target follows it at once
    for one, other in itertools.pairwise(targets):
        if other.startswith(one):
            raise BadRequest(
                f"volumes: {shown(one[:-1])} and {shown(other[:-1])} lie in one another",
                hint="give each a place of its own, or show one directory that holds both",
                targets=[one[:-1], other[:-1]],
            )


def kind_of(kind: SnapshotKind | str) -> SnapshotKind:
    """Raises: BadRequest. Unsupported: processes and their memory cannot be kept."""
    if kind == "memory":
        raise Unsupported(
            "kind: the memory of a sandbox cannot be kept: its processes are not part of it",
            hint="kind='files'",
        )
    try:
        return SnapshotKind(kind)
    except ValueError:
        have = ", ".join(SnapshotKind)
        raise BadRequest(
            f"kind: there is no kind {shown(kind)} of snapshots here", hint=f"choose one of {have}"
        ) from None


async def each(values: Iterable[T], work: Callable[[T], Awaitable[object]]) -> None:
    """Do it with each, one after the other."""
    for value in values:
        await work(value)


def volume_of(volume: Volume | str) -> Volume:
    """A volume, or ``SOURCE:TARGET[:ro]``, whose source is a path of the host when it begins with / or ., else a name.  Raises: BadRequest."""
    if isinstance(volume, Volume):
        return volume
    check_text("volumes", volume)
    parts = volume.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")) or not all(parts):
        raise BadRequest(f"volumes: {shown(volume)} is not SOURCE:TARGET or SOURCE:TARGET:ro")
    source = Path(parts[0]).absolute() if parts[0].startswith(("/", ".")) else parts[0]
    return Volume(source, parts[1], read_only=len(parts) == 3 and parts[2] == "ro")


async def killed(session: ExecSession) -> None:
    """Undo the start of a command."""
    await session.signal(SIGKILL, tree=True)


async def closed(stream: AsyncIterator[object]) -> None:
    """Undo the opening of a stream."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


def states_of(states: object) -> tuple[State, ...]:
    """States, each also by its name.  Raises: BadRequest."""
    if isinstance(states, str) or not isinstance(states, Iterable):
        raise BadRequest(f"states: {shown(states)} is not a list of states", hint="states=[State.RUNNING]")
    try:
        return tuple([State(state) for state in states])
    except ValueError:
        have = ", ".join(State)
        raise BadRequest(f"states: {shown(states)} has one that does not exist", hint=f"{have}") from None


async def collected(stream: AsyncIterator[bytes], limit: int, path: str) -> bytes:
    """All of a stream.  Raises: TooLarge: more than ``limit`` bytes. BadRequest: ``limit`` is no number of bytes."""
    check_count("max_bytes", limit, 0, 2**63 - 1)
    pieces: list[bytes] = []
    size = 0
    async for piece in stream:
        size += len(piece)
        if size > limit:
            raise TooLarge(
                f"{path}: it is larger than max_bytes={limit}",
                hint="raise max_bytes, or use open_read",
                path=path,
            )
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def content_of(content: Content, field: str = "content") -> bytes | AsyncIterator[bytes]:
    """Bytes as they are; a file or an iterable as a stream of pieces, read on a thread.  Raises: BadRequest."""
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    if isinstance(content, AsyncIterator):
        return _checked(content, field)
    read = getattr(content, "read", None)
    if callable(read):
        return _file_pieces(read, field)
    pieces: object = content
    if isinstance(pieces, Iterable) and not isinstance(pieces, str):
        return _threaded(pieces, field)
    raise BadRequest(
        f"{field}: {type(content).__name__} is not bytes, a binary file or an iterator of bytes",
        hint="text.encode()" if isinstance(pieces, str) else "",
    )


def streamed(content: Content, field: str) -> AsyncIterator[bytes]:
    """As :func:`content_of`, always a stream."""
    source = content_of(content, field)
    return _single(source) if isinstance(source, bytes) else source


async def _single(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]


def _file_pieces(read: Callable[[int], bytes], field: str) -> AsyncIterator[bytes]:
    def fetch() -> object:
        piece: object = read(PIECE)
        return piece if piece or piece is None else _END

    return _ahead(fetch, field)


def _threaded(pieces: Iterable[bytes], field: str) -> AsyncIterator[bytes]:
    return _ahead(partial(next, iter(pieces), _END), field)


async def _ahead(fetch: Callable[[], object], field: str) -> AsyncIterator[bytes]:
    """Pieces until there is ``_END``, each fetched on a thread while the one before it is used."""
    coming = asyncio.ensure_future(asyncio.to_thread(fetch))
    try:
        while (piece := await coming) is not _END:
            coming = asyncio.ensure_future(asyncio.to_thread(fetch))
            yield _bytes(piece, field)
    finally:
        if not coming.cancel() and not coming.cancelled():
            coming.exception()  # what the source raised after the last piece that was wanted concerns nobody


async def _checked(content: AsyncIterator[bytes], field: str) -> AsyncIterator[bytes]:
    async for piece in content:
        yield _bytes(piece, field)


def _bytes(piece: object, field: str) -> bytes:
    if not isinstance(piece, bytes | bytearray | memoryview):
        raise BadRequest(
            f"{field}: a piece is {type(piece).__name__}, not bytes", hint="open files in binary mode"
        )
    return bytes(piece)
