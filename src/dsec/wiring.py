"""Composition: which back-ends an engine is made of. The only module that names concrete ones.

A *private* engine has a state directory of its own that goes with it; a *durable* one has ``home``, which one process at a
time may own. Levels that this machine cannot have are kept with their reason, and refused with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Final, get_args

from dsec.client import aio, sync
from dsec.client.aio_link import Connect
from dsec.control.template_store import TemplateStore
from dsec.control.templates import Templates
from dsec.errors import (
    BadRequest,
    Busy,
    Conflict,
    Denied,
    DsecError,
    IsolationUnavailable,
    StorageFull,
    Unsupported,
)
from dsec.images import gc as images_gc
from dsec.images.dependencies.cache import WheelCache
from dsec.images.layer_store import LayerStore
from dsec.images.probe import image_layer
from dsec.images.store import ImageStore
from dsec.model.checks import check_count, check_seconds, local_path, shown
from dsec.model.health import Layer, Report, Verdict
from dsec.model.ids import SandboxId, new_engine_id
from dsec.model.journal import Finding
from dsec.model.sandbox import MIB, Flag, Level, Metrics, Problem
from dsec.node.engine import Engine
from dsec.node.lifecycle import plan_for
from dsec.node.ready import MAX_SIZE, ReadyRuntime
from dsec.ports.engine import Services
from dsec.ports.guest import Guest
from dsec.ports.runtime import Ended, OnEnded, Plan, Running, Runtime
from dsec.ports.storage import Image
from dsec.runtimes import cgroups, probe
from dsec.runtimes.container import ContainerRuntime, Mounts
from dsec.runtimes.process import ProcessRuntime, require_landlock
from dsec.runtimes.spawned import SpawnedRuntime
from dsec.runtimes.spawner import SpawnerConfig
from dsec.runtimes.trees import Archives
from dsec.stores import mounts
from dsec.stores.journal import SqliteStore
from dsec.stores.keeper import Pace
from dsec.stores.layers import BtrfsLayers
from dsec.stores.probe import storage_layers
from dsec.stores.reader import JournalReader, verify
from dsec.stores.schema import Durability

Home = str | Path | None

_ROOT_HOME: Final = Path("/var/lib/dsec")
_RUN: Final = Path("/run/dsec")  # in memory, for root
_UID_LOCKS: Final = _RUN / "uids"
_HOMES: Final = Path("/var/lib/dsec-homes")  # root's, and others may enter it: private users live below
_PREFIX: Final = "dsec-"
_OWNER: Final = ".owner"
_TRIES: Final = 5
_MOST_BYTES: Final = 2**60
_WHEELS_KEPT: Final = 4 * 2**30  # bytes of the wheels that were used last
_TRIAL_SECONDS: Final = 60.0
_JOURNAL: Final = "journal"
_KEYS: Final = "keys"
_KEY: Final = "journal.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine is set up, checked when made.

    Attributes:
        home: state directory of a durable engine; None = a private engine.
        images: the image store, shared by all engines of a user; None = the usual place.
        durability: ``process`` (survives kill -9) or ``disk`` (survives a power loss).
        journal_bytes: what the journal's database may hold before the oldest records of sandboxes that are gone are dropped; at least 1 MiB.
        pool_bytes: size of the file of writable layers, all of it taken from the disk when it is made; at least 256 MiB. None = 4 GiB (private) or
            16 GiB (durable), at most a quarter of what is free.
        shelf: empty writable layers kept ready, at most 1,024.
        pool: ready sandboxes kept of the kind that was asked for last, at most 1,000; 0 = none.
        wait: seconds for which a durable engine waits when another one has its home.

    Raises:
        BadRequest: the message names the field.
    """

    home: Path | None = None
    images: Path | None = None
    durability: Durability = "process"
    journal_bytes: int = 512 * MIB
    pool_bytes: int | None = None
    shelf: int = 8
    pool: int = 2
    wait: float = 10.0

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
        check_count("settings.journal_bytes", self.journal_bytes, MIB, _MOST_BYTES)
        if self.pool_bytes is not None:
            check_count("settings.pool_bytes", self.pool_bytes, 256 * MIB, _MOST_BYTES)
        check_count("settings.shelf", self.shelf, 0, 1024)
        check_count("settings.pool", self.pool, 0, MAX_SIZE)
        check_seconds("settings.wait", self.wait)


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


