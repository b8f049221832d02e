"""What projects hold, exactly, however sandboxes come and go and whatever fails or is cancelled on the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Sequence
from contextvars import Context
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.control.accounts import Accounts
from dsec.control.counted import CountedSandboxes, CountedVolumes
from dsec.core.machine import ENDED
from dsec.core.quotas import DORMANT, NAMES, NOTHING, Holding, Ledger, held, may_be_refused, volume
from dsec.errors import BadRequest, Conflict, OverQuota, StorageFull
from dsec.model.ids import SandboxId, VolumeId, new_sandbox_id
from dsec.model.journal import Draft, Phase
from dsec.model.sandbox import Limits, SandboxInfo, SandboxSpec, State
from dsec.model.tenants import Quota
from dsec.model.volumes import VolumeInfo
from dsec.testing.fakes import MemoryStore
from dsec.testing.volumes import MemoryVolumes

LIMITS = Limits(cpu_millis=100, memory_mib=64, disk_mib=10)


def spec(project: str = "p", limits: Limits = LIMITS) -> SandboxSpec:
    return SandboxSpec(project=project, limits=limits)


def info(project: str = "p", state: State = State.PENDING, limits: Limits = LIMITS) -> SandboxInfo:
    return SandboxInfo(
        id=new_sandbox_id(), state=state, spec=spec(project, limits), flags=frozenset(), created_at=1.0
    )


def note(chain: str) -> Draft:
    return Draft(chain=chain, act="test", phase=Phase.NOTE)


class Shop:
    """Counted records over records in memory."""

    def __init__(self, quota: Quota, store: MemoryStore | None = None) -> None:
        self.quotas = {"p": quota}
        self.ledger = Ledger(lambda project: self.quotas.get(project, Quota()))
        self.accounts = Accounts(self.ledger)
        self.accounts.enforcing = True
        self.store = store or Faltering()
        self.sandboxes = CountedSandboxes(self.store, self.accounts)

    async def add(self, one: SandboxInfo) -> SandboxInfo:
        await self.sandboxes.add(one, note(one.id))
        return one

    async def move(self, sandbox: SandboxId, to: State) -> None:
        seen = (await self.store.get(sandbox)).state
        await self.sandboxes.move(sandbox, seen=seen, to=to, draft=note(sandbox))

    async def recorded(self, project: str = "p") -> Holding:
        """What the records say, by counting all of them."""
        found = NOTHING
        for one in await self.store.list():
            if one.spec.project == project:
                found += held(one.state, one.spec)
        return found


class Faltering(MemoryStore):
    """Records that are slow, and now and then fail, before or after they are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)
        self.falter = False

    async def _pause(self) -> None:
        for _ in range(self.random.randrange(3) if self.falter else 0):
            await asyncio.sleep(0)
        if self.falter and self.random.random() < 0.15:
            raise StorageFull("ordered")

    async def add(self, info: SandboxInfo, draft: Draft) -> None:
        await self._pause()
        await super().add(info, draft)
        if self.falter:
            await asyncio.sleep(0)  # stored, and its caller does not know

    async def move(
        self, sandbox: SandboxId, *, seen: State, to: State, draft: Draft, reason: str = ""
    ) -> SandboxInfo:
        await self._pause()
        moved = await super().move(sandbox, seen=seen, to=to, draft=draft, reason=reason)
        if self.falter:
            await asyncio.sleep(0)
        return moved


# The ledger


def test_every_state_is_known() -> None:
    for state in State:
        one = held(state, spec())
        assert (one == NOTHING) is (state in ENDED)
        assert bool(one.dormant) is (state in DORMANT)
    assert held(State.COLD, spec()).disk_mib == 0
    assert held(State.HIBERNATED, spec()).disk_mib == 10


def test_what_ends_is_never_refused() -> None:
    for seen in State:
        for to in (*ENDED, State.STOPPING):
            assert not may_be_refused(seen, to)
    assert may_be_refused(State.COLD, State.RUNNING)
    assert may_be_refused(State.RUNNING, State.HIBERNATED)
    assert not may_be_refused(State.RUNNING, State.PAUSED)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "journal"])
