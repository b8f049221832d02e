"""Keys: who is let in, who is not, and what the journal says of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec.control.coins import digest_of, is_key, new_key, new_token
from dsec.control.gate import TenantGate
from dsec.control.keys import LOOKUPS, MOST_ASKING, Keyring
from dsec.control.rates import Rates
from dsec.control.refusals import Refusals
from dsec.control.tenants import Tenants, begun, was_used
from dsec.errors import BadRequest, Busy, NotFound, SandboxFailed, StorageFull, Unauthenticated
from dsec.model.actors import acting
from dsec.model.ids import SandboxId, new_key_id, new_sandbox_id
from dsec.model.journal import Phase
from dsec.model.sandbox import SandboxInfo, SandboxSpec, State
from dsec.model.tenants import Coinage, KeyInfo, Quota, Scope
from dsec.ports.engine import Services
from dsec.stores.control.store import ControlStore, open_control
from dsec.testing.fakes import MemoryStore
from dsec.testing.idempotency import FakeIdempotency

pytestmark = pytest.mark.anyio


class House:
    """Keys over a real control database, and hands on everything that changes by itself."""

    def __init__(self, store: ControlStore, journal: MemoryStore) -> None:
        self.now = 1000.0
        self.sandboxes: dict[SandboxId, State] = {}
        self.store = store
        self.journal = journal
        self.asked = 0
        self.refusals = Refusals(journal, lambda: self.now)
        self.ring = Keyring(store, self.look, self.refusals, clock=lambda: self.now)
        self.tenants = Tenants(store, journal, self.ring, self.look, clock=lambda: self.now)
        self.gate = TenantGate(
            self.ring, Rates(lambda: self.now), self.tenants, self.scoped, FakeIdempotency()
        )
        find = store.find

        async def counted(digest: bytes) -> KeyInfo | None:
            self.asked += 1
            return await find(digest)

        store.find = counted  # type: ignore[method-assign]

    async def look(self, sandbox: SandboxId) -> SandboxInfo:
        if sandbox not in self.sandboxes:
            raise NotFound("no")
        spec = SandboxSpec(project="acme")
        return SandboxInfo(
            id=sandbox, state=self.sandboxes[sandbox], spec=spec, flags=frozenset(), created_at=0.0
        )

    def scoped(self, principal: object) -> Services:
        return object()  # type: ignore[return-value]

    async def acts(self) -> list[tuple[str, str, str]]:
        return [(r.act, r.phase.value, r.actor) for r in await self.journal.read("engine")]


@asynccontextmanager
async def house_in(path: Path, journal: MemoryStore) -> AsyncIterator[House]:
    async def used() -> bool:
        return await was_used(journal)

    store = await open_control(path, was_used=used)
    house = House(store, journal)
    await house.tenants.open()
    try:
        yield house
    finally:
        await store.close()


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with house_in(tmp_path, MemoryStore()) as found:
        yield found


def test_keys_are_long_random_and_told_by_their_form() -> None:
    made = [new_key(Coinage.DSEC), new_key(Coinage.E2B), new_token()]
    assert [each.partition("_")[0] for each in made] == ["dsec", "e2b", "dst"]
    assert [len(each) for each in made] == [48, 44, 47]
    assert all(map(is_key, made))
    assert not any(map(is_key, ["", "dsec_", made[0] + "x", made[0][:-1] + "é", made[1].upper()]))
    assert len({new_key(Coinage.DSEC) for _ in range(100)}) == 100
    assert len(digest_of(made[0])) == 32


async def test_whoever_is_in_is_looked_at_again(house: House) -> None:
    """Revoked, expired, its sandbox ended, or nobody knows it any more; and whether or not it is remembered."""
    sandbox = new_sandbox_id()
    house.sandboxes[sandbox] = State.RUNNING
    revoked = await house.tenants.create_key(Scope.DEVELOPER, project="acme")
    expired = await house.tenants.create_key(Scope.DEVELOPER, project="acme", ttl=60)
    token = await house.tenants.token(sandbox)
    keys = (revoked, expired, token)
    here = [await house.gate.principal(each.key) for each in keys]
    asked = house.asked
    for principal in here:
        await house.gate.check(principal)
    assert house.asked == asked, "what is remembered is not looked up"
    for each in keys:
        house.ring.forget(each.info.id)
    for principal in here:
        await house.gate.check(principal)
    for each in keys:
        await house.gate.principal(each.key)
    await house.tenants.revoke_key(revoked.info.id)
    house.now += 61
    house.sandboxes[sandbox] = State.STOPPING
    for principal, why in zip(here, ("revoked", "expired", "ended"), strict=True):
        with pytest.raises(Unauthenticated, match=why):
            await house.gate.check(principal)
    stranger = replace(here[0], id=new_key_id())
    with pytest.raises(Unauthenticated, match="not good any more"):
        await house.gate.check(stranger)


async def test_a_key_lets_in_until_it_is_revoked(house: House) -> None:
    with acting("ky-boss"):
        made = await house.tenants.create_key(Scope.DEVELOPER, project="acme", label="ci")
    principal = await house.gate.principal(made.key)
    assert (principal.id, principal.scope, principal.project) == (made.info.id, Scope.DEVELOPER, "acme")
    assert await house.gate.principal(made.key) is principal
    assert house.asked == 1, "what was asked once is remembered"
    with acting("ky-boss"):
        await house.tenants.revoke_key(made.info.id)
        await house.tenants.revoke_key(made.info.id)
    with pytest.raises(Unauthenticated, match="revoked"):
        await house.gate.principal(made.key)
    assert ("key.create", "intent", "ky-boss") in await house.acts()
    assert ("key.revoke", "result", "ky-boss") in await house.acts()
    assert [p.name for p in await house.tenants.projects()] == ["acme", "default"]
    listed = await house.tenants.keys("acme")
    assert [each.id for each in listed] == [made.info.id]
    assert made.key not in repr(made)
    assert made.key not in repr(await house.journal.read("engine"))


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


async def test_a_key_is_nowhere_on_the_disk(house: House, tmp_path: Path) -> None:
    made = await house.tenants.create_key(Scope.ADMIN, project="default")
    kept = b"".join(path.read_bytes() for path in files(tmp_path))
    assert made.key.encode() not in kept
    assert digest_of(made.key) in kept


async def test_who_tries_keys_keeps_few_questions_waiting(house: House) -> None:
    made = await house.tenants.create_key(Scope.DEVELOPER, project="acme")
    known = await house.gate.principal(made.key)
    find, held, most, now = house.store.find, anyio.Event(), 0, 0

    async def slow(digest: bytes) -> KeyInfo | None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await held.wait()
        now -= 1
        return await find(digest)

    house.store.find = slow  # type: ignore[method-assign]
    refused: list[str] = []

    async def one() -> None:
        try:
            await house.gate.principal(new_key(Coinage.DSEC))
        except (Busy, Unauthenticated) as error:
            refused.append(error.code)

    async with anyio.create_task_group() as group:
        for _ in range(MOST_ASKING + 10):
            group.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        assert refused == ["busy"] * 10
        assert await house.gate.principal(made.key) is known, "who is known is let in meanwhile"
        held.set()
    assert (most, refused.count("unauthenticated")) == (LOOKUPS, MOST_ASKING)


async def test_a_revocation_wins_over_whoever_is_looking_the_key_up(house: House) -> None:
    made = await house.tenants.create_key(Scope.DEVELOPER, project="acme")
    find, held = house.store.find, anyio.Event()
    reached = anyio.Event()

    async def slow(digest: bytes) -> KeyInfo | None:
        found = await find(digest)
        reached.set()
        await held.wait()
        return found

    house.store.find = slow  # type: ignore[method-assign]
    said: list[object] = []

    async def ask() -> None:
        try:
            said.append(await house.gate.principal(made.key))
        except Unauthenticated as error:
            said.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await reached.wait()
        await house.tenants.revoke_key(made.info.id)
        held.set()
    assert isinstance(said[0], Unauthenticated)
    with pytest.raises(Unauthenticated):
        await house.gate.principal(made.key)


async def test_whoever_revokes_and_vanishes_has_revoked(house: House) -> None:
    made = await house.tenants.create_key(Scope.DEVELOPER, project="acme")
    await house.gate.principal(made.key)
    with anyio.move_on_after(0):
        await house.tenants.revoke_key(made.info.id)
    await house.tenants.revoke_key(made.info.id)
    with pytest.raises(Unauthenticated):
        await house.gate.principal(made.key)


async def test_a_key_expires(house: House) -> None:
    made = await house.tenants.create_key(Scope.DEVELOPER, project="acme", ttl=10)
    await house.gate.principal(made.key)
    house.now += 10
    with pytest.raises(Unauthenticated, match="expired"):
        await house.gate.principal(made.key)


@pytest.mark.parametrize("end", [State.GONE, State.FAILED, State.LOST, State.STOPPING, None])
async def test_a_token_ends_with_its_sandbox(house: House, end: State | None) -> None:
    sandbox = new_sandbox_id()
    house.sandboxes[sandbox] = State.RUNNING
    made = await house.tenants.token(sandbox)
    principal = await house.gate.principal(made.key)
    assert (principal.scope, principal.sandbox, principal.project) == (Scope.SANDBOX, sandbox, "acme")
    house.sandboxes[sandbox] = State.HIBERNATED
    await house.gate.principal(made.key)
    if end is None:
        del house.sandboxes[sandbox]
    else:
        house.sandboxes[sandbox] = end
    with pytest.raises(Unauthenticated, match="ended"):
        await house.gate.principal(made.key)
    with pytest.raises((SandboxFailed, NotFound)):
        await house.tenants.token(sandbox)
    await house.ring.sweep()
    with pytest.raises(Unauthenticated, match="not good"):
        await house.gate.principal(made.key)
    assert (await house.journal.read(sandbox))[0].act == "key.token"


async def test_a_sweep_leaves_tokens_of_the_living(house: House) -> None:
    sandbox = new_sandbox_id()
    house.sandboxes[sandbox] = State.COLD
    made = await house.tenants.token(sandbox)
    await house.ring.sweep()
    await house.gate.principal(made.key)


async def test_refusals_are_counted_and_told_once_a_minute(house: House) -> None:
    for key in ("", "dsec_short", new_key(Coinage.DSEC), new_token()) * 50:
        with pytest.raises(Unauthenticated):
            await house.gate.principal(key)
    await house.refusals.tell()
    await house.refusals.tell()
    with pytest.raises(Unauthenticated):
        await house.gate.principal("x")
    await house.refusals.tell()
    assert house.refusals.counts == {"form": 101, "unknown": 100}
    told = [r for r in await house.journal.read("engine") if r.act == "key.refused"]
    assert [r.payload["count"] for r in told] == [200]
    house.now += 60
    await house.refusals.tell()
    told = [r for r in await house.journal.read("engine") if r.act == "key.refused"]
    assert [r.payload["count"] for r in told] == [200, 1]


async def test_uses_are_written_once_a_minute(house: House) -> None:
    made = await house.tenants.create_key(Scope.DEVELOPER, project="acme")
    await house.gate.principal(made.key)
    await house.ring.write()
    house.now += 30
    await house.gate.principal(made.key)
    await house.ring.write()
    assert (await house.tenants.keys())[0].used_at == 1000.0
    house.now += 30
    await house.gate.principal(made.key)
    await house.ring.write()
    assert (await house.tenants.keys())[0].used_at == 1060.0


async def test_uses_that_could_not_be_written_are_written_later(house: House) -> None:
    made = await house.tenants.create_key(Scope.DEVELOPER, project="acme")
    await house.gate.principal(made.key)
    write = house.store.used

    async def full(used: Any) -> frozenset[Any]:
        raise StorageFull("full")

    house.store.used = full  # type: ignore[method-assign]
    with pytest.raises(StorageFull):
        await house.ring.write()
    house.store.used = write  # type: ignore[method-assign]
    await house.ring.write()
    assert (await house.tenants.keys())[0].used_at == 1000.0


async def test_a_project_asks_as_often_as_it_may_and_others_do_not_suffer(house: House) -> None:
    await house.tenants.set_quota("slow", Quota(rate=0.5))
    slow = await house.tenants.create_key(Scope.DEVELOPER, project="slow")
    other = await house.tenants.create_key(Scope.DEVELOPER, project="other")
    boss = await house.tenants.create_key(Scope.ADMIN, project="slow")
    await house.gate.principal(slow.key)
    with pytest.raises(Busy) as caught:
        await house.gate.principal(slow.key)
    assert caught.value.facts["retry_after"] == 2.0
    for _ in range(50):
        await house.gate.principal(other.key)
        await house.gate.principal(boss.key)
    house.now += 2
    await house.gate.principal(slow.key)
    await house.tenants.set_quota("slow", Quota())
    for _ in range(50):
        await house.gate.principal(slow.key)


def test_a_burst_is_two_seconds_worth() -> None:
    now = 0.0
    rates = Rates(lambda: now)
    for _ in range(20):
        rates.take("p", 10.0)
    with pytest.raises(Busy):
        rates.take("p", 10.0)
    now = 0.5
    for _ in range(5):
        rates.take("p", 10.0)
    with pytest.raises(Busy):
        rates.take("p", 10.0)


async def test_quotas_are_known_at_once_and_again_after_a_start(house: House, tmp_path: Path) -> None:
    assert house.tenants.quota("acme") == Quota()
    await house.tenants.set_quota("acme", Quota(sandboxes=3))
    assert house.tenants.quota("acme").sandboxes == 3
    await house.store.close()
    async with house_in(tmp_path, house.journal) as again:
        assert again.tenants.quota("acme").sandboxes == 3
        with pytest.raises(NotFound):
            await again.tenants.project("nobody")


async def test_what_an_engine_that_died_had_begun_is_settled(house: House, tmp_path: Path) -> None:
    made = await house.tenants.create_key(Scope.DEVELOPER, project="acme")
    say = house.tenants._say

    async def dies(act: str, phase: Phase, *more: Any) -> None:
        if phase is Phase.RESULT:
            raise SystemExit
        await say(act, phase, *more)

    house.tenants._say = dies  # type: ignore[method-assign]
    key = KeyInfo(id=new_key_id(), scope=Scope.ADMIN)
    await say("key.create", Phase.INTENT, key.id, {})
    await house.store.add(key, b"k" * 32)
    await house.store.close()
    async with house_in(tmp_path, house.journal) as again:
        found = {each.id: each for each in await again.tenants.keys()}
        assert found[key.id].revoked_at
        assert not found[made.info.id].revoked_at
        assert await again.journal.unanswered("engine") == ()
        await again.gate.principal(made.key)


async def test_a_lost_database_is_refused_until_somebody_begins_anew(house: House, tmp_path: Path) -> None:
    assert not await was_used(house.journal)
    await house.tenants.create_key(Scope.ADMIN, project="default")
    assert await was_used(house.journal)
    await house.journal.append(begun())
    assert not await was_used(house.journal)
    await house.tenants.set_quota("a", Quota())
    assert await was_used(house.journal)


async def test_wrong_values_are_refused(house: House) -> None:
    tenants = house.tenants
    for wrong in (
        lambda: tenants.create_key(Scope.SANDBOX, project="a"),
        lambda: tenants.create_key(Scope.ADMIN, project="../x"),
        lambda: tenants.create_key(Scope.ADMIN, project="a", label="x" * 257),
        lambda: tenants.create_key(Scope.ADMIN, project="a", ttl=float("nan")),
        lambda: tenants.revoke_key("dsec_secret"),  # type: ignore[arg-type]
        lambda: tenants.set_quota("A", Quota()),
    ):
        with pytest.raises(BadRequest) as caught:
            await wrong()
        assert "secret" not in str(caught.value)
    with pytest.raises(NotFound):
        await tenants.revoke_key(new_key_id())
    for facts in ({"sandboxes": -1}, {"rate": float("inf")}, {"rate": True}, {"share": 0}):
        with pytest.raises(BadRequest):
            Quota(**facts)  # type: ignore[arg-type]
