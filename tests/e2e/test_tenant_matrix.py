"""What one tenant may learn of another over HTTP: nothing.

The matrix comes from the OpenAPI document: every call in it has recipes here, or the test fails. Each is asked of a real server about things that
are somebody else's and about things that never were, and both answers must be the same to the byte, but for the names that were asked for.

Calls for administrators answer 403 whatever they name: that a key may not do a thing depends on the key alone, so it tells nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

import aiohttp
import pytest

from dsec.model.ids import new_exec_id, new_key_id, new_sandbox_id, new_snapshot_id
from dsec.ports.gate import Gate
from dsec.server.app import make_app
from dsec.testing.databases import NewDatabase
from dsec.wiring.serving import Place, Running, serving
from dsec.wiring.settings import Settings
from dsec.wiring.tenants import shared

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

Operation = tuple[str, str]
Names = Mapping[str, str]
"""What stands for ``<kind>`` in a recipe."""

_TEMPLATE: Final = "name: {name}\nsteps:\n  - run: echo built > /built\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One request. ``<kind>`` anywhere in it is a name of that kind.

    Attributes:
        query: behind the path. body: sent as JSON. raw: sent as it is, of media type ``kind``.
        blind: what a stranger is answered, whether or not there is such a thing.
        last: it ends things, so the owner asks it after the others; by size.
        stream: only the beginning of the answer is read.
    """

    method: str = ""
    path: str = ""
    query: str = ""
    body: Any = None
    raw: bytes | None = None
    media: str = "application/octet-stream"
    blind: int = 404
    last: int = 0
    stream: bool = False
    admin: bool = False
    open: bool = False

    def kinds(self) -> tuple[str, ...]:
        text = self.path + self.query + json.dumps(self.body)
        return tuple(kind for kind in _KINDS if f"<{kind}>" in text)

    def said(self) -> str:
        return f"{self.method} {self.path}{self.query} {json.dumps(self.body)}"


_KINDS: Final = ("sandbox", "exec", "snapshot", "volume", "template", "key", "project")
_ONE: Final = "/v1/sandboxes/{sandbox}"
_EXEC: Final = _ONE + "/execs/{exec}"
_PORT: Final = _ONE + "/ports/{port}/{path}"
_FILES: Final = _ONE + "/files"
_OPEN: Final = Recipe(open=True)
"""It names nothing that is anybody's: what it answers to whom is tested below, and that it needs a key."""
_ADMIN: Final = Recipe(admin=True, blind=403)

