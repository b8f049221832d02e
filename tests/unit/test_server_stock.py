"""Templates, snapshots, volumes, images, the pool, problems and decisions over HTTP: what is asked reaches the engine, and what is wrong is told."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from dsec.client.aio import AsyncDsec
from dsec.errors import NotFound, StorageFull, Unauthenticated
from dsec.model.built import Built, Tagged
from dsec.model.ids import SnapshotId, new_snapshot_id
from dsec.model.images import ImageInfo
from dsec.model.sandbox import Flag, SandboxSpec
from dsec.model.snapshots import SnapshotInfo, SnapshotKind
from dsec.model.template import Template
from dsec.model.tenants import OWNER, Principal, Scope
from dsec.ports.engine import Services, SharingService
from dsec.ports.gate import Gate
from dsec.server import outflow
from dsec.server.app import make_app
from dsec.server.listening import Listener, tcp_socket
from dsec.testing.fakes import FakeRuntime
from dsec.testing.harness import Harness, until
from dsec.testing.idempotency import FakeIdempotency
from dsec.testing.templates import FakeTemplates
from dsec.wire.values import decode
from dsec.wiring.servers import server

pytestmark = pytest.mark.anyio

ADMIN, DEVELOPER = "dsec_" + "A" * 43, "dsec_" + "D" * 43


def built(name: str = "agent") -> Built:
    return Built(
        digest="sha256:" + "d" * 64,
        blueprint="sha256:" + "b" * 64,
        template=Template(name=name, version="1"),
        base="system",
        base_digest="sha256:" + "e" * 64,
        layers=(),
        lock="",
        unenforced=(),
        floating=(),
        built_at=1.0,
    )


class Templates(FakeTemplates):
    """Builds whatever it is asked for, and remembers what that was."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.slow = False

    async def build(self, text: bytes, **how: Any) -> Built:
        self.asked.append({"text": text, **how})
        self.begun.set()
        if self.slow:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return built()

    async def promote(self, snapshot: SnapshotId, *, name: str, tag: str) -> Built:
        self.asked.append({"snapshot": snapshot, "name": name, "tag": tag})
        return built(name)

    async def list(self) -> tuple[Tagged, ...]:
        return tuple(
            Tagged(name=f"t{n:04}", tag="latest", digest="sha256:x", at=float(n)) for n in range(2500)
        )

    async def history(self, name: str) -> tuple[Tagged, ...]:
        return tuple(Tagged(name=name, tag="latest", digest=f"sha256:{n}", at=5.0) for n in range(3))


class Sharing(SharingService):
    """Files of a hundred pieces."""

    def __init__(self) -> None:
        self.sent = 0
        self.begun = self.ended = self.slow = False
        self.taken = b""
        self.fail_at = -1

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.begun = True
        try:
            if self.slow:
                await asyncio.sleep(60)
            for number in range(100):
                if number == self.fail_at:
                    raise StorageFull("it was ordered to fail")
                self.sent += 1
                yield bytes([number]) * (1 << 20)
        finally:
            self.ended = True

    def export_template(self, reference: str) -> AsyncIterator[bytes]:
        return self._missing(reference) if reference == "missing" else self._pieces()

    async def _missing(self, reference: str) -> AsyncIterator[bytes]:
        for piece in (b"never",):
            if reference == "missing":
                raise NotFound(f"there is no template {reference!r}")
            yield piece

    async def import_template(self, file: AsyncIterator[bytes], *, tag: str) -> Built:
        self.taken = b"".join([piece async for piece in file])
        return built(tag or "untagged")

    def export_snapshot(self, snapshot: SnapshotId) -> AsyncIterator[bytes]:
        return self._pieces()

    async def import_snapshot(self, file: AsyncIterator[bytes]) -> SnapshotInfo:
        self.taken = b"".join([piece async for piece in file])
        return SnapshotInfo(
            id=new_snapshot_id(),
            sandbox=SB,
            kind=SnapshotKind.FILES,
            spec=SandboxSpec(),
            created_at=1.0,
            paused=0.0,
        )


SB: Any = "sb-" + "a" * 26


