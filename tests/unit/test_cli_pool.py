"""The pool as the command line shows it."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from dsec.cli import shapes
from dsec.cli.pools import show_pool
from dsec.model.pool import PoolInfo, PoolKind
from dsec.model.sandbox import MIB, Level, Limits

KIND = PoolKind(
    level=Level.CONTAINER,
    base="system",
    template="",
    limits=Limits(memory_mib=64),
    read_only=False,
    hits=5,
    misses=2,
    wasted=1,
    ready=2,
    target=3,
    rate=0.5,
    make_seconds=0.004,
    memory_bytes=MIB,
)
INFO = PoolInfo(
    most=4, memory_most=8 * MIB, ready=2, target=3, memory_bytes=2 * MIB, hits=9, misses=2, kinds=(KIND,)
)


def test_a_line_for_each_kind_and_one_for_all(capfd: pytest.CaptureFixture[str]) -> None:
    show_pool(INFO, False)
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines[1] == ["container", "system", "64", "MiB", "2", "3", "5", "2", "1", "0.50", "2.0"]
    assert lines[2][:4] == ["all", "(at", "most", "4)"]
    assert lines[2][4:9] == ["2", "3", "9", "2", "0"]


def test_an_engine_without(capfd: pytest.CaptureFixture[str]) -> None:
    show_pool(PoolInfo(), False)
    assert capfd.readouterr().out == "this engine keeps no sandboxes ready\n"


def test_the_keys_are_those_that_are_documented(capfd: pytest.CaptureFixture[str]) -> None:
    show_pool(INFO, True)
    document = json.loads(capfd.readouterr().out)
    assert set(document) == set(shapes.POOL)
    assert set(document["kinds"][0]) == {field.name for field in fields(PoolKind)}
    assert all(field.name in shapes.POOL["kinds"] for field in fields(PoolKind))
