"""A real server, asked whatever follows from its OpenAPI document: no answer is a 5xx, or one that the document does not know.

``DSEC_TEST_FUZZ=200`` asks that much more of each call.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, cast

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis.config import (
    CoveragePhaseConfig,
    GenerationConfig,
    OperationConfig,
    OperationsConfig,
    PhasesConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from schemathesis.filters import FilterSet
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    positive_data_acceptance,
    unsupported_method,
)

from dsec.client.aio import AsyncDsec
from dsec.model.ids import new_exec_id, new_key_id, new_sandbox_id, new_snapshot_id
from dsec.ports.gate import Gate
from dsec.server.app import make_app
from dsec.wiring.servers import server
from dsec.wiring.serving import Place, serving
from dsec.wiring.settings import Settings
from dsec.wiring.tenants import shared

pytestmark = [pytest.mark.needs_root, pytest.mark.slow]

EXAMPLES: Final = int(os.environ.get("DSEC_TEST_FUZZ", "3"))
"""Requests of each call, beside those that try the bounds of each parameter."""
PATIENCE: Final = 60.0  # seconds
NOBODYS: Final = {
    "sandbox": str(new_sandbox_id()),
    "exec": str(new_exec_id()),
    "snapshot": str(new_snapshot_id()),
    "key": str(new_key_id()),
    "name": "nobodys",
    "reference": "nobodys",
}
_SAME_BODY: Final = ["createColdSandboxes", "warmPool"]
"""What is made by hundreds of bodies of ``createSandbox`` is so here."""
_ENDING: Final = (
    *("/pause", "/resume", "/hibernate", "/extend", "/rollback", "/watch", "/export"),
    *("/templates/rollback", "/templates/tag"),
)
"""Calls, and all that remove, that would end what the others are asked about, or last: they are asked about what nobody has."""
_SHADOWED: Final = "/v1/templates/{name}/history"
"""The path is a reference, too, so that it can be removed."""


class Served(threading.Thread):
    """A server of a real engine, in a thread. ``ready``: its URL, and the key of an administrator."""

    def __init__(self, home: Path) -> None:
        super().__init__(name="dsec-fuzzed")
        self._home = home
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self.ready: Future[tuple[str, str]] = Future()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:
                if self.ready.done():
                    raise
                self.ready.set_exception(error)

    async def _serve(self) -> None:
        engine = Settings(
            home=self._home / "engine", images=self._home / "store", pool=0, shelf=0, pool_bytes=2**28
        )
        async with serving(Place(home=self._home, port=0), engine, shared) as running:
            async with AsyncDsec(server(f"unix://{running.socket}", "")) as boss:
                made = await boss.keys.create(scope="admin")
            self.ready.set_result((running.url, made.key))
            await self._ended.wait()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self.join(PATIENCE)


class World:
    """What there is to ask about. ``seen``: how often each status was answered."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.headers["x-api-key"] = key
        self.names: dict[str, str] = {}
        self.seen: dict[int, int] = {}

    def make(self, path: str, body: Any = None, method: str = "POST") -> Any:
        answer = self.session.request(method, self.url + path, json=body, timeout=PATIENCE)
        assert answer.ok, (path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def furnish(self) -> None:
        one = self.make("/v1/sandboxes", {"level": "container"})["id"]
        run = self.make(f"/v1/sandboxes/{one}/execs", {"argv": ["echo", "hi"], "wait": False})["id"]
        self.make(f"/v1/sandboxes/{one}/execs/{run}/result", method="GET")
        snapshot = self.make(f"/v1/sandboxes/{one}/snapshots", {})["id"]
        self.make("/v1/volumes", {"name": "things", "size_mib": 64})
        self.make("/v1/templates/promote", {"snapshot": snapshot, "name": "things"})
        self.make("/v1/projects/things", {}, "PUT")
        self.names = {
            "sandbox": one,
            "exec": run,
            "snapshot": snapshot,
            "name": "things",
            "reference": "things",
        }

    def aim(self, case: Any) -> None:
        """Let it be about something that there is, unless that would end it; and let nothing wait, or make hundreds."""
        ends = case.method == "DELETE" or case.path.endswith(_ENDING)
        for name in case.path_parameters or {}:
            known = NOBODYS if ends else self.names
            if name in known:
                case.path_parameters[name] = known[name]
        if case.path.endswith(("/wait", "/result")):
            waits = _number((case.query or {}).get("timeout", 30))
            if waits is not None and 0 <= waits <= 600:
                case.query = {**(case.query or {}), "timeout": 0.01}
        count = case.body.get("count") if isinstance(case.body, dict) else None
        if isinstance(count, int) and 2 < count <= 1000:
            case.body["count"] = 2

    def clear(self) -> None:
        """Destroy what requests have made."""
        cursor = ""
        while True:
            page = self.make(f"/v1/sandboxes?cursor={cursor}", method="GET")
            for each in page["items"]:
                if each["id"] != self.names.get("sandbox"):
                    self.make(f"/v1/sandboxes/{each['id']}", method="DELETE")
            cursor = page["next"]
            if not cursor:
                return

    def end(self) -> None:
        self.names = {}
        self.clear()
        self.session.close()


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _config() -> SchemathesisConfig:
    same = OperationConfig(
        filter_set=FilterSet().with_include(operation_id=_SAME_BODY),
        phases=PhasesConfig(coverage=CoveragePhaseConfig(enabled=False)),
    )
    project = ProjectConfig(
        max_stream_events=2,
        request_timeout=PATIENCE,
        generation=GenerationConfig(with_security_parameters=False, allow_x00=True),
        operations=OperationsConfig(operations=[same]),
    )
    return SchemathesisConfig(seed=7, projects=ProjectsConfig(default=project))


schemathesis.openapi.media_type("application/x-tar", st.binary(max_size=2048))
document: Final = schemathesis.openapi.from_dict(make_app(cast("Gate", object())).openapi(), config=_config())


def _methods(path: str) -> set[str]:
    """All that the document knows of a path."""
    return {each.upper() for each in document.raw_schema["paths"][path]}


@pytest.fixture(autouse=True)
def _test_leaves_nothing() -> None:
    """One world for all of them: the census of the module counts."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("f")
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def alone(host: Any, *rest: Any, **more: Any) -> Any:
        """Names of images may be those of other machines: nobody is to be asked by chance."""
        if host not in ("127.0.0.1", "localhost", None):
            asked.append(str(host))
            raise socket.gaierror(socket.EAI_NONAME, "there are no other machines here")
        return resolve(host, *rest, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", alone)
        thread = Served(home)
        thread.start()
        made = World(*thread.ready.result(PATIENCE))
        try:
            made.furnish()
            yield made
        finally:
            try:
                made.end()
            finally:
                thread.end()


@document.parametrize()
@settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_that_the_document_knows(case: Any, world: World) -> None:
    world.aim(case)
    answer = case.call(base_url=world.url, session=world.session)
    world.seen[answer.status_code] = world.seen.get(answer.status_code, 0) + 1
    # What JSON Schema cannot say (names, pairs of fields) is told by a 400; and `/v1/templates/tag` is a reference, too.
    unasked = [positive_data_acceptance, allow_header_conformance]
    if case.path == _SHADOWED:
        unasked.append(unsupported_method)
    given = {"session": world.session, "base_url": world.url}
    case.validate_response(
        answer, excluded_checks=unasked, headers=dict(world.session.headers), transport_kwargs=given
    )
    if answer.status_code == 405:
        assert _methods(case.path) <= set(answer.headers["allow"][0].split(", "))
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        assert {"code", "message", "hint", "retryable", "facts"} == set(answer.json()["error"])
    if answer.status_code in (200, 201) and case.path.endswith(("/sandboxes", "/batch", "/fork")):
        world.clear()


def test_what_was_asked_was_also_done(world: World) -> None:
    assert world.seen[200] > 100
    assert world.seen[201] > 5
    assert not {status for status in world.seen if status in (401, 403, 500, 502, 503)}
