"""The loop of audit export: at least once, in order, gaps told, and nothing skipped whatever the sink says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsec.control.exporting import Exporter, Task
from dsec.errors import BadRequest, Busy, NotFound, StorageFull, StoreDamaged, Unsupported
from dsec.model.journal import Phase, Record
from dsec.observe.cursor import Cursor, CursorFile
from dsec.observe.events import Origin
from dsec.observe.formats import FORMATS
from dsec.observe.sink import Line, Refused, Sink

pytestmark = pytest.mark.anyio
ORIGIN = Origin(host="machine", version="1")


def record(chain: str, seq: int, text: str = "x") -> Record:
    return Record(
        chain=chain,
        seq=seq,
        at=1000.0 + seq,
        act="exec",
        phase=Phase.NOTE,
        ref="",
        actor="local",
        payload={"text": text},
        digest=f"{seq:064x}",
    )


class FakeSource:
    """A journal in memory: records by position, and what was dropped."""

    def __init__(self, count: int = 0) -> None:
        self.records = {n: record("engine", n) for n in range(1, count + 1)}
        self.drops: dict[str, tuple[int, int]] = {}
        self.other = False

    def tail(self, after: int, limit: int, chain: str = "") -> Sequence[tuple[int, Record]]:
        found = [
            (at, one) for at, one in sorted(self.records.items()) if at > after and chain in ("", one.chain)
        ]
        return found[:limit]

    def lost(self, after: int, before: int) -> Mapping[str, int]:
        return {name: seq for name, (position, seq) in self.drops.items() if after < position < before}

    def ended(self, chain: str) -> tuple[int, int] | None:
        return self.drops.get(chain)

    def position_at(self, since: float) -> int:
        return min((at - 1 for at, one in self.records.items() if one.at >= since), default=max(self.records))

    def replaced(self) -> bool:
        return self.other

    def close(self) -> None:
        return


class FakeSink(Sink):
    """Takes what it is not told to refuse."""

    def __init__(self, *refusals: Refused) -> None:
        self.taken: list[dict[str, Any]] = []
        self.refusals = list(refusals)
        self.most = 10**9
        self.then: Callable[[], None] = lambda: None

    async def send(self, lines: Sequence[Line]) -> None:
        await asyncio.sleep(0)
        if self.refusals:
            raise self.refusals.pop(0)
        if sum(len(line.data) for line in lines) > self.most:
            raise Refused("too large", too_large=True)
        self.taken += [json.loads(line.data) for line in lines]
        self.then()

    async def close(self) -> None:
        return


def made(source: FakeSource, sink: Sink, cursor: CursorFile | None = None, **task: Any) -> Exporter:
    fields = {"form": FORMATS["jsonl"], "origin": ORIGIN, "poll": 0.001, **task}
    return Exporter(Task(**fields), lambda: source, sink, cursor=cursor)


async def kept(directory: Path) -> CursorFile:
    return await asyncio.to_thread(CursorFile, directory, "siem")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.control.exporting._FIRST", 0.001)
    monkeypatch.setattr("dsec.control.exporting._LONGEST", 0.002)


async def test_all_in_order_once() -> None:
    sink = FakeSink()
    await made(FakeSource(1203), sink).run()
    assert [one["position"] for one in sink.taken] == list(range(1, 1204))
    assert len({one["id"] for one in sink.taken}) == 1203


async def test_refused_is_sent_again(tmp_path: Path) -> None:
    sink = FakeSink(Refused("down"), Refused("later", after=0.001), Refused("down", lasting=True))
    export = made(FakeSource(5), sink, follow=True)
    sink.then = export.stop
    await export.run()
    assert [one["position"] for one in sink.taken] == [1, 2, 3, 4, 5]


async def test_what_lasts_ends_an_export_that_does_not_follow(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no such address"):
        await made(FakeSource(5), FakeSink(Refused("no such address", lasting=True))).run()
    with pytest.raises(Busy, match="down"):
        await made(FakeSource(5), FakeSink(*[Refused("down")] * 100_000), patience=0.01).run()


async def test_the_cursor_moves_only_behind_what_was_taken(tmp_path: Path) -> None:
    source, sink = FakeSource(700), FakeSink()
    export = made(source, sink, await kept(tmp_path), follow=True)
    sink.then = export.stop  # the first batch only
    await export.run()
    again = await kept(tmp_path)
    assert await asyncio.to_thread(again.load) == Cursor(position=500, uid=sink.taken[-1]["id"], seq=500)
    with pytest.raises(Unsupported):
        await made(source, FakeSink(Refused("no", lasting=True)), again).run()
    rest = FakeSink()
    await made(source, rest, await kept(tmp_path)).run()
    assert [one["position"] for one in rest.taken] == list(range(501, 701))


async def test_less_at_once_where_it_is_too_large() -> None:
    sink = FakeSink()
    sink.most = 1500
    source = FakeSource(20)
    source.records[7] = record("engine", 7, "y" * 60_000)
    await made(source, sink).run()
    assert [one["position"] for one in sink.taken] == list(range(1, 21))
    assert sink.taken[6]["payload"]["abridged"] is True


async def test_a_gap_says_how_many_and_which() -> None:
    source, sink = FakeSource(10), FakeSink()
    for position in (4, 5, 7):
        del source.records[position]
    source.drops = {"sb-one": (5, 2), "sb-two": (7, 1)}
    await made(source, sink).run()
    acts = [(one["position"], one["act"]) for one in sink.taken]
    assert acts[3] == (5, "export.gap")
    gaps = [one["payload"] for one in sink.taken if one["act"] == "export.gap"]
    assert [(one["records"], one["chains"]) for one in gaps] == [(2, {"sb-one": 2}), (1, {"sb-two": 1})]
    again = FakeSink()
    await made(source, again).run()
    assert [one["id"] for one in again.taken] == [one["id"] for one in sink.taken]


async def test_a_gap_that_nothing_explains_says_so() -> None:
    source, sink = FakeSource(3), FakeSink()
    del source.records[2]
    await made(source, sink).run()
    assert "does not say why" in sink.taken[1]["payload"]["message"]


async def test_one_chain_and_its_lost_end() -> None:
    source, sink = FakeSource(), FakeSink()
    source.records = {
        1: record("sb-a", 1),
        2: record("engine", 1),
        3: record("sb-a", 2),
        9: record("engine", 2),
    }
    await made(source, sink, chain="sb-a").run()
    assert [one["seq"] for one in sink.taken] == [1, 2]
    source.drops = {"sb-a": (8, 5)}
    await made(source, sink, chain="sb-a").run()
    assert sink.taken[-1]["payload"]["records"] == 3
    assert sink.taken[-1]["payload"]["chains"] == {"sb-a": 5}


async def test_an_older_journal_is_exported_anew(tmp_path: Path) -> None:
    cursor = await kept(tmp_path)
    await asyncio.to_thread(cursor.save, Cursor(position=9, uid="ab" * 16, seq=9))
    sink = FakeSink()
    await made(FakeSource(5), sink, cursor).run()
    assert [one["act"] for one in sink.taken] == ["export.rewound", *["exec"] * 5]
    other = await kept(tmp_path)
    await asyncio.to_thread(other.save, Cursor(position=3, uid="ab" * 16, seq=3))  # another record was there
    await made(FakeSource(5), sink, other).run()
    assert [one["act"] for one in sink.taken[6:]] == ["export.rewound", *["exec"] * 5]


async def test_it_goes_on_when_the_journal_comes_back() -> None:
    source, sink, failures = FakeSource(5), FakeSink(), [NotFound("none yet"), Busy("locked")]

    def opened() -> FakeSource:
        if failures:
            raise failures.pop()
        return source

    export = Exporter(Task(form=FORMATS["jsonl"], origin=ORIGIN, follow=True, poll=0.001), opened, sink)
    sink.then = export.stop
    await export.run()
    assert len(sink.taken) == 5


async def test_another_journal_in_its_place_is_opened() -> None:
    first, second, sink = FakeSource(2), FakeSource(4), FakeSink()
    first.other = True
    sources = [second, first]
    export = Exporter(Task(form=FORMATS["jsonl"], origin=ORIGIN, follow=True, poll=0.001), sources.pop, sink)
    sink.then = lambda: export.stop() if len(sink.taken) >= 4 else None
    await export.run()
    assert [one["position"] for one in sink.taken] == [1, 2, 3, 4]


async def test_where_it_begins() -> None:
    for task, first in (({"after": 3}, 4), ({"since": 1002.5}, 3), ({"after": 4, "since": 1002.5}, 5)):
        sink = FakeSink()
        await made(FakeSource(6), sink, **task).run()
        assert sink.taken[0]["position"] == first, task


async def test_a_full_disk_under_the_cursor_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cursor, fails = await kept(tmp_path), [StorageFull("full"), StorageFull("full")]
    save = cursor.save

    def full(at: Cursor) -> None:
        if fails:
            raise fails.pop()
        save(at)
        export.stop()

    monkeypatch.setattr(cursor, "save", full)
    sink = FakeSink()
    export = made(FakeSource(5), sink, cursor, follow=True)
    await export.run()
    assert len(sink.taken) == 5  # not twice
    assert await asyncio.to_thread((await kept(tmp_path)).load) is not None


# The cursor


def test_one_export_a_name(tmp_path: Path) -> None:
    held = CursorFile(tmp_path, "siem")
    with pytest.raises(Busy, match="runs already"):
        CursorFile(tmp_path, "siem")
    held.close()
    CursorFile(tmp_path, "siem").close()
    for name in ("", "../x", ".x", "a/b", "x" * 65, "a\nb"):
        with pytest.raises(BadRequest):
            CursorFile(tmp_path, name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"position":-5,"uid":"","chain":"","seq":0}',
        "[" * 5000,
        '{"position":1.5,"uid":"","chain":"","seq":0}',
    ],
)
def test_a_damaged_cursor_is_refused(tmp_path: Path, text: str) -> None:
    cursor = CursorFile(tmp_path, "siem")
    (tmp_path / "siem.json").write_text(text)
    with pytest.raises(StoreDamaged):
        cursor.load()
    cursor.close()


async def test_a_name_is_for_one_choice_of_chains(tmp_path: Path) -> None:
    await made(FakeSource(2), FakeSink(), await kept(tmp_path)).run()
    with pytest.raises(Unsupported, match="this name exports"):
        await made(FakeSource(2), FakeSink(), await kept(tmp_path), chain="sb-a").run()
