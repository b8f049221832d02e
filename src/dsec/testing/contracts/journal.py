"""What every journal, table of sandboxes and exec store must do.

A back-end's test class inherits these and brings a fixture ``store``: open, empty, and closed afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.lowlevel
import pytest

from dsec.errors import BadRequest, Conflict, NotFound, TooLarge
from dsec.model.ids import SandboxId, new_exec_id, new_sandbox_id
from dsec.model.journal import Draft, Phase
from dsec.model.sandbox import Flag, Level, Limits, SandboxInfo, SandboxSpec, State, Volume
from dsec.ports.journal import Execs, Journal, Sandboxes

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


class JournalContract:
    """Of :class:`~dsec.ports.journal.Journal`."""

    async def test_records_come_back_in_order_and_whole(self, store: Journal) -> None:
        first = await store.append(note(n=1, text="é \udcff"), note("other", n=2))
        second = await store.append(note(n=3))
        found = await store.read("engine")
        assert found == (first[0], second[0])
        assert [record.seq for record in found] == [1, 2]
        assert found[0].payload == {"n": 1, "text": "é \udcff"}
        assert found[0].digest != found[1].digest
        assert (await store.read("other"))[0].seq == 1

    async def test_reading_goes_on_after_a_record_and_stops_at_the_limit(self, store: Journal) -> None:
        await store.append(*(note(n=n) for n in range(5)))
        assert [record.seq for record in await store.read("engine", after=2, limit=2)] == [3, 4]
        assert await store.read("engine", after=5) == ()
        assert await store.read("nobody") == ()

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


class ExecsContract:
    """Of :class:`~dsec.ports.journal.Execs`."""

    async def test_an_exec_is_open_until_its_result(self, store: Execs) -> None:
        home, one, two = new_sandbox_id(), new_exec_id(), new_exec_id()
        await store.exec_started(home, one, ["sh", "-c", "é\udcff"], details={"cwd": "/"})
        await store.exec_started(home, two, ["true"])
        assert [found.id for found in await store.open_execs(home)] == [one, two]
        assert (await store.open_execs(home))[0].argv == ("sh", "-c", "é\udcff")
        await store.exec_ended(home, one, {"exit_code": 3})
        assert [found.id for found in await store.open_execs(home)] == [two]
        found = await store.get_exec(home, one)
        assert found.intent.payload["cwd"] == "/"
        assert found.result is not None
        assert found.result.payload == {"exit_code": 3}
        assert (await store.get_exec(home, two)).result is None
        assert await store.open_execs(new_sandbox_id()) == ()

    async def test_nothing_starts_or_ends_twice(self, store: Execs) -> None:
        home, one = new_sandbox_id(), new_exec_id()
        with pytest.raises(NotFound):
            await store.exec_ended(home, one, {})
        await store.exec_started(home, one, ["true"])
        with pytest.raises(Conflict):
            await store.exec_started(home, one, ["true"])
        await store.exec_ended(home, one, {})
        with pytest.raises(Conflict):
            await store.exec_ended(home, one, {})
        with pytest.raises(Conflict):
            await store.exec_started(home, one, ["true"])
        with pytest.raises(NotFound):
            await store.get_exec(new_sandbox_id(), one)

    async def test_a_long_command_line_is_kept_by_its_head_and_digest(self, store: Execs) -> None:
        home, one = new_sandbox_id(), new_exec_id()
        record = await store.exec_started(home, one, ["echo", "x" * 100_000])
        assert record.payload["argv"] == ["echo"]
        assert record.payload["argv_count"] == 2
        assert len(str(record.payload["argv_sha256"])) == 64
