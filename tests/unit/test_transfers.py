"""Files that an engine writes piece by piece: whole or not there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.client.transfers import file_pieces, saved
from dsec.errors import BadRequest, NotFound, StorageFull

pytestmark = pytest.mark.anyio


async def pieces(*data: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for each in data:
        yield each
    if error is not None:
        raise error


async def test_a_stream_becomes_a_file_and_a_file_a_stream(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"what was there")
    await saved(pieces(b"one", b"", b"two" * 1_000_000), target)
    assert target.read_bytes() == b"one" + b"two" * 1_000_000
    assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]
    assert b"".join([piece async for piece in file_pieces("path", str(target))]) == target.read_bytes()


async def test_one_that_breaks_off_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"what was there")
    with pytest.raises(StorageFull):
        await saved(pieces(b"one", error=StorageFull("there")), target)
    assert target.read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["file"]


async def test_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await saved(pieces(b"x"), tmp_path / "nosuch/file")
    with pytest.raises(BadRequest):
        await saved(pieces(b"x"), "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadRequest):
        await saved(pieces(b"x"), tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]
    for path, error in ((tmp_path / "nosuch", NotFound), (tmp_path, BadRequest), ("", BadRequest)):
        with pytest.raises(error):
            await anext(file_pieces("path", path))