def test_a_refusal_names_quota_use_and_limit(name: str) -> None:
    ledger = Ledger(lambda _: Quota(**{name: 10}))
    ledger.put("p", Holding(**{name: 7}))
    ledger.check("p", Holding(**{name: 3}))
    with pytest.raises(OverQuota) as caught:
        ledger.check("p", Holding(**{name: 4}))
    assert caught.value.facts == {"quota": name, "used": 7, "limit": 10, "project": "p"}
    assert "7" in caught.value.message
    assert "10" in caught.value.message


def test_the_journal_is_told_in_mib() -> None:
    ledger = Ledger(lambda _: Quota(journal_mib=1))
    ledger.put("p", Holding(journal=2**20))
    with pytest.raises(OverQuota) as caught:
        ledger.check("p", Holding(journal=1))
    assert caught.value.facts == {"quota": "journal_mib", "used": 1, "limit": 1, "project": "p"}


def test_no_quota_is_no_bound_and_a_lowered_one_refuses_only_growth() -> None:
    quotas = [Quota()]
    ledger = Ledger(lambda _: quotas[-1])
    ledger.put("p", Holding(sandboxes=1000))
    ledger.check("p", Holding(sandboxes=1))
    quotas.append(Quota(sandboxes=5))
    ledger.check("p", Holding(sandboxes=-1, dormant=1))
    with pytest.raises(OverQuota):
        ledger.check("p", Holding(sandboxes=1))


changes = st.tuples(
    st.sampled_from(["reserve", "use", "release", "settle", "give"]),
    st.sampled_from("pq"),
    st.integers(0, 5),
    st.integers(0, 30),
)


@given(st.lists(changes, max_size=120), st.integers(0, 12))
def test_reservations_never_leak_and_never_exceed(plan: list[tuple[str, str, int, int]], most: int) -> None:
    ledger = Ledger(lambda _: Quota(sandboxes=most))
    open_, made = [], {"p": 0, "q": 0}
    for act, project, number, which in plan:
        one = Holding(sandboxes=number)
        try:
            if act == "reserve":
                open_.append(ledger.reserve(project, one))
            elif act == "use" and open_:
                open_.append(ledger.use(open_[which % len(open_)], project, one))
            elif act == "release" and open_:
                ledger.release(open_.pop(which % len(open_)))
            elif act == "settle" and open_:
                taken = open_.pop(which % len(open_))
                made[taken.project] += taken.left.sandboxes
                ledger.settle(taken, taken.left)
            elif act == "give" and made[project] >= number:
                made[project] -= number
                ledger.put(project, one * -1)
        except OverQuota:
            pass
        for name in "pq":
            reserved = sum(one.left.sandboxes for one in open_ if one.project == name)
            assert ledger.held(name).sandboxes == made[name]
            assert ledger.reserved(name).sandboxes == reserved
            assert not most or made[name] + reserved <= most


# At the records


@pytest.mark.anyio
async def test_it_is_checked_before_it_is_recorded() -> None:
    shop = Shop(Quota(sandboxes=2))
    one, _ = await shop.add(info()), await shop.add(info())
    late = info()
    with pytest.raises(OverQuota):
        await shop.add(late)
    assert late.id not in {row.id for row in await shop.store.list()}
    await shop.add(info("other"))
    await shop.move(one.id, State.RUNNING)
    await shop.move(one.id, State.STOPPING)
    with pytest.raises(OverQuota):  # it is not gone yet
        await shop.add(late)
    await shop.move(one.id, State.GONE)
    await shop.add(late)


