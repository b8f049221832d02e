"""Figures over a real journal: nothing old is counted, nothing new is missed, and its size is what is on the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsec.model.ids import new_engine_id
from dsec.model.journal import Draft, Phase
from dsec.stores.journal import SqliteStore
from dsec.testing.harness import Harness
from dsec.wiring.figures import bytes_below, meters_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(tmp_path / "journal", key=tmp_path / "key", engine_id=new_engine_id())
    yield opened
    await opened.close()


async def recorded(store: SqliteStore, count: int) -> None:
    """That many records, of many chains."""
    drafts = [Draft(chain=f"sb-{n}", act="exec", phase=Phase.NOTE, payload={"n": n}) for n in range(count)]
    for start in range(0, count, 200):
        await store.append(*drafts[start : start + 200])


def value(text: bytes, name: str) -> float:
    families = text_string_to_metric_families(text.decode())
    return next(one.value for family in families for one in family.samples if one.name == name)


async def test_from_now_on_and_all_of_it(store: SqliteStore, tmp_path: Path) -> None:
    await recorded(store, 1234)
    engine = await Harness(system_clock=True).connect()
    meters = meters_of(engine, store, store, bytes_below(tmp_path / "journal"))
    assert value(await meters.text(), "dsec_journal_records_total") == 0
    await recorded(store, 2345)
    text = await meters.text()
    assert value(text, "dsec_journal_records_total") == 2345
    assert value(text, "dsec_acts_total") == 2345
    assert value(text, "dsec_journal_figures_late") == 0
    on_disk = sum(file.stat().st_blocks * 512 for file in (tmp_path / "journal").rglob("*"))
    assert 0 < value(text, "dsec_journal_bytes") <= on_disk + (1 << 20)
    await engine.close()


async def test_of_an_empty_journal(store: SqliteStore, tmp_path: Path) -> None:
    engine = await Harness(system_clock=True).connect()
    meters = meters_of(engine, store, store, bytes_below(tmp_path / "journal"))
    await meters.text()
    await recorded(store, 3)
    assert value(await meters.text(), "dsec_journal_records_total") == 3
    await engine.close()