class _Refused(Runtime):
    """A level that this machine cannot have, with the reason."""

    def __init__(self, level: Level, reason: DsecError) -> None:
        self.level = level
        self.flags: frozenset[Flag] = frozenset()
        self._reason = reason

    async def create(self, plan: Plan) -> Running:
        if isinstance(self._reason, StorageFull):
            raise StorageFull(self._reason.message, hint=self._reason.hint) from self._reason
        raise IsolationUnavailable(
            f"level {plan.level.value!r} is not available here: {self._reason.message}",
            hint=self._reason.hint,
        ) from self._reason

    async def destroy(self, sandbox: SandboxId) -> None:
        del sandbox

    async def list(self) -> tuple[Running, ...]:
        """Nobody knows what runs: nothing may be taken for lost."""
        raise IsolationUnavailable(self._reason.message, hint=self._reason.hint)

    async def freeze(self, sandbox: SandboxId, frozen: bool) -> None:
        raise Unsupported(f"{sandbox} cannot be {'paused' if frozen else 'resumed'}: {self._reason.message}")

    async def deadline(self, sandbox: SandboxId, at: float) -> None:
        del sandbox, at

    async def connect(self, sandbox: SandboxId) -> Guest:
        raise IsolationUnavailable(self._reason.message, hint=self._reason.hint, sandbox=sandbox)

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        del sandbox
        return Metrics()


@dataclass(slots=True)
class _State:
    """A state directory that we own.

    ``tag`` names its cgroups; ``homes`` holds the directories of level ``process``, ``run`` the sockets.
    """

    path: Path
    homes: Path
    run: Path
    tag: str
    durable: bool
    lock: int
    alive: int | None = None

    def part(self, name: str) -> Path:
        """A private directory in it."""
        path = self.path / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def release(self) -> None:
        """A private state directory goes; a durable one is only unlocked."""
        if not self.durable:
            for path in (self.run, self.homes, self.path):
                shutil.rmtree(path, ignore_errors=True)
            self.run.with_name(f"{self.run.name}{_OWNER}").unlink(missing_ok=True)
        else:
            for path in (*(self.run / level.value for level in Level), self.run, self.homes):
                with contextlib.suppress(OSError):
                    path.rmdir()  # only an empty one goes: what runs on keeps its own
        os.close(self.lock)
        if self.alive is not None:
            os.close(self.alive)