@pytest.mark.anyio
async def test_what_is_hibernated_moves_to_the_other_quota() -> None:
    shop = Shop(Quota(sandboxes=1, dormant=1, memory_mib=64, disk_mib=20))
    one = await shop.add(info())
    await shop.move(one.id, State.RUNNING)
    await shop.move(one.id, State.HIBERNATED)
    assert shop.ledger.held("p") == Holding(dormant=1, disk_mib=10)
    two = await shop.add(info())
    await shop.move(two.id, State.RUNNING)
    with pytest.raises(OverQuota) as caught:
        await shop.move(one.id, State.RUNNING)
    assert caught.value.facts["quota"] == "sandboxes"
    with pytest.raises(OverQuota) as caught:
        await shop.move(two.id, State.HIBERNATED)
    assert caught.value.facts["quota"] == "dormant"
    await shop.move(one.id, State.STOPPING)  # never refused, though nothing of it ran
    assert shop.ledger.held("p").sandboxes == 1
    await shop.move(one.id, State.GONE)
    assert shop.ledger.held("p") == held(State.RUNNING, spec())


@pytest.mark.anyio
async def test_the_dead_hold_nothing_and_can_still_be_destroyed() -> None:
    shop = Shop(Quota(sandboxes=1))
    one = await shop.add(info())
    await shop.move(one.id, State.FAILED)
    assert shop.ledger.held("p") == NOTHING
    await shop.add(info())
    await shop.move(one.id, State.STOPPING)
    await shop.move(one.id, State.GONE)
    assert shop.ledger.held("p").sandboxes == 1


@pytest.mark.anyio
async def test_many_cold_ones_are_all_or_none() -> None:
    shop = Shop(Quota(dormant=10))
    batch = [info(state=State.COLD) for _ in range(7)]
    await shop.sandboxes.add_many(batch, [note(one.id) for one in batch])
    more = [info(state=State.COLD) for _ in range(4)]
    with pytest.raises(OverQuota):
        await shop.sandboxes.add_many(more, [note(one.id) for one in more])
    again = [info(state=State.COLD), batch[0]]
    with pytest.raises(Conflict):
        await shop.sandboxes.add_many(again, [note(one.id) for one in again])
    assert shop.ledger.held("p") == Holding(dormant=7) == await shop.recorded()
    assert shop.ledger.reserved("p") == NOTHING
    with pytest.raises(BadRequest):
        await shop.sandboxes.add_many([info()], [note("x")])
    await shop.sandboxes.add_many([], [])


@pytest.mark.anyio
async def test_what_was_reserved_around_is_used_by_tasks_within() -> None:
    shop = Shop(Quota(sandboxes=3))
    with shop.accounts.reserved("p", held(State.RUNNING, spec()) * 3):
        with pytest.raises(OverQuota):  # all is reserved: nobody else gets in between
            await asyncio.get_running_loop().create_task(shop.add(info()), context=Context())
        await asyncio.gather(*[shop.add(info()) for _ in range(3)])
        with pytest.raises(OverQuota):
            await shop.add(info())
    assert shop.ledger.reserved("p") == NOTHING
    assert shop.ledger.held("p").sandboxes == 3


@pytest.mark.anyio
async def test_a_restart_counts_what_is_recorded() -> None:
    shop = Shop(Quota())
    states = [*State, *State]
    for state in states:
        one = info(state=state)
        await shop.store.add(one, note(one.id))
    cold = info("elsewhere", State.COLD)
    await shop.store.add(cold, note(cold.id))
    again = Shop(Quota(sandboxes=1), shop.store)
    again.accounts.enforcing = False
    await again.sandboxes.load(["elsewhere"])
    assert again.ledger.held("p") == await again.recorded()
    assert again.ledger.held("elsewhere") == Holding(dormant=1)
    running = next(row for row in await again.store.list() if row.state is State.RUNNING)
    await again.move(running.id, State.HIBERNATED)  # what the reconciler finds is so
    again.accounts.enforcing = True
    assert again.ledger.held("p") == await again.recorded()
    with pytest.raises(OverQuota):
        await again.add(info())


