"""A shared engine over fakes: what makes or wakes sandboxes waits for its turn and counts, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsec.control import turns
from dsec.core.quotas import NOTHING
from dsec.errors import Busy, OverQuota, RuntimeUnavailable
from dsec.model.alerts import Alert
from dsec.model.execs import ExecRequest
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Flag, Level, Limits, SandboxSpec, State
from dsec.model.snapshots import SnapshotKind
from dsec.model.tenants import Quota
from dsec.node.engine import Engine
from dsec.ports.admission import QuotaSource
from dsec.ports.engine import Services
from dsec.testing.fakes import FakeRuntime, NoTrees
from dsec.testing.harness import Harness, until
from dsec.testing.sharing import NoSharing
from dsec.wiring.admission import Reception
from dsec.wiring.settings import Settings

pytestmark = pytest.mark.anyio
SPEC = SandboxSpec(project="p", limits=Limits(memory_mib=64, disk_mib=16))


class Quotas(QuotaSource):
    def __init__(self, quota: Quota) -> None:
        self.now = quota

    def quota(self, project: str) -> Quota:
        return self.now if project == "p" else Quota()


@dataclass
class Shared:
    """One shared engine."""

    harness: Harness
    reception: Reception
    services: Services

    def held(self) -> object:
        return self.reception.accounts.ledger.held("p")

    def settled(self) -> bool:
        ledger = self.reception.accounts.ledger
        return ledger.all() == {} and ledger.reserved("p") == NOTHING


@contextlib.asynccontextmanager
async def shared(
    quota: Quota, settings: Settings | None = None, harness: Harness | None = None
) -> AsyncIterator[Shared]:
    harness = harness or Harness()
    reception = Reception(settings or Settings())
    reception.quotas.source = Quotas(quota)
    async with contextlib.AsyncExitStack() as stack:
        engine = Engine(
            runtimes={Level.CONTAINER: harness.runtime},
            journal=reception.journal(harness.store),
            sandboxes=reception.sandboxes(harness.store),
            snapshots=reception.snapshots(harness.snapshots),
            volumes=reception.volumes(harness.volumes),
            templates=lambda _: harness.templates,
            sharing=lambda _: NoSharing(),
            images=harness.images,
            kept=harness.kept,
            stored=harness.stored,
            trees=NoTrees(),
            durable=harness.durable,
            clock=harness.clock,
            retry=harness.retry,
            admission=reception.turns,
        )
        harness.engine, harness.runtime.on_ended = engine, engine.ended
        await reception.load()
        services = await engine.open()
        stack.push_async_callback(engine.close)
        yield Shared(harness, reception, reception.admit(services, engine, stack))


async def test_quotas_hold_while_many_ask_at_once() -> None:
    async with shared(Quota(sandboxes=7)) as engine:
        made = await asyncio.gather(
            *[engine.services.sandboxes.create(SPEC) for _ in range(40)], return_exceptions=True
        )
        refused = [one for one in made if isinstance(one, BaseException)]
        assert len(refused) == 33
        assert all(isinstance(one, OverQuota) for one in refused)
        living = await engine.services.sandboxes.list()
        assert len(living) == 7
        await asyncio.gather(*[engine.services.sandboxes.destroy(one.id) for one in living])
        assert engine.settled()
        await engine.services.sandboxes.create(SPEC)
        assert engine.services.admission.info().refused == {"sandboxes": 33}


async def test_failures_and_deaths_give_back_what_they_held() -> None:
    async with shared(Quota(sandboxes=1)) as engine:
        engine.harness.runtime.broken = True
        for _ in range(3):
            with pytest.raises(RuntimeUnavailable):
                await engine.services.sandboxes.create(SPEC)
        assert engine.settled()
        engine.harness.runtime.broken = False
        one = await engine.services.sandboxes.create(SPEC)
        await engine.harness.runtime.die(one.id)
        await until(engine.settled)


async def test_who_goes_away_leaves_nothing_counted() -> None:
    async with shared(Quota(sandboxes=3)) as engine:
        for turn in range(12):
            task = asyncio.create_task(engine.services.sandboxes.create(SPEC))
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for one in await engine.services.sandboxes.list((State.RUNNING,)):
                await engine.services.sandboxes.destroy(one.id)
        await until(engine.settled)


async def test_dormant_ones_count_apart_and_waking_takes_its_turn() -> None:
    async with shared(Quota(sandboxes=1, dormant=3)) as engine:
        cold = await engine.services.sandboxes.create_cold(SPEC, 3)
        with pytest.raises(OverQuota):
            await engine.services.sandboxes.create_cold(SPEC, 1)
        admitted = engine.services.admission.info().admitted
        await engine.services.sandboxes.resume(cold[0])
        assert engine.services.admission.info().admitted == admitted + 1
        with pytest.raises(OverQuota) as caught:
            await engine.services.sandboxes.resume(cold[1])
        assert caught.value.facts["quota"] == "sandboxes"
        assert (await engine.services.sandboxes.get(cold[1])).state is State.COLD
        for one in cold:
            await engine.services.sandboxes.destroy(one)
        assert engine.settled()


async def test_what_is_forked_is_awake_before_the_fork_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SLOW_AT_ONCE", 0)
    harness = Harness(runtime=FakeRuntime(flags=frozenset({Flag.SNAPSHOTS})))
    async with shared(Quota(), Settings(creations=1), harness) as engine:
        sandboxes, admission = engine.services.sandboxes, engine.services.admission
        (cold,) = await sandboxes.create_cold(SPEC, 1)
        harness.runtime.stuck = asyncio.Event()
        first = asyncio.create_task(sandboxes.create(SPEC))
        await until(lambda: admission.info().in_progress == 1)
        fork = asyncio.create_task(engine.services.snapshots.fork(cold, 2))
        await until(lambda: admission.info().waiting == 1)
        act = asyncio.create_task(engine.services.execs.run(cold, ExecRequest(argv=(b"true",))))
        for _ in range(50):
            await asyncio.sleep(0)  # it asks for the sandbox to be woken
        harness.runtime.stuck.set()
        await asyncio.wait_for(asyncio.gather(first, fork, act), 3)
        assert len(fork.result().children) == 2
        assert admission.info().admitted == 3, "one for each, and the one that is woken"


async def test_a_fork_over_quota_leaves_its_parent_alone() -> None:
    harness = Harness(runtime=FakeRuntime(flags=frozenset({Flag.SNAPSHOTS})))
    async with shared(Quota(sandboxes=2), None, harness) as engine:
        one = await engine.services.sandboxes.create(SPEC)
        with pytest.raises(OverQuota):
            await engine.services.snapshots.fork(one.id, 2)
        assert (await engine.services.sandboxes.get(one.id)).state is State.RUNNING
        assert len((await engine.services.snapshots.fork(one.id, 1)).children) == 1


async def test_snapshots_take_disk_until_they_are_removed() -> None:
    harness = Harness(runtime=FakeRuntime(flags=frozenset({Flag.SNAPSHOTS})))
    async with shared(Quota(disk_mib=40), None, harness) as engine:
        snapshots, ledger = engine.services.snapshots, engine.reception.accounts.ledger
        one = await engine.services.sandboxes.create(SPEC)
        kept = await snapshots.take(one.id, SnapshotKind.FILES)
        assert ledger.held("p").disk_mib == 2 * SPEC.limits.disk_mib
        with pytest.raises(OverQuota) as caught:
            await snapshots.take(one.id, SnapshotKind.FILES)
        assert caught.value.facts["quota"] == "disk_mib"
        assert list(harness.kept.taken) == [kept.id], "what was copied is gone"
        await asyncio.gather(snapshots.remove(kept.id), snapshots.remove(kept.id))
        await snapshots.take(one.id, SnapshotKind.FILES)
        await engine.services.sandboxes.destroy(one.id)
        assert ledger.held("p").disk_mib == SPEC.limits.disk_mib
        for info in await snapshots.list():
            await snapshots.remove(info.id)
        assert engine.settled()


async def test_beyond_the_queue_creates_are_busy() -> None:
    async with shared(Quota(), Settings(creations=1, creation_queue=0)) as engine:
        found = await asyncio.gather(
            *[engine.services.sandboxes.create(SPEC) for _ in range(5)], return_exceptions=True
        )
        busy = [one for one in found if isinstance(one, Busy)]
        assert len(busy) == 4
        assert all("retry_after" in one.facts for one in busy)
        assert len(await engine.services.sandboxes.list()) == 1


async def test_the_journal_is_bounded_and_ends_are_recorded_all_the_same() -> None:
    async with shared(Quota(journal_mib=1)) as engine:
        one = await engine.services.sandboxes.create(SPEC)
        other = await engine.services.sandboxes.create(SandboxSpec(project="other"))
        big = ExecRequest(argv=(b"true", b"x" * 4000))

        async def write(sandbox: SandboxId) -> None:
            for _ in range(2000):
                await engine.services.execs.run(sandbox, big)

        with pytest.raises(OverQuota) as caught:
            await write(one.id)
        assert caught.value.facts["quota"] == "journal_mib"
        assert (await engine.harness.store.unanswered(one.id)) == ()
        await engine.services.execs.run(other.id, big)
        ledger = engine.reception.accounts.ledger
        assert 2**20 - 10_000 < ledger.held("p").journal <= 2**20 + 1000
        await engine.services.sandboxes.destroy(one.id)
        await engine.services.sandboxes.destroy(other.id)
        assert engine.settled()


async def test_problems_are_told_to_a_command(tmp_path: Path) -> None:
    out = tmp_path / "told"
    alert = Alert(command=("/bin/sh", "-c", f"cat >> {out}"))
    async with shared(Quota(), Settings(alert=alert)) as engine:
        one = await engine.services.sandboxes.create(SPEC)
        engine.harness.runtime.undead.add(one.id)
        with contextlib.suppress(Exception):
            await engine.services.sandboxes.destroy(one.id)
        (problem,) = await engine.services.observe.problems()
        assert (problem.kind, problem.sandbox) == ("cleanup", one.id)
        assert problem.next_try > 0
        assert problem.hint
        async with asyncio.timeout(10):
            while one.id not in await asyncio.to_thread(_text, out):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        engine.harness.runtime.undead.clear()
        await until(lambda: engine.harness.engine.janitor.problems() == ())


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