class TwoKeys(Gate):
    """Of an administrator and of a developer, who see the same."""

    def __init__(self, engine: Services) -> None:
        self._engine = engine

    async def principal(self, key: str) -> Principal:
        if key == ADMIN:
            return OWNER
        if key == DEVELOPER:
            return Principal(id="ky-d", scope=Scope.DEVELOPER, project="ours")
        raise Unauthenticated("that is no key")

    def services(self, principal: Principal) -> Services:
        del principal
        return self._engine


@dataclass
class World:
    """A server, and a client of it."""

    url: str
    client: aiohttp.ClientSession
    engine: Services
    harness: Harness
    templates: Templates
    sharing: Sharing

    async def ask(
        self, method: str, path: str, body: Any = None, *, key: str = ADMIN, **headers: str
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = "application/octet-stream" if "/import" in path else "application/json"
        given = {
            "x-api-key": key,
            "content-type": kind,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        async with self.client.request(
            method, self.url + path, data=data and io.BytesIO(data), headers=given
        ) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if text else None


@asynccontextmanager
async def opened() -> AsyncIterator[World]:
    runtime = FakeRuntime(flags=frozenset(Flag))
    harness, templates, sharing = Harness(runtime, system_clock=True), Templates(), Sharing()
    engine = replace(await harness.connect(), templates=templates, sharing=sharing)
    listener = Listener(
        await asyncio.to_thread(lambda: make_app(TwoKeys(engine), idempotency=FakeIdempotency()))
    )
    bound = tcp_socket("127.0.0.1", 0)
    await listener.listen(bound)
    async with aiohttp.ClientSession() as client:
        try:
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            yield World(url, client, engine, harness, templates, sharing)
        finally:
            await client.close()
            await listener.stop(engine.close, drain=0.1)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with opened() as made:
        yield made


class TestTemplates:
    async def test_a_document_is_built(self, world: World) -> None:
        status, said = await world.ask(
            "POST",
            "/v1/templates?tag=v1&strict=true&source=a.yaml",
            b"name: agent\n",
            content_type="application/yaml",
        )
        assert (status, said["digest"]) == (201, built().digest)
        assert world.templates.asked == [
            {"text": b"name: agent\n", "source": "a.yaml", "tag": "v1", "strict": True, "update": False}
        ]

    async def test_once_for_each_key(self, world: World) -> None:
        for _ in range(3):
            status, _ = await world.ask("POST", "/v1/templates", b"name: agent\n", idempotency_key="one")
            assert status == 201
        assert len(world.templates.asked) == 1

    async def test_who_leaves_stops_it(self, world: World) -> None:
        world.templates.slow = True
        asking = asyncio.ensure_future(world.ask("POST", "/v1/templates", b"name: agent\n"))
        async with asyncio.timeout(10):
            await world.templates.begun.wait()
            asking.cancel()
            await world.templates.cancelled.wait()

    async def test_names_of_any_form(self, world: World) -> None:
        world.templates.built["agent:v1"] = built()
        assert (await world.ask("GET", "/v1/templates/agent:v1"))[0] == 200
        assert (await world.ask("GET", "/v1/templates/agent%3Av1"))[0] == 200
        assert (await world.ask("GET", "/v1/templates/agent:v2"))[0] == 404
        status, _ = await world.ask("POST", "/v1/templates/tag", {"reference": "agent:v1", "tag": "v2"})
        assert status == 200
        assert (await world.ask("GET", "/v1/templates/agent:v2"))[0] == 200
        assert (await world.ask("DELETE", "/v1/templates/agent:v2")) == (204, None)
        assert (await world.ask("DELETE", "/v1/templates/agent:v2")) == (204, None)

    async def test_pages(self, world: World) -> None:
        seen, cursor = [], ""
        while True:
            status, said = await world.ask("GET", f"/v1/templates?limit=100&cursor={cursor}")
            assert status == 200
            seen += [item["name"] for item in said["items"]]
            cursor = said["next"]
            if not cursor:
                break
        assert seen == [f"t{n:04}" for n in range(2500)]
        status, said = await world.ask("GET", "/v1/templates/t1/history?limit=2")
        assert [item["digest"] for item in said["items"]] == ["sha256:0", "sha256:1"]
        status, said = await world.ask("GET", f"/v1/templates/t1/history?limit=2&cursor={said['next']}")
        assert ([item["digest"] for item in said["items"]], said["next"]) == (["sha256:2"], "")

    async def test_a_client_reads_all_of_them(self, world: World) -> None:
        async with AsyncDsec(server(world.url, ADMIN)) as dsec:
            assert [one.name for one in await dsec.templates.list()] == [f"t{n:04}" for n in range(2500)]

    @pytest.mark.parametrize(
        "cursor",
        [
            "x",
            "bm9uc2Vuc2U=",
            base64.urlsafe_b64encode(b'[1,"a"]').decode(),
            base64.urlsafe_b64encode(b"{}").decode(),
            "%ff",
        ],
    )
    async def test_cursors_from_elsewhere(self, world: World, cursor: str) -> None:
        status, said = await world.ask("GET", f"/v1/templates?cursor={cursor}")
        assert (status, said["error"]["code"]) == (400, "bad_request")

    async def test_promoting(self, world: World) -> None:
        snapshot = new_snapshot_id()
        body = {"snapshot": snapshot, "name": "kept", "tag": "v1"}
        assert (await world.ask("POST", "/v1/templates/promote", body))[0] == 201
        assert world.templates.asked == [body]
        assert (await world.ask("POST", "/v1/templates/promote", {**body, "snapshot": "sn-1"}))[0] == 400
        assert (await world.ask("POST", "/v1/templates/promote", {**body, "more": 1}))[0] == 400

    async def test_files_out_and_in(self, world: World) -> None:
        async with world.client.get(
            world.url + "/v1/templates/export?reference=agent", headers={"x-api-key": ADMIN}
        ) as answer:
            whole = await answer.read()
        assert whole == b"".join(bytes([n]) * (1 << 20) for n in range(100))
        status, said = await world.ask("POST", "/v1/templates/import?tag=v7", whole[: 5 << 20])
        assert (status, said["template"]["name"]) == (201, "v7")
        assert world.sharing.taken == whole[: 5 << 20]

    async def test_what_goes_wrong_before_the_first_byte_is_told(self, world: World) -> None:
        status, said = await world.ask("GET", "/v1/templates/export?reference=missing")
        assert (status, said["error"]["code"]) == (404, "not_found")
        world.sharing.fail_at = 0
        assert (await world.ask("GET", "/v1/templates/export?reference=agent"))[0] == 507

    async def test_what_goes_wrong_later_cuts_it_off(self, world: World) -> None:
        world.sharing.fail_at = 50
        with pytest.raises(aiohttp.ClientPayloadError):
            async with world.client.get(
                world.url + "/v1/templates/export?reference=agent", headers={"x-api-key": ADMIN}
            ) as answer:
                await answer.read()
        assert world.sharing.ended

    async def test_no_faster_than_it_is_taken_and_over_when_nobody_is_there(self, world: World) -> None:
        answer = await world.client.get(
            world.url + "/v1/templates/export?reference=agent", headers={"x-api-key": ADMIN}
        )
        await answer.content.readexactly(10)
        for _ in range(100):
            await asyncio.sleep(0)
        assert world.sharing.sent < 30
        answer.close()
        await until(lambda: world.sharing.ended)

    async def test_who_leaves_before_it_begins_ends_it(self, world: World) -> None:
        world.sharing.slow = True
        asking = asyncio.ensure_future(world.ask("GET", "/v1/templates/export?reference=agent"))
        await until(lambda: world.sharing.begun)
        asking.cancel()
        await until(lambda: world.sharing.ended)
        assert not world.sharing.sent

    async def test_who_takes_nothing_is_let_go(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outflow, "WRITE_SECONDS", 0.2)
        answer = await world.client.get(
            world.url + "/v1/templates/export?reference=agent", headers={"x-api-key": ADMIN}
        )
        await until(lambda: world.sharing.ended)
        assert world.sharing.sent < 100
        answer.close()


class TestSnapshots:
    async def test_listed_seen_removed(self, world: World) -> None:
        info = await world.engine.sandboxes.create(SandboxSpec())
        taken = [await world.engine.snapshots.take(info.id, SnapshotKind.FILES) for _ in range(3)]
        status, said = await world.ask("GET", f"/v1/snapshots?sandbox={info.id}&limit=2")
        assert status == 200
        assert len(said["items"]) == 2
        _, rest = await world.ask("GET", f"/v1/snapshots?sandbox={info.id}&limit=2&cursor={said['next']}")
        found = [decode(SnapshotInfo, json.dumps(item).encode()) for item in said["items"] + rest["items"]]
        assert {one.id: one for one in found} == {one.id: one for one in taken}
        assert (await world.ask("GET", f"/v1/snapshots/{taken[0].id}"))[0] == 200
        for _ in range(2):
            assert (await world.ask("DELETE", f"/v1/snapshots/{taken[0].id}"))[0] == 204
        assert (await world.ask("GET", f"/v1/snapshots/{taken[0].id}"))[0] == 404
        assert (await world.ask("GET", "/v1/snapshots/sn-1"))[0] == 400
        assert (await world.ask("GET", "/v1/snapshots?sandbox=x"))[0] == 400

    async def test_files_out_and_in(self, world: World) -> None:
        async with world.client.get(
            world.url + f"/v1/snapshots/{new_snapshot_id()}/export", headers={"x-api-key": ADMIN}
        ) as answer:
            assert answer.headers["content-type"] == "application/octet-stream"
            assert len(await answer.read()) == 100 << 20
        status, said = await world.ask("POST", "/v1/snapshots/import", b"pieces")
        assert (status, said["sandbox"]) == (201, SB)
        assert world.sharing.taken == b"pieces"


class TestVolumes:
    async def test_made_seen_listed_removed(self, world: World) -> None:
        status, said = await world.ask("POST", "/v1/volumes", {"name": "data", "size_mib": 8})
        assert (status, said["size_mib"]) == (201, 8)
        assert (await world.ask("POST", "/v1/volumes", {"name": "data"}))[0] == 409
        assert (await world.ask("GET", "/v1/volumes/data"))[1]["name"] == "data"
        assert [item["name"] for item in (await world.ask("GET", "/v1/volumes"))[1]["items"]] == ["data"]
        for _ in range(2):
            assert (await world.ask("DELETE", "/v1/volumes/data"))[0] == 204
        assert (await world.ask("GET", "/v1/volumes/data"))[0] == 404

    async def test_once_for_each_key_also_after_a_crash(self, world: World) -> None:
        body = {"name": "data"}
        first = await world.ask("POST", "/v1/volumes", body, idempotency_key="k")
        assert await world.ask("POST", "/v1/volumes", body, idempotency_key="k") == first
        assert (await world.ask("POST", "/v1/volumes", {"name": "other"}, idempotency_key="k"))[0] == 409

    async def test_projects(self, world: World) -> None:
        """An administrator's key may name one; a developer's has its own."""
        assert (await world.ask("POST", "/v1/volumes", {"name": "a", "project": "theirs"}))[0] == 201
        assert (await world.ask("POST", "/v1/volumes", {"name": "b"}, key=DEVELOPER))[1]["project"] == "ours"
        for method, path, body in (
            ("GET", "/v1/volumes?project=theirs", None),
            ("GET", "/v1/volumes/a?project=theirs", None),
            ("DELETE", "/v1/volumes/a?project=theirs", None),
            ("POST", "/v1/volumes", {"name": "c", "project": "theirs"}),
        ):
            assert (await world.ask(method, path, body, key=DEVELOPER))[0] == 403
        assert (await world.ask("GET", "/v1/volumes/a?project=theirs"))[0] == 200

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"name": ""},
            {"name": "A"},
            {"name": "a/b"},
            {"name": "a", "size_mib": 0},
            {"name": "a", "x": 1},
            [],
        ],
    )
    async def test_what_is_wrong(self, world: World, body: Any) -> None:
        status, said = await world.ask("POST", "/v1/volumes", body)
        assert (status, said["error"]["code"]) == (400, "bad_request")


