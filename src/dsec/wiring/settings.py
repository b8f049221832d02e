"""How an engine is set up, and where things are when nothing is said."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final, get_args

from dsec.core.residence import ALL_STAY, Residence
from dsec.errors import (
    BadRequest,
    IsolationUnavailable,
)
from dsec.model.admission import AT_ONCE, QUEUE
from dsec.model.alerts import Alert
from dsec.model.checks import check_count, check_seconds, local_path, shown
from dsec.model.images import Progress
from dsec.model.sandbox import MIB
from dsec.node.pool import MEMORY, MOST
from dsec.stores.schema import Durability

Home = str | Path | None

_ROOT_HOME: Final = Path("/var/lib/dsec")
_MOST_BYTES: Final = 2**60
_DATABASES: Final = ("postgresql://", "postgres://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine is set up, checked when made.

    Attributes:
        home: state directory of a durable engine; None = a private engine.
        images: the image store, shared by all engines of a user; None = the usual place.
        durability: ``process`` (survives kill -9) or ``disk`` (survives a power loss).
        journal_bytes: what the journal's database may hold before the oldest records of sandboxes that are gone are dropped; at least 1 MiB.
        database: where the journal of a durable engine is kept: "" = in its home, in SQLite, or where it was kept when it was opened last;
            ``postgresql://…`` = in a database of its own of PostgreSQL, whose key and signed checkpoints stay in the home.
        pool_bytes: size of the file of writable layers, all of it taken from the disk when it is made; at least 256 MiB. None = 4 GiB (private) or
            16 GiB (durable), at most a quarter of what is free.
        shelf: empty writable layers kept ready, at most 1,024.
        pool: ready sandboxes kept at most, of all kinds together; up to 1,000, 0 = none. How many, and of which, follows from what is asked for.
        pool_memory: bytes that they may take together, as measured; at least 1 MiB.
        host_paths: what of this machine volumes may show: what lies in one of these directories, or is one of these files, links followed. None = whatever
            the caller names himself, and nothing that a template names; () = nothing.
        images_bytes: what stored images may have together before those that nobody holds go, the longest unused first, after a build; at least
            1 MiB. None = no bound.
        progress: told, from other threads, what a build of an image is doing.
        wait: seconds for which a durable engine waits when another one has its home.
        creations: sandboxes that are made at the same time where many ask, from 1 to 1,024; creation_queue: that may wait for it, up to 1,000,000.
        memory_reserve: bytes of the machine that sandboxes are not given; None = a sixteenth of it, at least 256 MiB.
        alert: who is told of problems (``dsec ps --problems``), None = nobody; of an engine that many share.
        residence: after how many seconds without any act sandboxes are frozen and hibernated; as it is, never.

    Raises:
        BadRequest: the message names the field.
    """

    home: Path | None = None
    images: Path | None = None
    durability: Durability = "process"
    journal_bytes: int = 512 * MIB
    database: str = ""
    pool_bytes: int | None = None
    shelf: int = 8
    pool: int = 4
    pool_memory: int = MEMORY
    host_paths: tuple[Path, ...] | None = None
    images_bytes: int | None = None
    progress: Progress | None = None
    wait: float = 10.0
    creations: int = AT_ONCE
    creation_queue: int = QUEUE
    memory_reserve: int | None = None
    alert: Alert | None = None
    residence: Residence = ALL_STAY

    @property
    def store(self) -> Path:
        """Where the image store is."""
        return self.images or default_home() / "store"

    def __post_init__(self) -> None:
        for name in ("home", "images"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Path):
                raise BadRequest(f"settings.{name}: {shown(value)} is not a Path", hint=f"{name}=Path(...)")
            if value is not None:
                local_path(f"settings.{name}", value)
        durability: object = self.durability
        if durability not in get_args(Durability):
            raise BadRequest(
                f"settings.durability: there is no durability {shown(durability)}",
                hint=f"choose one of {', '.join(get_args(Durability))}",
            )
        database: object = self.database
        if not isinstance(database, str) or (database and not database.startswith(_DATABASES)):
            raise BadRequest(
                "settings.database: this is no URL of a database that can be used",
                hint="postgresql://USER:PASSWORD@HOST/DATABASE",
            )
        check_count("settings.journal_bytes", self.journal_bytes, MIB, _MOST_BYTES)
        if self.pool_bytes is not None:
            check_count("settings.pool_bytes", self.pool_bytes, 256 * MIB, _MOST_BYTES)
        if self.images_bytes is not None:
            check_count("settings.images_bytes", self.images_bytes, MIB, _MOST_BYTES)
        progress: object = self.progress
        if progress is not None and not callable(progress):
            raise BadRequest(
                f"settings.progress: {shown(progress)} cannot be called", hint="a function that takes a Step"
            )
        check_count("settings.shelf", self.shelf, 0, 1024)
        check_count("settings.pool", self.pool, 0, MOST)
        check_count("settings.pool_memory", self.pool_memory, MIB, _MOST_BYTES)
        _check_admission(self)
        check_seconds("settings.wait", self.wait)
        residence: object = self.residence
        if not isinstance(residence, Residence):
            raise BadRequest(
                f"settings.residence: {shown(residence)} is not Residence",
                hint="one of dsec.core.residence, such as SERVED",
            )
        _check_host_paths(self.host_paths)