@pytest.mark.anyio
async def test_cold_ones_of_a_project_that_nobody_named_are_counted_once() -> None:
    shop = Shop(Quota())
    cold = [info("unnamed", State.COLD) for _ in range(3)]
    await shop.store.add_many(cold, [note(one.id) for one in cold])
    again = Shop(Quota(), shop.store)
    await again.sandboxes.load([])
    await again.move(cold[0].id, State.GONE)
    assert again.ledger.held("unnamed") == NOTHING
    await again.move(cold[1].id, State.RUNNING)
    assert again.ledger.held("unnamed") == await again.recorded("unnamed")
    await again.move(cold[2].id, State.GONE)
    assert again.ledger.held("unnamed") == await again.recorded("unnamed")


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(30))
async def test_any_interleaving_of_failures_and_cancellations_is_exact(seed: int) -> None:
    order = random.Random(seed)
    quota = Quota(sandboxes=6, dormant=4, memory_mib=64 * 5, disk_mib=90)
    store = Faltering()
    store.random = random.Random(seed + 1)
    shop = Shop(quota, store)
    store.falter = True
    await asyncio.gather(*[_life(shop, order) for _ in range(40)])
    await shop.sandboxes.settled()
    store.falter = False
    for row in await shop.store.list([State.STOPPING]):  # until then such a one holds what it held before
        await shop.move(row.id, State.GONE)
    assert shop.ledger.held("p") == await shop.recorded()
    assert shop.ledger.reserved("p") == NOTHING
    assert set(shop.accounts.active) == {
        row.id for row in await shop.store.list() if row.state not in ENDED and row.state not in DORMANT
    }
    for row in await shop.store.list():
        if row.state not in ENDED:
            await shop.move(row.id, State.STOPPING)
            await shop.move(row.id, State.GONE)
    assert shop.ledger.all() == {}


async def _life(shop: Shop, order: random.Random) -> None:
    """One sandbox through random states, each step perhaps cancelled or failing."""
    one = info(state=order.choice([State.PENDING, State.COLD]))
    steps = [
        State.RUNNING,
        State.PAUSED,
        State.RUNNING,
        State.HIBERNATED,
        State.RUNNING,
        State.STOPPING,
        State.GONE,
    ]
    await _perhaps(shop.add(one), order)
    if one.id not in {row.id for row in await shop.store.list()}:
        return
    for to in steps[: order.randrange(len(steps) + 1)]:
        now = (await shop.store.get(one.id)).state
        if now is to or (to is State.GONE and now is not State.STOPPING):
            continue
        if now in DORMANT and to is State.PAUSED:
            continue
        await _perhaps(shop.move(one.id, to), order)
        used = shop.ledger.held("p") + shop.ledger.reserved("p")
        assert used.sandboxes <= 6
        assert used.dormant <= 4
        assert used.memory_mib <= 64 * 5
        assert used.disk_mib <= 90
        assert all(getattr(used, name) >= 0 for name in NAMES)


async def _perhaps(act: Awaitable[object], order: random.Random) -> bool:
    task = asyncio.ensure_future(act)
    if order.random() < 0.3:
        for _ in range(order.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()
    done: Sequence[object] = await asyncio.gather(task, return_exceptions=True)
    expected = (OverQuota, StorageFull, Conflict, asyncio.CancelledError)
    if isinstance(done[0], BaseException):
        assert isinstance(done[0], expected), done[0]
        return False
    return True


@pytest.mark.anyio
async def test_volumes_count_as_disk() -> None:
    shop = Shop(Quota(disk_mib=25))
    volumes = CountedVolumes(MemoryVolumes(shop.store), shop.accounts)
    one = VolumeInfo(id=VolumeId("v-1"), project="p", name="one", size_mib=20, created_at=1.0)
    await volumes.keep(one, note("engine"))
    with pytest.raises(Conflict):
        await volumes.keep(replace(one, size_mib=1), note("engine"))
    with pytest.raises(OverQuota) as caught:
        await shop.add(info())
    assert caught.value.facts["quota"] == "disk_mib"
    again = Shop(Quota(), shop.store)
    await CountedVolumes(volumes, again.accounts).load()
    assert again.ledger.held("p") == volume(one)
    await volumes.forget("p", "one", note("engine"))
    assert shop.ledger.held("p") == NOTHING == shop.ledger.reserved("p")
    await shop.add(info())