class TestImages:
    @pytest.fixture
    def stored(self, world: World) -> ImageInfo:
        info = ImageInfo(
            digest="sha256:" + "a" * 64,
            names=("debian:bookworm",),
            size=1,
            created_at=1.0,
            used_at=1.0,
            held_by=("engine /root/.secret",),
        )
        world.harness.images.stored.append(info)
        return info

    async def test_developers_see_and_administrators_change(self, world: World, stored: ImageInfo) -> None:
        for name in ("debian:bookworm", "debian%3Abookworm", stored.digest):
            status, said = await world.ask("GET", f"/v1/images/{name}", key=DEVELOPER)
            assert (status, said["held_by"]) == (200, [])
        assert (await world.ask("GET", "/v1/images/debian:bookworm"))[1]["held_by"] == [
            "engine /root/.secret"
        ]
        assert len((await world.ask("GET", "/v1/images", key=DEVELOPER))[1]["items"]) == 1
        for act in ("get", "refresh", "verify"):
            body = {"name": "debian:bookworm"}
            assert (await world.ask("POST", f"/v1/images/{act}", body, key=DEVELOPER))[0] == 403
            assert (await world.ask("POST", f"/v1/images/{act}", body))[1]["digest"] == stored.digest
        assert (await world.ask("POST", "/v1/images/collect", key=DEVELOPER))[0] == 403
        assert (await world.ask("POST", "/v1/images/collect", {"budget": 5}))[1] == {"paths": [], "bytes": 0}
        assert (await world.ask("DELETE", "/v1/images/debian:bookworm", key=DEVELOPER))[0] == 403
        assert (await world.ask("DELETE", "/v1/images/debian:bookworm"))[0] == 409  # it is needed

    async def test_looking_fetches_nothing(self, world: World) -> None:
        assert (await world.ask("GET", "/v1/images/docker.io/library/alpine:3"))[0] == 404