RECIPES: Final[dict[Operation, tuple[Recipe, ...]]] = {
    ("POST", "/v1/sandboxes"): (
        Recipe(body={"template": "<snapshot>"}),
        Recipe(body={"template": "<template>"}),
        Recipe(body={"level": "container", "volumes": [{"source": "<volume>", "target": "/data"}]}),
        Recipe(body={"level": "process", "project": "<project>"}, blind=403),
    ),
    ("GET", "/v1/sandboxes"): (Recipe(query="?project=<project>", blind=200),),
    ("POST", "/v1/sandboxes/batch"): (
        Recipe(body={"template": "<snapshot>", "count": 1}),
        Recipe(body={"template": "<template>", "count": 1}),
    ),
    ("GET", _ONE): (Recipe(),),
    ("DELETE", _ONE): (Recipe(last=9),),
    ("POST", _ONE + "/execs"): (
        Recipe(body={"argv": ["true"]}),
        Recipe(body={"argv": ["true"], "wait": False}),
    ),
    ("GET", _ONE + "/execs"): (Recipe(),),
    ("GET", _EXEC): (Recipe(),),
    ("GET", _EXEC + "/result"): (Recipe(query="?timeout=0"),),
    ("POST", _EXEC + "/signal"): (Recipe(body={"signal": 0}, last=1),),
    ("POST", _EXEC + "/stdin"): (Recipe(raw=b"x"),),
    ("DELETE", _EXEC + "/stdin"): (Recipe(last=1),),
    ("POST", _EXEC + "/resize"): (Recipe(body={"rows": 9, "cols": 9}),),
    ("GET", _EXEC + "/output"): (Recipe(stream=True),),
    ("POST", _ONE + "/pause"): (Recipe(last=2),),
    ("POST", _ONE + "/resume"): (Recipe(last=3),),
    ("POST", _ONE + "/hibernate"): (Recipe(last=4),),
    ("POST", _ONE + "/extend"): (Recipe(body={"ttl": 600}),),
    ("POST", _ONE + "/fork"): (Recipe(body={"count": 1}),),
    ("POST", _ONE + "/rollback"): (Recipe(body={"snapshot": "<snapshot>"}, last=5),),
    ("POST", _ONE + "/snapshots"): (Recipe(body={}),),
    ("GET", _ONE + "/snapshots"): (Recipe(blind=200),),
    ("GET", _ONE + "/metrics"): (Recipe(),),
    ("GET", _ONE + "/events"): (Recipe(),),
    ("GET", _ONE + "/wait"): (Recipe(query="?timeout=0"),),
    ("POST", _ONE + "/token"): (Recipe(body={}),),
    ("GET", _FILES + "/content"): (Recipe(query="?path=/etc/hostname"),),
    ("PUT", _FILES + "/content"): (Recipe(query="?path=/tmp/x", raw=b"x"),),
    ("GET", _FILES + "/stat"): (Recipe(query="?path=/"),),
    ("GET", _FILES + "/list"): (Recipe(query="?path=/"),),
    ("POST", _FILES + "/change"): (Recipe(body={"op": "mkdir", "path": "/tmp/d"}),),
    ("GET", _FILES + "/watch"): (Recipe(query="?path=/tmp", stream=True),),
    ("GET", _ONE + "/tree"): (Recipe(query="?path=/tmp"),),
    ("PUT", _ONE + "/tree"): (Recipe(query="?path=/tmp", raw=b"\0" * 1024, media="application/x-tar"),),
    ("POST", _ONE + "/decisions"): (Recipe(body={"decision": "go"}),),
    ("POST", "/v1/templates"): (_OPEN,),
    ("GET", "/v1/templates"): (_OPEN,),
    ("POST", "/v1/templates/tag"): (Recipe(body={"reference": "<template>", "tag": "other"}),),
    ("POST", "/v1/templates/rollback"): (Recipe(body={"reference": "<template>"}, last=6),),
    ("POST", "/v1/templates/promote"): (Recipe(body={"snapshot": "<snapshot>", "name": "promoted"}),),
    ("GET", "/v1/templates/export"): (Recipe(query="?reference=<template>"),),
    ("POST", "/v1/templates/import"): (_OPEN,),
    ("GET", "/v1/templates/{name}/history"): (Recipe(path="/v1/templates/<template>/history", blind=200),),
    ("GET", "/v1/templates/{reference}"): (Recipe(path="/v1/templates/<template>"),),
    ("DELETE", "/v1/templates/{reference}"): (Recipe(path="/v1/templates/<template>", blind=204, last=7),),
    ("GET", "/v1/snapshots"): (Recipe(query="?sandbox=<sandbox>", blind=200),),
    ("POST", "/v1/snapshots/import"): (_OPEN,),
    ("GET", "/v1/snapshots/{snapshot}"): (Recipe(),),
    ("DELETE", "/v1/snapshots/{snapshot}"): (Recipe(blind=204, last=8),),
    ("GET", "/v1/snapshots/{snapshot}/export"): (Recipe(),),
    ("POST", "/v1/volumes"): (_OPEN,),
    ("GET", "/v1/volumes"): (Recipe(query="?project=<project>", blind=403),),
    ("GET", "/v1/volumes/{name}"): (
        Recipe(path="/v1/volumes/<volume>"),
        Recipe(path="/v1/volumes/<volume>", query="?project=<project>", blind=403),
    ),
    ("DELETE", "/v1/volumes/{name}"): (Recipe(path="/v1/volumes/<volume>", blind=204, last=8),),
    ("GET", "/v1/images"): (_OPEN,),
    ("GET", "/v1/images/{name}"): (_OPEN,),
    ("POST", "/v1/images/get"): (replace(_ADMIN, body={"name": "alpine"}),),
    ("POST", "/v1/images/refresh"): (replace(_ADMIN, body={"name": "alpine"}),),
    ("POST", "/v1/images/verify"): (replace(_ADMIN, body={"name": "alpine"}),),
    ("POST", "/v1/images/collect"): (replace(_ADMIN, body={"budget": 0}),),
    ("DELETE", "/v1/images/{name}"): (replace(_ADMIN, path="/v1/images/alpine"),),
    ("GET", "/v1/pool"): (_OPEN,),
    ("POST", "/v1/pool/warm"): (replace(_ADMIN, body={"template": "<template>", "count": 1}),),
    ("GET", "/v1/problems"): (_OPEN,),
    ("GET", "/metrics"): (_ADMIN,),
    ("POST", "/v1/keys"): (replace(_ADMIN, body={"project": "<project>"}),),
    ("GET", "/v1/keys"): (replace(_ADMIN, query="?project=<project>"),),
    ("DELETE", "/v1/keys/{key}"): (replace(_ADMIN, last=9),),
    ("GET", "/v1/projects"): (_OPEN,),
    ("GET", "/v1/projects/{name}"): (Recipe(path="/v1/projects/<project>"),),
    ("PUT", "/v1/projects/{name}"): (replace(_ADMIN, path="/v1/projects/<project>", body={}),),
    **{
        (method, _PORT): (Recipe(),)
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    },
    ("GET", "/health"): (_OPEN,),
}


