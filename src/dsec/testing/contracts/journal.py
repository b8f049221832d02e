"""What every journal and table of sandboxes must do.

A back-end's test class inherits these and brings a fixture ``store``: open, empty, and closed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.lowlevel
import pytest

from dsec.errors import BadRequest, Conflict, NotFound, TooLarge
from dsec.model.ids import SandboxId, new_sandbox_id
from dsec.model.journal import Draft, Phase
from dsec.model.paging import PAGE
from dsec.model.sandbox import Flag, Level, Limits, SandboxInfo, SandboxSpec, State, Volume
from dsec.ports.journal import Journal, Sandboxes

pytestmark = pytest.mark.anyio


def note(chain: str = "engine", **payload: str | int) -> Draft:
    """A draft that stands alone."""
    return Draft(chain=chain, act="test.note", phase=Phase.NOTE, payload=payload)


def sandbox(*, state: State = State.PENDING, created_at: float = 1000.0) -> SandboxInfo:
    """A sandbox with every field set to something that is not its default."""
    spec = SandboxSpec(
        level=Level.PROCESS,
        base="other",
        limits=Limits(cpu_millis=500, memory_mib=64, pids=9, disk_mib=7, open_files=99, output_bytes=5),
        ttl=1.5,
        idle=2.5,
        read_only=True,
        env=MappingProxyType({"A": "é\n", "B": "\udcff"}),
        volumes=(Volume(Path("/srv/\udcfe"), "/data", read_only=True),),
        labels=MappingProxyType({"team": "x"}),
    )
    return SandboxInfo(
        id=new_sandbox_id(),
        state=state,
        spec=spec,
        flags=frozenset({Flag.PTY, Flag.VOLUMES}),
        created_at=created_at,
        expires_at=2000.25,
        reason="because",
        session_id="se-1",
        workdir="/tmp/\udcff",
        boot_id="b-1",
        created_boot=12.5,
    )


def act(phase: Phase, ref: str, *, name: str = "exec", chain: str = "engine") -> Draft:
    """A draft of an act that has two ends."""
    return Draft(chain=chain, act=name, phase=phase, ref=ref)


class JournalContract:
    """Of :class:`~dsec.ports.journal.Journal`."""

    async def test_records_come_back_in_order_and_whole(self, store: Journal) -> None:
        first = await store.append(note(n=1, text="é \udcff"), note("other", n=2))
        second = await store.append(note(n=3))
        found = await store.read("engine")
        assert [(one.seq, one.at, one.digest) for one in found] == [first[0], second[0]]
        assert [(one.chain, one.act, one.phase) for one in found] == [("engine", "test.note", Phase.NOTE)] * 2
        assert [record.seq for record in found] == [1, 2]
        assert found[0].payload == {"n": 1, "text": "é \udcff"}
        assert found[0].digest != found[1].digest
        assert (await store.read("other"))[0].seq == 1

    async def test_reading_goes_on_after_a_record_and_stops_at_the_limit(self, store: Journal) -> None:
        await store.append(*(note(n=n) for n in range(5)))
        assert [record.seq for record in await store.read("engine", after=2, limit=2)] == [3, 4]
        assert await store.read("engine", after=5) == ()
        assert await store.read("nobody") == ()

    async def test_the_latest_of_an_act_come_newest_first(self, store: Journal) -> None:
        await store.append(*(act(Phase.INTENT, f"r{n}", name=f"act{n % 2}") for n in range(6)), note())
        assert [record.ref for record in await store.latest("engine", "act1")] == ["r5", "r3", "r1"]
        assert [record.seq for record in await store.latest("engine", "act0", limit=2)] == [5, 3]
        assert await store.latest("engine", "act2") == ()
        assert await store.latest("other", "act1") == ()

    async def test_the_latest_of_a_reference_are_its_own(self, store: Journal) -> None:
        await store.append(act(Phase.INTENT, "a"), act(Phase.INTENT, "b"), act(Phase.RESULT, "a"))
        await store.append(act(Phase.INTENT, "a", name="other"), act(Phase.INTENT, "a", chain="other"))
        found = await store.latest("engine", "exec", ref="a", limit=2)
        assert [(record.seq, record.phase) for record in found] == [(3, Phase.RESULT), (1, Phase.INTENT)]
        assert await store.latest("engine", "exec", ref="c") == ()

    async def test_what_is_unanswered(self, store: Journal) -> None:
        await store.append(act(Phase.INTENT, "a"), act(Phase.INTENT, "b"), act(Phase.INTENT, ""))
        await store.append(act(Phase.INTENT, "a", name="other"), act(Phase.INTENT, "a", chain="other"))
        await store.append(act(Phase.NOTE, "b"), act(Phase.RESULT, "a"), act(Phase.RESULT, "c"))
        found = await store.unanswered("engine")
        assert [(record.act, record.ref) for record in found] == [("exec", "b"), ("other", "a")]
        await store.append(act(Phase.RESULT, "b"), act(Phase.RESULT, "a", name="other"))
        assert await store.unanswered("engine") == ()
        assert len(await store.unanswered("other")) == 1

    async def test_all_or_none(self, store: Journal) -> None:
        with pytest.raises(TooLarge):
            await store.append(note(n=1), note(text="x" * 70_000))
        assert await store.read("engine") == ()

    @pytest.mark.parametrize("chain", ["", "a b", "a\n", "é", "x" * 129])
    async def test_a_chain_name_that_is_none_is_refused(self, store: Journal, chain: str) -> None:
        with pytest.raises(BadRequest):
            await store.append(note(chain))

    async def test_what_is_not_json_is_refused(self, store: Journal) -> None:
        with pytest.raises(BadRequest):
            await store.append(Draft(chain="engine", act="a", phase=Phase.NOTE, payload={"n": float("nan")}))
        with pytest.raises(BadRequest):
            await store.append(Draft(chain="engine", act="a\udcff", phase=Phase.NOTE))

    async def test_many_at_once_keep_one_order(self, store: Journal) -> None:
        async def add(worker: int) -> None:
            for n in range(20):
                await store.append(note(worker=worker, n=n))

        async with anyio.create_task_group() as group:
            for worker in range(10):
                group.start_soon(add, worker)
        records = await store.read("engine")
        assert [record.seq for record in records] == list(range(1, 201))
        for worker in range(10):
            own = [record.payload["n"] for record in records if record.payload["worker"] == worker]
            assert own == list(range(20))
        assert await store.verify() == ()

    async def test_a_cancelled_append_is_stored_or_not(self, store: Journal) -> None:
        for n in range(20):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(store.append, note(n=n, part="a"), note(n=n, part="b"))
                    await anyio.lowlevel.checkpoint()
                    scope.cancel()
        await store.append(note(n=-1, part="end"))
        parts = [record.payload["part"] for record in await store.read("engine")]
        assert parts == ["a", "b"] * (len(parts) // 2) + ["end"]
        assert await store.verify() == ()

    async def test_the_tail_gives_every_record_of_every_chain_once_in_order(self, store: Journal) -> None:
        await store.append(note(n=1), note("other", n=2))
        await store.append(note("third", n=3), note(n=4))
        found = await store.tail(0)
        assert [record.payload["n"] for _, record in found] == [1, 2, 3, 4]
        assert [record.chain for _, record in found] == ["engine", "other", "third", "engine"]
        positions = [position for position, _ in found]
        assert positions == sorted(set(positions))
        await store.append(note("other", n=5))
        assert [record.payload["n"] for _, record in await store.tail(positions[-1])] == [5]
        assert [record.payload["n"] for _, record in await store.tail(positions[0], 2)] == [2, 3]
        assert [record for _, record in found if record.chain == "third"] == list(await store.read("third"))


def cold_state() -> State:
    """Of one that costs nothing, by its value."""
    return State("cold")


class SandboxesContract:
    """Of :class:`~dsec.ports.journal.Sandboxes`; ``store`` is also a journal."""

    async def test_what_was_added_comes_back_whole(self, store: Sandboxes) -> None:
        info = sandbox()
        await store.add(info, note(info.id))
        assert await store.get(info.id) == info
        assert await store.list() == (info,)

    async def test_an_id_is_used_once_and_a_refusal_leaves_no_record(self, store: Sandboxes) -> None:
        info = sandbox()
        await store.add(info, note(info.id))
        with pytest.raises(Conflict):
            await store.add(replace(info, reason="again"), note(info.id))
        assert (await store.get(info.id)).reason == "because"
        assert isinstance(store, Journal)
        assert len(await store.read(info.id)) == 1

    async def test_move_compares_and_sets_with_its_record(self, store: Sandboxes) -> None:
        info = sandbox()
        await store.add(info, note(info.id))
        moved = await store.move(
            info.id, seen=State.PENDING, to=State.RUNNING, draft=note(info.id, to="running")
        )
        assert moved == replace(info, state=State.RUNNING)
        with pytest.raises(Conflict):
            await store.move(info.id, seen=State.PENDING, to=State.GONE, draft=note(info.id))
        assert await store.get(info.id) == moved
        assert isinstance(store, Journal)
        assert [record.payload for record in await store.read(info.id)] == [{}, {"to": "running"}]

    async def test_of_many_movers_one_wins(self, store: Sandboxes) -> None:
        info = sandbox()
        await store.add(info, note(info.id))
        outcomes: list[str] = []

        async def move(n: int) -> None:
            try:
                await store.move(info.id, seen=State.PENDING, to=State.RUNNING, draft=note(info.id, n=n))
            except Conflict:
                outcomes.append("conflict")
            else:
                outcomes.append("moved")

        async with anyio.create_task_group() as group:
            for n in range(20):
                group.start_soon(move, n)
        assert sorted(outcomes) == ["conflict"] * 19 + ["moved"]
        assert isinstance(store, Journal)
        assert len(await store.read(info.id)) == 2

    async def test_the_end_has_a_time_and_a_reason_and_both_stay(self, store: Sandboxes) -> None:
        info = sandbox(state=State.RUNNING)
        await store.add(info, note(info.id))
        failed = await store.move(
            info.id, seen=State.RUNNING, to=State.FAILED, draft=note(info.id), reason="init died \udcff"
        )
        assert failed.ended_at > 0
        assert failed.reason.startswith("init died")
        gone = await store.move(info.id, seen=State.FAILED, to=State.GONE, draft=note(info.id))
        assert (gone.ended_at, gone.reason) == (failed.ended_at, failed.reason)
        assert await store.get(info.id) == gone

    async def test_expiry_moves(self, store: Sandboxes) -> None:
        info = sandbox()
        await store.add(info, note(info.id))
        assert (await store.expire_at(info.id, 0.0, note(info.id))).expires_at == 0.0
        assert (await store.get(info.id)).expires_at == 0.0
        with pytest.raises(BadRequest):
            await store.expire_at(info.id, float("inf"), note(info.id))

    async def test_strangers_are_not_found(self, store: Sandboxes) -> None:
        stranger = SandboxId("sb-" + "a" * 26)
        with pytest.raises(NotFound):
            await store.get(stranger)
        with pytest.raises(NotFound):
            await store.move(stranger, seen=State.PENDING, to=State.GONE, draft=note(stranger))
        with pytest.raises(NotFound):
            await store.expire_at(stranger, 1.0, note(stranger))
        assert isinstance(store, Journal)
        assert await store.read(stranger) == ()

    async def test_listing_is_by_state_oldest_first(self, store: Sandboxes) -> None:
        infos = [sandbox(state=state, created_at=at) for state, at in
                 ((State.RUNNING, 3.0), (State.GONE, 2.0), (State.RUNNING, 1.0))]  # fmt: skip
        for info in infos:
            await store.add(info, note(info.id))
        assert [info.created_at for info in await store.list()] == [1.0, 2.0, 3.0]
        assert [info.created_at for info in await store.list([State.RUNNING, State.PAUSED])] == [1.0, 3.0]

    async def test_pruning_drops_the_longest_ended_and_nothing_that_lives(self, store: Sandboxes) -> None:
        for n in range(6):
            info = replace(sandbox(state=State.GONE, created_at=float(n)), ended_at=10.0 + n)
            await store.add(info, note(info.id))
        alive = sandbox(state=State.RUNNING, created_at=-1.0)
        await store.add(alive, note(alive.id))
        assert await store.prune(keep=2) == 4
        assert [info.created_at for info in await store.list()] == [-1.0, 4.0, 5.0]
        assert await store.prune(keep=2) == 0

    async def test_pages_give_each_once_by_project_and_state(self, store: Sandboxes) -> None:
        infos = [in_project(f"p{n % 2}", State.RUNNING if n % 3 else State.GONE) for n in range(14)]
        for info in infos:
            await store.add(info, note(info.id))
        wanted = [info for info in infos if info.state is State.RUNNING]
        assert await all_pages(store, limit=4) == wanted
        assert await all_pages(store, limit=1000) == wanted
        own = [info for info in wanted if info.spec.project == "p1"]
        assert await all_pages(store, project="p1", limit=1) == own
        both = [info for info in infos if info.spec.project == "p1"]
        assert await all_pages(store, project="p1", states=[State.GONE, State.RUNNING], limit=3) == both
        assert await all_pages(store, project="nobody") == []
        assert await all_pages(store, states=[State.PAUSED]) == []

    async def test_pages_stay_whole_while_much_changes(self, store: Sandboxes) -> None:
        infos = [in_project("p", State.RUNNING) for _ in range(9)]
        for info in infos:
            await store.add(info, note(info.id))
        first = await store.page(limit=3)
        for info in (infos[1], infos[2], infos[4]):
            await store.move(info.id, seen=State.RUNNING, to=State.GONE, draft=note(info.id))
        late = in_project("p", State.RUNNING)
        await store.add(late, note(late.id))
        rest = await all_pages(store, after=first.next, limit=2)
        assert [info.id for info in (*first.items, *rest)] == [
            info.id for info in (*infos[:4], *infos[5:], late)
        ]

    @pytest.mark.parametrize("after", ["x", "-1", "1.5", "9" * 30, "\u0661"])
    async def test_a_cursor_that_is_none_is_refused(self, store: Sandboxes, after: str) -> None:
        with pytest.raises(BadRequest):
            await store.page(after=after)

    @pytest.mark.parametrize("limit", [0, -1, 1001])
    async def test_a_page_has_bounds(self, store: Sandboxes, limit: int) -> None:
        with pytest.raises(BadRequest):
            await store.page(limit=limit)

    async def test_counts_follow_every_change(self, store: Sandboxes) -> None:
        assert await store.count() == {}
        infos = [in_project(f"p{n % 2}", State.RUNNING) for n in range(6)]
        await store.add(infos[0], note(infos[0].id))
        await store.add_many(infos[1:], [note(info.id) for info in infos[1:]])
        with pytest.raises(Conflict):
            await store.add(infos[0], note(infos[0].id))
        await store.move(infos[0].id, seen=State.RUNNING, to=State.GONE, draft=note(infos[0].id))
        assert await store.count("p0") == {State.RUNNING: 2, State.GONE: 1}
        assert await store.count() == {State.RUNNING: 5, State.GONE: 1}
        await store.prune(keep=0)
        assert await store.count("p0") == {State.RUNNING: 2}
        assert await store.count("nobody") == {}

    async def test_many_are_added_all_or_none(self, store: Sandboxes) -> None:
        infos = [in_project("p", cold_state()) for _ in range(250)]
        await store.add_many(infos, [note(info.id, n=n) for n, info in enumerate(infos)])
        assert await all_pages(store, limit=70) == infos
        assert await store.get(infos[20].id) == infos[20]
        more = [in_project("p", cold_state()) for _ in range(150)]
        with pytest.raises(Conflict) as refused:
            await store.add_many([*more, infos[9]], [note(info.id) for info in (*more, infos[9])])
        assert refused.value.facts["id"] == infos[9].id
        with pytest.raises(NotFound):
            await store.get(more[0].id)
        with pytest.raises(BadRequest):
            await store.add_many(more, [])
        assert await store.count() == {cold_state(): 250}
        await store.add_many(more, [note(info.id) for info in more])
        assert isinstance(store, Journal)
        assert [record.payload for record in await store.read(infos[7].id)] == [{"n": 7}]
        moved = await store.move(infos[7].id, seen=cold_state(), to=State.RUNNING, draft=note(infos[7].id))
        assert moved == replace(infos[7], state=State.RUNNING)
        assert await store.verify() == ()

    async def test_what_expires_while_it_lies_dormant(self, store: Sandboxes) -> None:
        cold = [replace(in_project("p", cold_state()), expires_at=at) for at in (0.0, 30.0, 10.0, 20.0)]
        await store.add_many(cold, [note(info.id) for info in cold])
        awake = replace(in_project("p", State.RUNNING), expires_at=5.0)
        await store.add(awake, note(awake.id))
        assert [info.expires_at for info in await store.expiring(25.0)] == [10.0, 20.0]
        assert [info.expires_at for info in await store.expiring(1e12, 1)] == [10.0]
        await store.move(cold[2].id, seen=cold_state(), to=State.RUNNING, draft=note(cold[2].id))
        await store.expire_at(cold[1].id, 7.0, note(cold[1].id))
        assert [info.expires_at for info in await store.expiring(25.0)] == [7.0, 20.0]


def in_project(project: str, state: State) -> SandboxInfo:
    """A sandbox of that project."""
    info = sandbox(state=state)
    return replace(info, spec=replace(info.spec, project=project))


async def all_pages(
    store: Sandboxes,
    *,
    states: Sequence[State] = (),
    project: str = "",
    after: str = "",
    limit: int = PAGE,
) -> list[SandboxInfo]:
    """Page after page."""
    found: list[SandboxInfo] = []
    while True:
        page = await store.page(states=states, project=project, after=after, limit=limit)
        assert len(page.items) <= limit
        found += page.items
        if not page.next:
            return found
        after = page.next