def _check_admission(settings: Settings) -> None:
    """Raises: BadRequest: what an engine that many share needs."""
    check_count("settings.creations", settings.creations, 1, 1024)
    check_count("settings.creation_queue", settings.creation_queue, 0, 1_000_000)
    if settings.memory_reserve is not None:
        check_count("settings.memory_reserve", settings.memory_reserve, 0, _MOST_BYTES)
    alert: object = settings.alert
    if alert is not None and not isinstance(alert, Alert):
        raise BadRequest(
            f"settings.alert: {shown(alert)} is not Alert", hint="an Alert, with a command or a url"
        )


def _check_host_paths(paths: object) -> None:
    """Raises: BadRequest: neither None nor a tuple of absolute paths."""
    if paths is None:
        return
    if not isinstance(paths, tuple):
        raise BadRequest(
            f"settings.host_paths: {shown(paths)} is not a tuple",
            hint="a tuple of absolute paths, such as (Path('/srv/data'),)",
        )
    for path in paths:
        if not isinstance(path, Path) or not path.is_absolute():
            raise BadRequest(
                f"settings.host_paths: {shown(path)} is not an absolute Path", hint="Path(...).absolute()"
            )
        local_path("settings.host_paths", path)


def host_paths_of(text: str | None) -> tuple[Path, ...] | None:
    """What ``$DSEC_HOST_PATHS`` says: absolute paths with colons between them, none of them when it is empty; None: it is not set.

    Raises:
        BadRequest: one of them is no absolute path.
    """
    if text is None:
        return None
    paths = tuple([Path(part) for part in text.split(os.pathsep) if part])
    _check_host_paths(paths)
    return paths


def default_home() -> Path:
    """``$DSEC_HOME``, or ``/var/lib/dsec`` for root and ``~/.local/share/dsec`` for others."""
    given = os.environ.get("DSEC_HOME")
    if given:
        return Path(given).absolute()
    return _ROOT_HOME if os.geteuid() == 0 else Path.home() / ".local/share/dsec"


def programs() -> Path:
    """The directory of the built programs.  Raises: IsolationUnavailable: the package was installed without them."""
    directory = Path(str(files("dsec"))) / "_native"
    missing = [name for name in ("spawner", "init") if not os.access(directory / name, os.X_OK)]
    if missing:
        raise IsolationUnavailable(
            f"the programs {', '.join(missing)} are missing in {directory}",
            hint="reinstall the package on a machine with gcc, make and the C library's headers",
        )
    return directory
