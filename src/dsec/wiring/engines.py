"""Opening engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.client import aio, sync
from dsec.client.aio_link import Connect
from dsec.control.allowance import Allowance
from dsec.control.building import Builder
from dsec.control.images import ImageKeeping
from dsec.control.layering import Layering
from dsec.control.named_images import NamedImages
from dsec.control.sharing import Sharing
from dsec.control.templates import Templates
from dsec.control.tenancy import Make, Room
from dsec.errors import BadRequest, DsecError
from dsec.handover import handed
from dsec.images.carrier import Carrier
from dsec.images.held import HeldImages
from dsec.images.layer_store import LayerStore
from dsec.images.store import ImageStore
from dsec.model.checks import local_path, shown
from dsec.model.images import silent
from dsec.model.sandbox import Level
from dsec.node.engine import Engine
from dsec.ports.engine import ImageService, Services, Workplace
from dsec.ports.journal import Journal, Sandboxes, Standing
from dsec.ports.runtime import Ended
from dsec.ports.storage import Image, Images
from dsec.runtimes.trees import Archives
from dsec.stores import mounts
from dsec.stores.journal import SqliteStore
from dsec.wiring.admission import Reception
from dsec.wiring.journals import open_in, remember, remembered
from dsec.wiring.levels import LEVELS, Parts, Refused
from dsec.wiring.servers import server
from dsec.wiring.settings import Home, Settings
from dsec.wiring.state import JOURNAL, KEY, KEYS, StateDirectory, durable_state, private_state
from dsec.wiring.templates import built_in, templates_of

if TYPE_CHECKING:
    from dsec.stores.postgres.store import PostgresStore


@contextlib.contextmanager
def _look(image: Image) -> Iterator[Path]:
    """The tree of an image, mounted where nobody else sees it."""
    descriptor = mounts.mount_image(image.path)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def image_store(settings: Settings) -> ImageStore:
    """The one that an engine with these settings has."""
    root = settings.store
    return ImageStore(root, progress=settings.progress or silent, budget=settings.images_bytes)


def image_service(settings: Settings) -> ImageService:
    """What can be done with images, for whoever has no engine open."""
    return ImageKeeping(image_store(settings))


def _images(state: StateDirectory, settings: Settings) -> Images:
    """A private engine needs no hold on what it has mounted; a durable one mounts its images again after a restart."""
    return _held(state, settings) if state.durable else image_store(settings)


def _held(state: StateDirectory, settings: Settings) -> HeldImages:
    """Also of a private engine, for what it does not mount at once: the images of a snapshot that came in."""
    return HeldImages(image_store(settings), settings.store, owner=state.tag, home=state.path)


async def _release(images: HeldImages, store: SqliteStore | PostgresStore) -> None:
    """Let go of images on which nothing stands any more that the engine knows of."""
    kept = [each.spec for each in await store.snapshots.all()]
    standing = await store.standing() | {Standing(one.level, one.base_digest, one.layers) for one in kept}
    if all(one.base_digest for one in standing if one.level is Level.CONTAINER):
        await images.keep_only({digest for one in standing for digest in (one.base_digest, *one.layers)})


def _templates(
    settings: Settings, place: Workplace, project: str | None = None, allowance: Allowance | None = None
) -> Templates:
    root = settings.store
    images, built = image_store(settings), templates_of(root)
    layering = Layering(
        images,
        LayerStore(root).keep,
        _look,
        place.changes,
        Builder(place),
        built,
        progress=settings.progress or silent,
    )
    named = NamedImages(images) if project is not None else images
    return Templates(
        named, layering, place.snapshots, built_in(settings.store, project), images.tidy, allowance
    )


def _sharing(
    settings: Settings,
    images: Images,
    place: Workplace,
    project: str | None = None,
    allowance: Allowance | None = None,
) -> Sharing:
    store = image_store(settings)
    built = built_in(settings.store, project)
    return Sharing(images, _look, Carrier(settings.store), built, place, store.tidy, allowance)


@dataclass(slots=True)
class Inside:
    """What is within an engine, told while it is opened to whoever puts something around it.

    Attributes:
        state: its directory. journal: its records. sandboxes: which there are. place: where its templates are built. room: makes the templates of one project.
        allowance: what those of a project may take.
    """

    allowance: Callable[[str], Allowance] = lambda _: Allowance()

    state: StateDirectory = field(init=False)
    journal: Journal = field(init=False)
    sandboxes: Sandboxes = field(init=False)
    place: Workplace = field(init=False)
    room: Make = field(init=False)

    def tell(self, state: StateDirectory, journal: Journal, settings: Settings) -> None:
        images = _held(state, settings)

        def room(project: str, place: Workplace) -> Room:
            allowance = self.allowance(project)
            return Room(
                _templates(settings, place, project, allowance),
                _sharing(settings, images, place, project, allowance),
            )

        self.state, self.journal, self.room = state, journal, room


async def open_journal(state: StateDirectory, settings: Settings) -> SqliteStore | PostgresStore:
    """The journal of a state directory that is ours.  Raises: StoreDamaged, StorageFull."""
    directory, keys = await asyncio.to_thread(lambda: (state.part(JOURNAL), state.part(KEYS)))
    known = await asyncio.to_thread(remembered, directory)
    store = await open_in(directory, keys / KEY, settings, known)
    if settings.database and settings.database != known:
        await asyncio.to_thread(remember, directory, settings.database)
    return store


async def _state(settings: Settings) -> StateDirectory:
    if settings.home:
        return await durable_state(settings.home, settings.wait)
    return await handed(private_state, StateDirectory.release)


async def open_engine(
    settings: Settings, reception: Reception | None = None, inside: Inside | None = None
) -> Services:
    """An open engine; its ``close`` closes everything that was opened for it.

    Args:
        reception: lets sandboxes in where many share the engine; None: whoever has it may make as many as the machine takes.
        inside: is told what is within.

    Raises:
        Conflict: another process owns this home.
        StoreDamaged, StorageFull: its journal.
    """
    async with contextlib.AsyncExitStack() as stack:
        state = await _state(settings)
        stack.push_async_callback(asyncio.to_thread, state.release)
        store = await open_journal(state, settings)
        stack.push_async_callback(store.close)
        parts = Parts(stack, _images(state, settings))
        engine: list[Engine] = []

        def on_ended(ended: Ended) -> None:
            if parts.pool is None or not parts.pool.ended(ended):
                for one in engine:
                    one.ended(ended)

        for level, make in LEVELS.items():
            try:
                await make(state, settings, on_ended, parts)
            except DsecError as error:
                parts.runtimes[level] = Refused(level, error)
        engine.append(
            Engine(
                runtimes=parts.runtimes,
                journal=store if reception is None else reception.journal(store),
                sandboxes=store if reception is None else reception.sandboxes(store),
                snapshots=store.snapshots if reception is None else reception.snapshots(store.snapshots),
                volumes=store.volumes if reception is None else reception.volumes(store.volumes),
                templates=partial(_templates, settings),
                sharing=partial(_sharing, settings, _held(state, settings)),
                images=image_service(settings),
                trees=Archives(),
                layers=parts.layers,
                kept=parts.layers.snapshots if parts.layers is not None else None,
                stored=parts.layers.volumes if parts.layers is not None else None,
                pool=parts.pool,
                durable=state.durable,
                residence=settings.residence,
                admission=None if reception is None else reception.turns,
            )
        )
        if inside is not None:
            inside.tell(state, store, settings)
            inside.sandboxes = store
            inside.place = engine[0].place
        services = await _begin(engine[0], reception, stack)
        if isinstance(parts.images, HeldImages):
            await _release(parts.images, store)
        return _closing(services, stack.pop_all())


async def _begin(engine: Engine, reception: Reception | None, stack: contextlib.AsyncExitStack) -> Services:
    """Open it; what was opened is closed by the stack."""
    if reception is not None:
        await reception.load()
    services = await engine.open()
    stack.push_async_callback(services.close)
    return services if reception is None else reception.admit(services, engine, stack)


def _closing(services: Services, stack: contextlib.AsyncExitStack) -> Services:
    """The same services, whose ``close`` also closes what they stand on."""
    return replace(services, close=stack.aclose)


def connector(home: Home, settings: Settings) -> Connect:
    """What opens the engine that ``home`` means, in this process: None private, a path durable.

    Raises:
        BadRequest: not a path.
    """
    chosen = settings if home is None else replace(settings, home=local_path("home", home))
    if chosen.home is not None:
        chosen = replace(chosen, home=chosen.home.absolute())

    return partial(open_engine, chosen)


def _connector(home: Home, pool: int | None, settings: Settings | None, api_key: str | None) -> Connect:
    """What opens the engine that ``home`` means, wherever it is.  Raises: BadRequest."""
    if not isinstance(home, str) or "://" not in home:
        if api_key is not None:
            raise BadRequest(
                "api_key: an engine in this process has none", hint="Dsec('http://...', api_key=...)"
            )
        return connector(home, _chosen(settings, pool))
    if pool is not None or settings is not None:
        name = "settings" if pool is None else "pool"
        raise BadRequest(
            f"{name}: a server has settings of its own", hint="leave it out, and tell `dsec serve`"
        )
    return server(home, api_key)


def _chosen(settings: Settings | None, pool: int | None) -> Settings:
    chosen = Settings() if settings is None else settings
    given: object = chosen
    if not isinstance(given, Settings):
        raise BadRequest(f"settings: {shown(given)} is not Settings", hint="settings=Settings(pool=0)")
    return chosen if pool is None else replace(chosen, pool=pool)


class AsyncDsec(aio.AsyncDsec):
    """An engine, asynchronous: ``async with AsyncDsec() as d``.

    Args:
        home: None = a private engine, whose sandboxes end with it; a path = a durable one, whose sandboxes live on; a URL = one behind a server
            (``http://…``, ``https://…``, or ``unix:///PATH`` of its socket).
        pool: ready sandboxes kept, 0 = none; None = as ``settings`` says.
        settings: everything else. Neither is for a server, which has its own.
        api_key: that opens a server, None = ``$DSEC_API_KEY``. The socket of one's own needs none.
    """

    def __init__(
        self,
        home: Home = None,
        *,
        pool: int | None = None,
        settings: Settings | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__(_connector(home, pool, settings, api_key))


class Dsec(sync.Dsec):
    """An engine, blocking: ``with Dsec() as d``. Arguments as :class:`AsyncDsec`."""

    def __init__(
        self,
        home: Home = None,
        *,
        pool: int | None = None,
        settings: Settings | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__(_connector(home, pool, settings, api_key))