def operations() -> tuple[Operation, ...]:
    """Every call in the document."""
    paths = make_app(cast("Gate", object())).openapi()["paths"]
    return tuple((method.upper(), path) for path, calls in paths.items() for method in calls)


def recipes(operation: Operation) -> tuple[Recipe, ...]:
    """Those of a call; a path that is not given is the call's own, with its parameters as kinds."""
    method, path = operation
    own = path.replace("{port}", "8099").replace("{path}", "x").replace("{", "<").replace("}", ">")
    return tuple(replace(each, method=method, path=each.path or own) for each in RECIPES[operation])


@dataclass(frozen=True, slots=True)
class Answer:
    """``body`` and ``headers`` without the names that were asked for, and without what is new each time."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass(slots=True)
class Tenant:
    """A key, and a thing of each kind that is its."""

    key: str
    names: dict[str, str]


@dataclass(slots=True)
class Seen:
    """What was answered: to whom, about what, by recipe."""

    strangers: dict[tuple[str, str], list[tuple[str, Answer, Answer]]] = field(default_factory=dict)
    bare: dict[str, list[Answer]] = field(default_factory=dict)
    owners: dict[str, Answer] = field(default_factory=dict)
    controls: dict[str, int] = field(default_factory=dict)


def _filled(text: str, names: Names) -> str:
    for kind, name in names.items():
        text = text.replace(f"<{kind}>", name)
    return text


class World:
    """A server with two projects."""

    def __init__(self, running: Running, client: aiohttp.ClientSession) -> None:
        self._url = running.url
        self._client = client
        connector = aiohttp.UnixConnector(str(running.socket))
        self._boss = aiohttp.ClientSession(connector=connector)
        self.seen = Seen()

    async def end(self) -> None:
        """Sandboxes would live on."""
        try:
            for each in (await self.make("GET", "/v1/sandboxes", None))["items"]:
                await self.make("DELETE", f"/v1/sandboxes/{each['id']}", None)
        finally:
            await self._boss.close()

    async def make(self, method: str, path: str, key: str | None, body: Any = None) -> Any:
        """What is needed for the matrix. ``key`` None: the server's owner."""
        data = body.encode() if isinstance(body, str) else None if body is None else json.dumps(body)
        headers = {"x-api-key": key} if key else {}
        if not isinstance(body, str):
            headers["content-type"] = "application/json"
        client, base = (self._client, self._url) if key else (self._boss, "http://dsec")
        async with client.request(method, base + path, data=data, headers=headers) as answer:
            text = await answer.text()
            assert answer.status < 300, (method, path, answer.status, text)
            return json.loads(text) if text else None

    async def tenant(self, project: str) -> Tenant:
        made = await self.make("POST", "/v1/keys", None, {"project": project})
        key = made["key"]
        names = {"project": project, "key": made["info"]["id"]}
        names |= await self.sandbox(key)
        one = f"/v1/sandboxes/{names['sandbox']}"
        names["snapshot"] = (await self.make("POST", f"{one}/snapshots", key, {}))["id"]
        names["volume"] = f"volume-{project}"
        await self.make("POST", "/v1/volumes", key, {"name": names["volume"], "size_mib": 64})
        names["template"] = f"template-{project}"
        promote = {"snapshot": names["snapshot"], "name": names["template"]}
        await self.make("POST", "/v1/templates/promote", key, promote)
        return Tenant(key, names)

    async def sandbox(self, key: str) -> dict[str, str]:
        made = await self.make("POST", "/v1/sandboxes", key, {"level": "container"})
        path = f"/v1/sandboxes/{made['id']}/execs"
        body = {"argv": ["sleep", "600"], "wait": False, "stdin_open": True, "pty": {}}
        started = await self.make("POST", path, key, body)
        return {"sandbox": made["id"], "exec": started["id"]}

    async def ask(self, recipe: Recipe, names: Names, key: str | None) -> Answer:
        """``key`` "": none. None: the server's owner."""
        path = _filled(recipe.path + recipe.query, {k: quote(v, safe="") for k, v in names.items()})
        data: Any = None if recipe.body is None else _filled(json.dumps(recipe.body), names)
        headers = {"content-type": "application/json"} if data is not None else {}
        if recipe.raw is not None:
            data, headers = recipe.raw, {"content-type": recipe.media}
        if key:
            headers["x-api-key"] = key
        client, base = (self._boss, "http://dsec") if key is None else (self._client, self._url)
        async with client.request(
            recipe.method, base + path, data=data, headers=headers, allow_redirects=False
        ) as answer:
            body = b"" if recipe.stream and answer.status == 200 else await answer.read()
            kept = [(k.lower(), v) for k, v in answer.headers.items() if k.lower() != "date"]
            # The longest first: one name may hold another.
            for kind, name in sorted(names.items(), key=lambda each: -len(each[1])):
                body = body.replace(name.encode(), f"<{kind}>".encode())
            return Answer(answer.status, tuple(sorted(kept)), body)


