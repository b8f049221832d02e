"""What a principal sees of an engine, and that everything else looks to it like what never was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dsec.control.reach import renamed
from dsec.control.tenancy import Room, Tenancy
from dsec.errors import Denied, DsecError, NotFound
from dsec.model.built import Built
from dsec.model.execs import ExecRequest
from dsec.model.files import MakeDir, WriteOptions
from dsec.model.ids import SandboxId, SnapshotId, new_exec_id, new_sandbox_id, new_snapshot_id
from dsec.model.images import ImageInfo
from dsec.model.sandbox import Flag, SandboxSpec, State, Volume
from dsec.model.snapshots import SnapshotKind
from dsec.model.template import Template
from dsec.model.tenants import OWNER, Principal, Quota, Scope
from dsec.ports.engine import Services, Workplace
from dsec.ports.tenants import NoTenants
from dsec.testing.fakes import FakeRuntime
from dsec.testing.harness import Harness
from dsec.testing.sharing import NoSharing
from dsec.testing.templates import FakeTemplates
from dsec.wire.problems import to_body

pytestmark = pytest.mark.anyio

SPEC = SandboxSpec()
FLAGS = frozenset(Flag)
EXEC, SNAPSHOT = new_exec_id(), new_snapshot_id()
REQUEST = ExecRequest(argv=(b"true",))
Act = Callable[[Services, SandboxId], Awaitable[object]]
SnapshotAct = Callable[[Services, SnapshotId], Awaitable[object]]


@dataclass
class World:
    """One engine, and as two projects and others see it. ``ours``: a sandbox of project ``ours``."""

    harness: Harness
    engine: Services
    tenancy: Tenancy
    rooms: dict[str, FakeTemplates]
    ours: SandboxId

    def of(self, scope: Scope, project: str, sandbox: SandboxId | None = None) -> Services:
        id = f"ky-{project}-{scope}"
        return self.tenancy.services(Principal(id=id, scope=scope, project=project, sandbox=sandbox))

    @property
    def mine(self) -> Services:
        return self.of(Scope.DEVELOPER, "ours")

    @property
    def stranger(self) -> Services:
        return self.of(Scope.DEVELOPER, "theirs")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    harness = Harness(runtime=FakeRuntime(flags=FLAGS))
    services = await harness.connect()
    rooms: dict[str, FakeTemplates] = {}

    def room(project: str, place: Workplace) -> Room:
        del place
        return Room(rooms.setdefault(project, FakeTemplates()), NoSharing())

    execs = services.execs
    place = Workplace(
        services.sandboxes, execs, services.snapshots, harness.engine.snapshots, harness.engine.snapshots
    )
    tenancy = Tenancy(services, place, NoTenants(), room)
    found = World(harness, services, tenancy, rooms, new_sandbox_id())
    info = await found.mine.sandboxes.create(SPEC)
    found.ours = info.id
    yield found
    await services.close()


async def _pieces(services: Services, sandbox: SandboxId) -> object:
    return [piece async for piece in services.files.read(sandbox, "/x")]


async def _packed(services: Services, sandbox: SandboxId) -> object:
    return [piece async for piece in services.trees.pack(sandbox, "/x")]


async def _empty() -> AsyncIterator[bytes]:
    return
    yield b""


LOOKS: dict[str, Act] = {
    "get": lambda s, i: s.sandboxes.get(i),
    "run": lambda s, i: s.execs.run(i, REQUEST),
    "start": lambda s, i: s.execs.start(i, REQUEST),
    "attach": lambda s, i: s.execs.attach(i, EXEC),
    "list": lambda s, i: s.execs.list(i),
    "read": _pieces,
    "write": lambda s, i: s.files.write(i, "/x", b"x", options=WriteOptions()),
    "stat": lambda s, i: s.files.stat(i, "/"),
    "files": lambda s, i: s.files.list(i, "/"),
    "change": lambda s, i: s.files.change(i, MakeDir("/x")),
    "watch": lambda s, i: s.files.watch(i, "/"),
    "unpack": lambda s, i: s.trees.unpack(i, _empty(), "/x"),
    "pack": _packed,
    "metrics": lambda s, i: s.observe.metrics(i),
    "events": lambda s, i: s.observe.events(i),
    "wait": lambda s, i: s.observe.wait(i),
    "decide": lambda s, i: s.observe.decide(i, {"why": "x"}),
    "connect": lambda s, i: s.ports.connect(i, 80),
}
CHANGES: dict[str, Act] = {
    "destroy": lambda s, i: s.sandboxes.destroy(i),
    "pause": lambda s, i: s.sandboxes.pause(i),
    "resume": lambda s, i: s.sandboxes.resume(i),
    "hibernate": lambda s, i: s.sandboxes.hibernate(i),
    "extend": lambda s, i: s.sandboxes.extend(i, 5.0),
    "take": lambda s, i: s.snapshots.take(i, SnapshotKind.FILES),
    "fork": lambda s, i: s.snapshots.fork(i, 1),
    "rollback": lambda s, i: s.snapshots.rollback(i, SNAPSHOT),
    "snapshots": lambda s, i: s.snapshots.list(i),
}
OF_SNAPSHOT: dict[str, SnapshotAct] = {
    "get": lambda s, i: s.snapshots.get(i),
    "create": lambda s, i: s.snapshots.create(i, SPEC),
    "remove": lambda s, i: s.snapshots.remove(i),
}


async def told(act: Callable[[Services, str], Awaitable[object]], services: Services, id: str) -> object:
    """All that is to be known of an answer, whatever id it is of."""
    try:
        return await act(services, id), None
    except DsecError as error:
        body = repr(to_body(error)).replace(id, "ID")
        return type(error), body


@pytest.mark.parametrize("name", [*LOOKS, *CHANGES])
async def test_a_strangers_sandbox_is_as_one_that_never_was(world: World, name: str) -> None:
    act = {**LOOKS, **CHANGES}[name]
    before = await world.harness.acts(world.ours)
    theirs = await told(act, world.stranger, world.ours)  # type: ignore[arg-type]
    assert theirs == await told(act, world.stranger, new_sandbox_id())  # type: ignore[arg-type]
    assert await world.harness.acts(world.ours) == before
    assert (await world.engine.sandboxes.get(world.ours)).state is State.RUNNING


@pytest.mark.parametrize("name", [*LOOKS, *CHANGES])
async def test_a_siblings_token_does_not_find_it_either(world: World, name: str) -> None:
    act = {**LOOKS, **CHANGES}[name]
    sibling = await world.mine.sandboxes.create(SPEC)
    token = world.of(Scope.SANDBOX, "ours", sibling.id)
    theirs = await told(act, token, world.ours)  # type: ignore[arg-type]
    assert theirs == await told(act, token, new_sandbox_id())  # type: ignore[arg-type]
    assert (await world.engine.sandboxes.get(world.ours)).state is State.RUNNING


@pytest.mark.parametrize("name", CHANGES)
async def test_a_token_decides_nothing_of_its_own_sandbox(world: World, name: str) -> None:
    token = world.of(Scope.SANDBOX, "ours", world.ours)
    with pytest.raises(Denied):
        await CHANGES[name](token, world.ours)
    assert (await token.sandboxes.get(world.ours)).state is State.RUNNING


@pytest.mark.parametrize("name", OF_SNAPSHOT)
async def test_a_strangers_snapshot_is_as_one_that_never_was(world: World, name: str) -> None:
    snapshot = (await world.mine.snapshots.take(world.ours, SnapshotKind.FILES)).id
    act = OF_SNAPSHOT[name]
    for other in (world.stranger, world.of(Scope.SANDBOX, "ours", world.ours)):
        theirs = await told(act, other, snapshot)  # type: ignore[arg-type]
        assert theirs == await told(act, other, new_snapshot_id())  # type: ignore[arg-type]
    assert (await world.mine.snapshots.get(snapshot)).id == snapshot


async def test_their_own_sandbox_is_not_rolled_back_to_our_files(world: World) -> None:
    snapshot = (await world.mine.snapshots.take(world.ours, SnapshotKind.FILES)).id
    theirs = await world.stranger.sandboxes.create(SPEC)
    with pytest.raises(NotFound) as caught:
        await world.stranger.snapshots.rollback(theirs.id, snapshot)
    assert snapshot in caught.value.message
    assert await world.stranger.snapshots.list() == ()
    assert len(await world.mine.snapshots.list()) == 1


async def test_the_positive_control_whose_it_is_does_all_that(world: World) -> None:
    mine = world.mine
    assert (await mine.execs.run(world.ours, REQUEST)).exit_code == 0
    await mine.files.write(world.ours, "/x", b"hello", options=WriteOptions())
    assert await _pieces(mine, world.ours) == [b"hello"]
    assert await mine.observe.events(world.ours)
    snapshot = await mine.snapshots.take(world.ours, SnapshotKind.FILES)
    await mine.snapshots.create(snapshot.id, SPEC)
    await mine.sandboxes.destroy(world.ours)
    token = world.of(Scope.SANDBOX, "ours", (await mine.sandboxes.create(SPEC)).id)
    assert len(await token.sandboxes.list()) == 1


async def test_lists_hold_what_is_ones_own(world: World) -> None:
    theirs = await world.stranger.sandboxes.create(SPEC)
    assert [i.id for i in await world.mine.sandboxes.list()] == [world.ours]
    assert [i.id for i in await world.stranger.sandboxes.list()] == [theirs.id]
    assert [i.id for i in (await world.stranger.sandboxes.page(limit=1)).items] == [theirs.id]
    assert (await world.stranger.sandboxes.page(project="ours")).items == ()
    admin = world.tenancy.services(OWNER)
    assert {i.id for i in await admin.sandboxes.list()} == {world.ours, theirs.id}
    assert [i.id for i in (await admin.sandboxes.page(project="ours")).items] == [world.ours]
    token = world.of(Scope.SANDBOX, "ours", world.ours)
    assert [i.id for i in await token.sandboxes.list()] == [world.ours]


async def test_what_is_made_is_ones_own_whatever_is_said(world: World) -> None:
    made = await world.stranger.sandboxes.create(replace(SPEC, project="ours"))
    assert made.spec.project == "theirs"
    (cold,) = await world.stranger.sandboxes.create_cold(replace(SPEC, project="ours"), 1)
    assert (await world.engine.sandboxes.get(cold)).spec.project == "theirs"
    with pytest.raises(Denied):
        await world.of(Scope.SANDBOX, "ours", world.ours).sandboxes.create(SPEC)


async def test_volumes_are_ones_own(world: World) -> None:
    await world.mine.volumes.create("default", "data", 1)
    assert (await world.engine.volumes.get("ours", "data")).project == "ours"
    assert [v.name for v in await world.mine.volumes.list("")] == ["data"]

    async def get(services: Services, project: str) -> object:
        return await services.volumes.get(project, "data")

    theirs = await told(get, world.stranger, "ours")  # type: ignore[arg-type]
    assert theirs == await told(get, world.stranger, "nobodys")  # type: ignore[arg-type]
    await world.stranger.volumes.remove("ours", "data")
    assert await world.stranger.volumes.list("ours") == ()
    assert await world.engine.volumes.get("ours", "data")


async def test_neither_paths_of_the_server_nor_images_by_digest(world: World) -> None:
    digest = "sha256:" + "a" * 64
    for wrong in (
        replace(SPEC, volumes=(Volume(Path("/etc"), "/x"),)),
        replace(SPEC, base=digest),
        replace(SPEC, base="oci:/srv/x"),
        replace(SPEC, base_digest=digest),
        replace(SPEC, layers=(digest,)),
    ):
        with pytest.raises(Denied):
            await world.mine.sandboxes.create(wrong)
    for act in (
        lambda: world.mine.trees.upload(world.ours, Path("/etc/passwd"), "/x"),
        lambda: world.mine.trees.download(world.ours, "/x", Path("/tmp/x")),
    ):
        with pytest.raises(Denied):
            await act()


async def test_layers_are_those_of_a_template_that_is_seen(world: World) -> None:
    digest = "sha256:" + "a" * 64
    built = Built(
        digest="sha256:" + "d" * 64,
        blueprint="",
        template=Template(name="agent", version="1"),
        base="system",
        base_digest=digest,
        layers=(digest,),
        lock="",
        unenforced=(),
        floating=(),
        built_at=0.0,
    )
    await world.mine.templates.list()
    world.rooms["ours"].built[built.reference] = built
    spec = replace(SPEC, template=built.reference, base_digest=digest, layers=(digest,))
    assert (await world.mine.sandboxes.create(spec)).spec.layers == (digest,)
    with pytest.raises(Denied):
        await world.stranger.sandboxes.create(spec)
    with pytest.raises(Denied):
        await world.mine.sandboxes.create(replace(spec, layers=(digest, "sha256:" + "b" * 64)))


async def test_what_is_everybodys_is_changed_by_admins(world: World) -> None:
    shared = world.of(Scope.DEVELOPER, "default")
    for act in (
        lambda: shared.templates.build(b"", source="x", tag="t", strict=False, update=False),
        lambda: shared.templates.remove("x"),
        lambda: world.mine.images.refresh("system"),
        lambda: world.mine.images.collect(None),
        world.mine.pool.info,
        world.mine.tenants.keys,
        lambda: world.mine.tenants.create_key(Scope.ADMIN, project="ours"),
        lambda: world.mine.tenants.set_quota("ours", Quota()),
    ):
        with pytest.raises(Denied):
            await act()


async def test_images_are_seen_by_name_and_not_whose_they_are(world: World) -> None:
    facts = {"size": 1, "created_at": 0.0, "used_at": 0.0, "held_by": ("template-x",)}
    named = ImageInfo(digest="sha256:1", names=("system",), **facts)  # type: ignore[arg-type]
    layer = ImageInfo(digest="sha256:2", names=(), **facts)  # type: ignore[arg-type]

    async def stored() -> tuple[ImageInfo, ...]:
        return named, layer

    world.harness.images.list = stored  # type: ignore[method-assign]
    assert await world.tenancy.services(OWNER).images.list() == (named, layer)
    assert await world.mine.images.list() == (replace(named, held_by=()),)
    assert await world.mine.images.get("system") == replace(named, held_by=())
    for name in ("sha256:2", "other"):
        with pytest.raises(NotFound):
            await world.mine.images.get(name)


async def test_every_act_is_recorded_with_the_key(world: World) -> None:
    await world.mine.execs.run(world.ours, REQUEST)
    await world.mine.files.write(world.ours, "/x", b"x", options=WriteOptions())
    await _pieces(world.mine, world.ours)
    await world.of(Scope.SANDBOX, "ours", world.ours).execs.run(world.ours, REQUEST)
    await world.tenancy.services(OWNER).execs.run(world.ours, REQUEST)
    records = await world.engine.observe.events(world.ours)
    actors = {record.act: record.actor for record in records if not record.act.startswith("exec")}
    assert set(actors.values()) == {"ky-ours-developer"}
    execs = [record.actor for record in records if record.act == "exec"]
    assert execs == [who for who in ("ky-ours-developer", "ky-ours-sandbox", "local") for _ in range(2)]


def test_an_error_is_told_with_the_id_that_was_asked_for() -> None:
    error = NotFound("no B here", hint="B?", sandbox="B", all=["B", "C"], count=3)
    same = renamed(error, "A", "B")
    assert to_body(same) == to_body(NotFound("no A here", hint="A?", sandbox="A", all=["A", "C"], count=3))
    assert type(same) is NotFound
