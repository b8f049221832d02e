"""`dsec key` and `dsec project`: what is printed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest

from dsec.cli import keys, shapes
from dsec.cli.main import main
from dsec.client.aio import AsyncDsec
from dsec.model.ids import KeyId, SandboxId, new_key_id
from dsec.model.tenants import KeyInfo, NewKey, ProjectInfo, Quota, Scope
from dsec.ports.tenants import NoTenants
from dsec.testing.harness import Harness


class Tenants(NoTenants):
    """Remembers what it is asked."""

    def __init__(self) -> None:
        self.revoked: list[KeyId] = []
        self.asked: list[Any] = []
        self.known = {"default": ProjectInfo(name="default", quota=Quota(sandboxes=7))}

    async def create_key(self, scope: Scope, **facts: Any) -> NewKey:
        self.asked.append((scope, facts))
        return NewKey(key="dsec_secret", info=KeyInfo(id=new_key_id(), scope=scope, project=facts["project"]))

    async def keys(self, project: str = "", *, after: str = "", limit: int = 1000) -> tuple[KeyInfo, ...]:
        return () if after else (KeyInfo(id=new_key_id(), scope=Scope.ADMIN, label="a\x1bb"),)

    async def revoke_key(self, key: KeyId) -> KeyInfo:
        self.revoked.append(key)
        return KeyInfo(id=key, scope=Scope.ADMIN)

    async def token(self, sandbox: SandboxId, *, ttl: float = 0.0) -> NewKey:
        self.asked.append((sandbox, ttl))
        info = KeyInfo(id=new_key_id(), scope=Scope.SANDBOX, sandbox=sandbox)
        return NewKey(key="dst_secret", info=info)

    async def projects(self) -> tuple[ProjectInfo, ...]:
        return tuple(self.known.values())

    async def set_quota(self, name: str, quota: Quota) -> ProjectInfo:
        self.known[name] = ProjectInfo(name=name, quota=quota)
        return self.known[name]


@pytest.fixture
def tenants(monkeypatch: pytest.MonkeyPatch) -> Tenants:
    found = Tenants()

    harness = Harness()

    @asynccontextmanager
    async def durable() -> AsyncIterator[AsyncDsec]:
        async def connect() -> Any:
            return replace(await harness.connect(), tenants=found)

        async with AsyncDsec(connect) as engine:
            yield engine

    monkeypatch.setattr(keys, "durable", durable)
    return found


def test_a_key_is_printed_alone_so_that_it_can_be_kept_in_a_variable(
    tenants: Tenants, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["key", "create", "--project", "acme", "--e2b", "--ttl", "5"])
    out, err = capfd.readouterr()
    assert out == "dsec_secret\n"
    assert "dsec_secret" not in err
    assert "not shown again" in err
    assert tenants.asked == [
        (Scope.DEVELOPER, {"project": "acme", "label": "", "ttl": 5.0, "coinage": "e2b"})
    ]


async def _made() -> SandboxId:
    async with keys.durable() as engine:
        return (await engine.sandboxes.create()).id


def test_a_token_of_a_sandbox_is_printed_alone(tenants: Tenants, capfd: pytest.CaptureFixture[str]) -> None:
    sandbox = asyncio.run(_made())
    with pytest.raises(SystemExit) as left:
        main(["key", "token", sandbox, "--ttl", "5"])
    assert (left.value.code, capfd.readouterr().out) == (0, "dst_secret\n")
    assert tenants.asked == [(sandbox, 5.0)]


def test_a_project_that_is_new_is_told_of(tenants: Tenants, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["project", "set", "reserch", "--rate", "2"])
    assert "reserch" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["project", "set", "reserch", "--rate", "3"])
    assert "reserch" not in capfd.readouterr().err


def test_labels_cannot_write_to_the_terminal(tenants: Tenants, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["key", "ls"])
    assert "\x1b" not in capfd.readouterr().out


def test_what_is_not_named_stays(tenants: Tenants) -> None:
    with pytest.raises(SystemExit):
        main(["project", "set", "default", "--rate", "2.5"])
    assert tenants.known["default"].quota == Quota(sandboxes=7, rate=2.5)


def test_the_key_itself_is_no_id_and_is_not_repeated(
    tenants: Tenants, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["key", "rm", "dsec_secret"])
    assert left.value.code
    assert "dsec_secret" not in "".join(capfd.readouterr())
    assert tenants.revoked == []


def test_documents_have_the_keys_that_are_documented() -> None:
    info = KeyInfo(id=new_key_id(), scope=Scope.ADMIN)
    assert set(keys.key_json(info)) == set(shapes.KEY)
    assert set(asdict(ProjectInfo(name="a"))) == set(shapes.PROJECT)