def unknown(names: Names) -> dict[str, str]:
    """Names of the same forms and lengths that nothing has."""
    ids = {
        "sandbox": new_sandbox_id,
        "exec": new_exec_id,
        "snapshot": new_snapshot_id,
        "key": new_key_id,
    }
    return {kind: str(ids[kind]()) if kind in ids else name[:-6] + "nobody" for kind, name in names.items()}


def mixes(recipe: Recipe, theirs: Names, own: Names) -> Iterator[tuple[str, Names, Names]]:
    """Names that are somebody else's, and the same that are nobody's: all at once, and one beside what is the asker's own."""
    never = unknown(theirs) | {kind: own[kind] for kind in ("project",) if own.get(kind) == theirs[kind]}
    yield "all", theirs, never
    kinds = recipe.kinds()
    for kind in kinds if len(kinds) > 1 else ():
        if set(kinds) - {kind} <= set(own):
            yield kind, {**own, kind: theirs[kind]}, {**own, kind: never[kind]}


ALL: Final = operations()
_ASKED: Final = tuple(each for op in ALL if op in RECIPES for each in recipes(op))


async def _matrix(home: Path, database: str) -> Seen:
    settings = Settings(
        home=home / "engine", images=home / "store", pool=0, shelf=0, pool_bytes=2**28, database=database
    )
    async with (
        serving(Place(home=home, port=0), settings, shared) as running,
        aiohttp.ClientSession() as client,
    ):
        world = World(running, client)
        try:
            await _ask_all(world)
        finally:
            await world.end()
    return world.seen


