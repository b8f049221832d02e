"""Archives of images with anything changed in them: an image comes out, or a refusal; nothing else ever does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.errors import BadRequest, NotFound, TooLarge, Unsupported
from dsec.images.oci import read_image
from dsec.testing import images as make
from dsec.testing.images import directory, file, hardlink, layer, symlink

LAYERS = (
    layer(
        directory("etc"), file("etc/motd", b"hello\n" * 100), symlink("l", "etc"), hardlink("h", "etc/motd")
    ),
    layer(file("etc/.wh.motd"), file("n" * 150, b"1", pax={"SCHILY.xattr.a": "b", "mtime": "1.5"})),
)
ROUNDS = 150
TELLING = (b"\xff" * 8, b"\0" * 8, b"77777777", b"../../..", b"/etc/pas")


def changed(data: bytes, rng: random.Random) -> bytes:
    """With one to three bytes, blocks or numbers that are not what they were."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(result))
        match rng.randrange(4):
            case 0:
                result[place] = rng.randrange(256)
            case 1:
                del result[place : place + rng.randrange(600)]
            case 2:
                result[place:place] = result[:512]
            case _:
                result[place : place + 8] = rng.choice(TELLING)
    return bytes(result)


def layout(tmp_path: Path) -> Path:
    return make.write_archive(tmp_path / "layout.tar", make.write_layout(tmp_path / "layout", LAYERS))


def packed(tmp_path: Path) -> Path:
    return make.write_archive(tmp_path / "layout.tar.gz", make.write_layout(tmp_path / "layout", LAYERS))


def saved(tmp_path: Path) -> Path:
    return make.write_saved(tmp_path / "saved.tar", LAYERS)


@pytest.mark.parametrize("form", [layout, packed, saved])
def test_an_image_or_a_refusal(tmp_path: Path, form: Callable[[Path], Path]) -> None:
    data = form(tmp_path).read_bytes()
    rng = random.Random(7)
    refused = 0
    for number in range(ROUNDS):
        work = tmp_path / str(number)
        work.mkdir()
        archive = tmp_path / "changed"
        archive.write_bytes(changed(data, rng))
        try:
            read_image(archive, work)
        except (BadRequest, NotFound, TooLarge, Unsupported):
            refused += 1
    assert refused > ROUNDS / 4