class TestRest:
    async def test_pool(self, world: World) -> None:
        assert (await world.ask("GET", "/v1/pool", key=DEVELOPER))[1]["ready"] == 0
        assert (await world.ask("POST", "/v1/pool/warm", {"count": 1}, key=DEVELOPER))[0] == 403
        status, said = await world.ask("POST", "/v1/pool/warm", {"count": 1})
        assert (status, said["error"]["code"]) == (422, "unsupported")  # the fake keeps none
        assert (await world.ask("POST", "/v1/pool/warm", {"count": -1}))[0] == 400

    async def test_problems(self, world: World) -> None:
        info = await world.engine.sandboxes.create(SandboxSpec())
        world.harness.runtime.undead.add(info.id)
        await world.ask("DELETE", f"/v1/sandboxes/{info.id}")
        said = (await world.ask("GET", "/v1/problems"))[1]
        assert [item["sandbox"] for item in said["items"]] == [info.id]
        world.harness.runtime.undead.clear()

    async def test_decisions(self, world: World) -> None:
        info = await world.engine.sandboxes.create(SandboxSpec())
        path = f"/v1/sandboxes/{info.id}/decisions"
        status, said = await world.ask("POST", path, {"plan": ["look", {"then": "act"}]})
        assert (status, said["act"], said["payload"]) == (
            201,
            "decision",
            {"plan": ["look", {"then": "act"}]},
        )
        for wrong, code in (
            (b"", 400),
            (b"[]", 400),
            (b"{}", 400),
            (b'{"a":NaN}', 400),
            (b'{"a":1,"a":2}', 400),
        ):
            assert (await world.ask("POST", path, wrong))[0] == code, wrong
        assert (await world.ask("POST", path, {"a": "x" * 40_000}))[0] == 413
        assert (await world.ask("POST", f"/v1/sandboxes/{SB}/decisions", {"a": 1}))[0] == 404

    async def test_a_decision_is_kept_once_for_each_key(self, world: World) -> None:
        info = await world.engine.sandboxes.create(SandboxSpec())
        path = f"/v1/sandboxes/{info.id}/decisions"
        answers = [await world.ask("POST", path, {"plan": "x"}, idempotency_key="k") for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert [record.act for record in await world.engine.observe.events(info.id)].count("decision") == 1

    async def test_the_document_names_them_all(self, world: World) -> None:
        status, said = await world.ask("GET", "/openapi.json")
        assert status == 200
        operations = {one["operationId"] for path in said["paths"].values() for one in path.values()}
        assert {
            "buildTemplate",
            "exportSnapshot",
            "createVolume",
            "collectImages",
            "warmPool",
            "decide",
        } <= operations
        assert {"listProblems", "metrics", "portGet", "portPost"} <= operations