async def _ask_all(world: World) -> None:
    victim, stranger = await world.tenant("victim"), await world.tenant("outlaw")
    sibling = await world.sandbox(victim.key)
    token = (await world.make("POST", f"/v1/sandboxes/{sibling['sandbox']}/token", victim.key, {}))["key"]
    gone = await world.make("POST", "/v1/keys", None, {"project": "victim"})
    await world.make("DELETE", f"/v1/keys/{gone['info']['id']}", None)
    sibling["project"] = "victim"  # its own
    askers = (("stranger", stranger.key, stranger.names), ("sibling", token, sibling))
    for recipe in _ASKED:
        bare = [await world.ask(recipe, victim.names, key) for key in ("", gone["key"])]
        world.seen.bare[recipe.said()] = bare
        for who, key, own in () if recipe.open else askers:
            found = world.seen.strangers.setdefault((who, recipe.said()), [])
            for what, theirs, never in mixes(recipe, victim.names, own):
                pair = await world.ask(recipe, theirs, key), await world.ask(recipe, never, key)
                found.append((what, *pair))
    await _controls(world, victim, sibling, token)


async def _controls(world: World, victim: Tenant, sibling: Names, token: str) -> None:
    """Its own sandbox is the token's, and what the stranger could not have is the owner's."""
    for path in ("", "/execs", "/events", "/files/list?path=/"):
        recipe = Recipe(method="GET", path="/v1/sandboxes/<sandbox>" + path)
        world.seen.controls[path] = (await world.ask(recipe, sibling, token)).status
    for recipe in sorted(_ASKED, key=lambda each: each.last):
        if not recipe.open:
            key = None if recipe.admin else victim.key
            world.seen.owners[recipe.said()] = await world.ask(recipe, victim.names, key)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Seen:
    with new_database() as url:
        return asyncio.run(_matrix(tmp_path_factory.mktemp("matrix"), url))


def test_every_call_of_the_document_has_a_recipe_and_every_recipe_a_call() -> None:
    assert set(RECIPES) == set(ALL)


def test_every_name_in_a_path_is_asked_for() -> None:
    for operation in ALL:
        if "{" in operation[1] and not operation[1].startswith("/v1/images"):
            assert all(each.kinds() or each.admin for each in recipes(operation)), operation


def test_what_is_somebody_elses_is_as_what_never_was(seen: Seen) -> None:
    wrong: list[object] = []
    for (who, said), found in seen.strangers.items():
        blind = next(each.blind for each in _ASKED if each.said() == said)
        for what, theirs, never in found:
            allowed = {blind} if (who, what) == ("stranger", "all") else {403, 404, blind}
            # The project of a token is no secret to it, and has nothing for it.
            nothing = who == "sibling" and theirs.body == b'{"items":[],"next":""}'
            if theirs != never or (theirs.status not in allowed and not nothing):
                wrong.append((who, said, what, theirs, never))
    assert not wrong, "\n".join(map(repr, wrong))
    assert len(seen.strangers) == 2 * sum(not each.open for each in _ASKED)


def test_without_a_good_key_nothing_but_health(seen: Seen) -> None:
    assert len(seen.bare) == len(_ASKED)
    for each in _ASKED:
        expected = 200 if each.path == "/health" else 401
        assert {answer.status for answer in seen.bare[each.said()]} == {expected}, each.said()


def test_its_owner_finds_it(seen: Seen) -> None:
    for each in _ASKED:
        if not each.open:
            answer = seen.owners[each.said()]
            # The administrator of the control sees no project's templates.
            refused = (401, 403, 500) if each.admin else (401, 403, 404, 500)
            assert answer.status not in refused, (each.said(), answer)


def test_a_token_is_good_in_its_own_sandbox(seen: Seen) -> None:
    assert set(seen.controls.values()) == {200}, seen.controls