def _lock(path: Path) -> int | None:
    """The lock of a state directory, or None when somebody has it."""
    fd = os.open(path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _homes(tag: str, state: Path) -> Path:
    """Where directories of level ``process`` are made: as root their private users must be able to reach it."""
    if os.geteuid() != 0:
        path = state / "homes"
        path.mkdir(mode=0o700, exist_ok=True)
        return path
    path = _HOMES / tag
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    path.parent.chmod(0o711)  # whatever the umask
    path.mkdir(mode=0o711, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != 0:
        raise Conflict(f"{path} is not ours", hint="remove it")
    path.chmod(0o711)
    return path


def _run(tag: str, state: Path) -> Path:
    """Where sockets are made."""
    if os.geteuid() != 0:
        return state / "run"
    path = _RUN / tag
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _private_state() -> _State:
    base = Path(tempfile.gettempdir())
    _sweep(base)
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = _lock(path)
        if lock is not None:  # else another engine's sweep found it in the moment before it was locked
            alive = _claim(path.name)
            homes, run = _homes(path.name, path), _run(path.name, path)
            return _State(path, homes, run, path.name, False, lock, alive)
    raise Busy(f"{_TRIES} state directories in {base} were taken by other engines at once")


def _claim(tag: str) -> int | None:
    """A private engine's sign of life for as long as it lives, apart from its state directory; None without root."""
    if os.geteuid() != 0:
        return None
    _RUN.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(_RUN / f"{tag}{_OWNER}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _sweep_orphans() -> None:
    """Remove what is left of dead private engines whose whole state directory somebody removed. Their lock tells that they are dead."""
    for path in _RUN.glob(f"{_PREFIX}*{_OWNER}") if os.geteuid() == 0 else ():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _forget(path.name.removesuffix(_OWNER))
            finally:
                os.close(fd)


def _forget(tag: str) -> bool:
    """Remove cgroups, sockets and directories of level ``process``; False: some processes do not die yet."""
    ended = [cgroups.remove(f"{tag}-{level.value}") for level in Level]
    if not all(ended):
        return False
    shutil.rmtree(_HOMES / tag, ignore_errors=True)
    shutil.rmtree(_RUN / tag, ignore_errors=True)
    (_RUN / f"{tag}{_OWNER}").unlink(missing_ok=True)
    return True


def _sweep(base: Path) -> tuple[Path, ...]:
    """Remove what private engines left that were killed together with their spawner; what was removed."""
    _sweep_orphans()
    swept = []
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            info = path.lstat()
            if (
                not stat.S_ISDIR(info.st_mode)
                or info.st_uid != os.geteuid()
                or not (path / "owner.lock").exists()
            ):
                continue
            lock = _lock(path)
            if lock is None:
                continue
            if os.geteuid() == 0 and not _forget(path.name):  # the next sweep tries again
                os.close(lock)
                continue
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            swept.append(path)
    return tuple(swept)


def _make_home(home: Path) -> str:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        kind = Denied if isinstance(error, PermissionError) else BadRequest
        raise kind(
            f"home: {home} is not a directory and cannot be made one: {error.strerror}",
            hint="name a directory that is there or can be made",
        ) from error
    return _PREFIX + hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]


async def _durable_state(home: Path, wait: float) -> _State:
    tag = await asyncio.to_thread(_make_home, home)
    deadline = asyncio.get_running_loop().time() + wait
    while (lock := _lock(home)) is None:
        if asyncio.get_running_loop().time() > deadline:
            raise Conflict(
                f"{home} is in use by another engine",
                hint="connect to that engine instead, or name another home",
                home=str(home),
            )
        await asyncio.sleep(0.02)
    try:
        return _State(home, _homes(tag, home), _run(tag, home), tag, True, lock)
    except BaseException:
        os.close(lock)
        raise


@dataclass(slots=True)
class _Parts:
    """What was opened, to be closed in reverse."""

    stack: contextlib.AsyncExitStack
    runtimes: dict[Level, Runtime]
    layers: BtrfsLayers | None = None
    ready: list[ReadyRuntime] = field(default_factory=list)


def _config(state: _State, level: Level, hierarchies: tuple[cgroups.Hierarchy, ...]) -> SpawnerConfig:
    root = os.geteuid() == 0
    if root:
        _UID_LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)
    return SpawnerConfig(
        level=level,
        directory=state.part(level.value),
        sockets=state.run / level.value,
        programs=programs(),
        durable=state.durable,
        cgroups=[h.argument() for h in hierarchies],
        uids=_UID_LOCKS if root else None,
    )


def _hierarchies(state: _State, level: Level) -> tuple[cgroups.Hierarchy, ...]:
    return cgroups.prepare(f"{state.tag}-{level.value}") if os.geteuid() == 0 else ()


async def _container(state: _State, settings: Settings, on_ended: OnEnded, parts: _Parts) -> None:
    if os.geteuid() != 0:
        raise IsolationUnavailable(
            "level 'container' needs root", hint="run as root, or use level='process', which does not"
        )
    layers = await BtrfsLayers.open(
        state.path, size_bytes=settings.pool_bytes, shelf=settings.shelf, durable=state.durable
    )
    parts.stack.push_async_callback(layers.close)

    def build() -> ContainerRuntime:
        groups = _hierarchies(state, Level.CONTAINER)
        return ContainerRuntime(
            _config(state, Level.CONTAINER, groups),
            groups,
            on_ended=on_ended,
            images=ImageStore(settings.images or default_home() / "store"),
            layers=layers,
            mounts=Mounts(mounts.mount_image, mounts.clone_detached),
        )

    await _add(await asyncio.to_thread(build), settings, parts)
    parts.layers = layers


async def _process(state: _State, settings: Settings, on_ended: OnEnded, parts: _Parts) -> None:
    def build() -> ProcessRuntime:
        require_landlock()
        groups = _hierarchies(state, Level.PROCESS)
        config = _config(state, Level.PROCESS, groups)
        return ProcessRuntime(config, groups, on_ended=on_ended, homes=state.homes)

    await _add(await asyncio.to_thread(build), settings, parts)


async def _add(runtime: SpawnedRuntime, settings: Settings, parts: _Parts) -> None:
    parts.stack.push_async_callback(runtime.close)
    await runtime.start()
    parts.runtimes[runtime.level] = runtime
    if settings.pool:
        ready = ReadyRuntime(runtime, plan_for, settings.pool)
        parts.stack.push_async_callback(ready.close)
        parts.runtimes[runtime.level] = ready
        parts.ready.append(ready)


_Maker = Callable[[_State, Settings, OnEnded, _Parts], Awaitable[None]]
_LEVELS: Final[dict[Level, _Maker]] = {Level.CONTAINER: _container, Level.PROCESS: _process}


@contextlib.contextmanager
def _look(image: Image) -> Iterator[Path]:
    """The tree of an image, mounted where nobody else sees it."""
    descriptor = mounts.mount_image(image.path)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _templates_of(store: Path) -> Path:
    return store / "templates"


def _templates(settings: Settings) -> Templates:
    root = settings.images or default_home() / "store"
    images, built = ImageStore(root), _templates_of(root)
    return Templates(images, images, LayerStore(root).keep, _look, TemplateStore(built), built)


async def _open_journal(state: _State, settings: Settings) -> SqliteStore:
    directory, keys = await asyncio.to_thread(lambda: (state.part(_JOURNAL), state.part(_KEYS)))
    return await SqliteStore.open(
        directory,
        key=keys / _KEY,
        engine_id=new_engine_id(),
        durability=settings.durability,
        pace=Pace(keep_bytes=settings.journal_bytes),
    )


async def open_engine(settings: Settings) -> Services:
    """An open engine; its ``close`` closes everything that was opened for it.

    Raises:
        Conflict: another process owns this home.
        StoreDamaged, StorageFull: its journal.
    """
    async with contextlib.AsyncExitStack() as stack:
        state = (
            await _durable_state(settings.home, settings.wait)
            if settings.home
            else await asyncio.to_thread(_private_state)
        )
        stack.push_async_callback(asyncio.to_thread, state.release)
        store = await _open_journal(state, settings)
        stack.push_async_callback(store.close)
        parts = _Parts(stack, {})
        engine: list[Engine] = []

        def on_ended(ended: Ended) -> None:
            if not any(ready.ended(ended) for ready in parts.ready):
                for one in engine:
                    one.ended(ended)

        for level, make in _LEVELS.items():
            try:
                await make(state, settings, on_ended, parts)
            except DsecError as error:
                parts.runtimes[level] = _Refused(level, error)
        engine.append(
            Engine(
                runtimes=parts.runtimes,
                journal=store,
                sandboxes=store,
                snapshots=store.snapshots,
                templates=_templates(settings),
                trees=Archives(),
                layers=parts.layers,
                kept=parts.layers.snapshots if parts.layers is not None else None,
                durable=state.durable,
            )
        )
        services = await engine[0].open()
        stack.push_async_callback(services.close)
        return _closing(services, stack.pop_all())


def _closing(services: Services, stack: contextlib.AsyncExitStack) -> Services:
    """The same services, whose ``close`` also closes what they stand on."""
    return replace(services, close=stack.aclose)


def connector(home: Home, settings: Settings) -> Connect:
    """What opens the engine that ``home`` means: None private, a path durable.

    Raises:
        Unsupported: a URL: engines behind HTTP cannot be reached yet.
        BadRequest: not a path.
    """
    if isinstance(home, str) and "://" in home:
        raise Unsupported(
            f"{home}: engines behind a URL cannot be reached yet", hint="name a directory, or nothing"
        )
    chosen = settings if home is None else replace(settings, home=local_path("home", home))
    if chosen.home is not None:
        chosen = replace(chosen, home=chosen.home.absolute())

    def connect() -> Awaitable[Services]:
        return open_engine(chosen)

    return connect


def _chosen(settings: Settings | None, pool: int | None) -> Settings:
    chosen = Settings() if settings is None else settings
    given: object = chosen
    if not isinstance(given, Settings):
        raise BadRequest(f"settings: {shown(given)} is not Settings", hint="settings=Settings(pool=0)")
    return chosen if pool is None else replace(chosen, pool=pool)


class AsyncDsec(aio.AsyncDsec):
    """An engine, asynchronous: ``async with AsyncDsec() as d``.

    Args:
        home: None = a private engine, whose sandboxes end with it; a path = a durable one, whose sandboxes live on.
        pool: ready sandboxes kept, 0 = none; None = as ``settings`` says.
        settings: everything else.
    """

    def __init__(
        self, home: Home = None, *, pool: int | None = None, settings: Settings | None = None
    ) -> None:
        super().__init__(connector(home, _chosen(settings, pool)))


class Dsec(sync.Dsec):
    """An engine, blocking: ``with Dsec() as d``. Arguments as :class:`AsyncDsec`."""

    def __init__(
        self, home: Home = None, *, pool: int | None = None, settings: Settings | None = None
    ) -> None:
        super().__init__(connector(home, _chosen(settings, pool)))


def examine() -> Report:
    """Every layer of isolation of this machine, and a trial of every level. Blocking, forks: for a process with one thread."""
    layers = [
        *probe.kernel_layers(),
        *storage_layers(),
        _native_programs(),
        image_layer(default_home() / "store"),
    ]
    return Report(kernel=os.uname().release, layers=tuple(layers), levels=asyncio.run(_try_levels()))


def _native_programs() -> Layer:
    try:
        return probe.active("native programs", str(programs()))
    except IsolationUnavailable as error:
        return probe.unavailable("native programs", error.message, error.hint)


async def _try_levels() -> tuple[Verdict, ...]:
    async with AsyncDsec(settings=Settings(shelf=1, pool=0)) as engine:
        return tuple([await _try_level(engine, level) for level in Level])


async def _try_level(engine: aio.AsyncDsec, level: Level) -> Verdict:
    begun = time.monotonic()
    try:
        async with await engine.sandboxes.create(level=level) as sandbox:
            result = await sandbox.exec(["/bin/true"], timeout=_TRIAL_SECONDS)
            flags = sandbox.flags
    except DsecError as error:
        return Verdict(level=level, available=False, reason=error.message, hint=error.hint)
    return Verdict(
        level=level,
        available=result.ok,
        reason="" if result.ok else f"/bin/true ended with exit code {result.exit_code}",
        flags=flags,
        missing=frozenset(Flag) - flags,
        seconds=time.monotonic() - begun,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What :func:`collect` removed, and what could not be removed yet."""

    removed: tuple[Path, ...]
    problems: tuple[Problem, ...]


async def collect(home: Path) -> Collected:
    """Remove what dead private engines and half-made or replaced images left, and repair the durable engine of ``home``.

    A durable engine without sandboxes keeps no process.

    Raises:
        Conflict: another process owns ``home``.
    """
    removed = await asyncio.to_thread(_sweep, Path(tempfile.gettempdir()))
    store = default_home() / "store"
    removed += await asyncio.to_thread(images_gc.collect, store)
    await asyncio.to_thread(WheelCache(_templates_of(store) / "wheels").prune, _WHEELS_KEPT)
    problems: tuple[Problem, ...] = ()
    if await asyncio.to_thread(home.exists):
        async with AsyncDsec(home) as engine:
            problems = await engine.problems()
    return Collected(removed=removed, problems=problems)


def journal_reader(home: Path) -> JournalReader:
    """The journal of a durable engine, whether or not it is open somewhere.  Raises: NotFound, StoreDamaged."""
    return JournalReader(home / _JOURNAL)


def verify_journal(home: Path) -> tuple[Finding, ...]:
    """All that is wrong with the journal of a durable engine, open or closed.  Raises: NotFound, StoreDamaged."""
    return verify(home / _JOURNAL, home / _KEYS / _KEY)
