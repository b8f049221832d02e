"""What lies over a base, made with services that only pretend: what is asked of its files, and what errors become."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from dsec.control import layering
from dsec.control.layering import Layering
from dsec.errors import BadRequest, DsecError, IsolationUnavailable, NotFound, StoreDamaged
from dsec.images.attended import Fill
from dsec.images.dependencies.lock import Lock
from dsec.images.dependencies.target import PythonTarget
from dsec.model.template import Runtime, Template
from dsec.ports.storage import Image

pytestmark = pytest.mark.anyio
TARGET = PythonTarget(
    interpreter="/usr/bin/python3.11",
    version="3.11.2",
    abi="cp311",
    libc="glibc",
    libc_version="2.36",
    machine="x86_64",
    packages="/usr/local/lib/python3.11/dist-packages",
    scripts="/usr/local/bin",
    data="/usr/local",
    headers="/usr/local/include/python3.11",
)


class World:
    """Images that are directories, and a builder that can do nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "base"
        (self.base / "srv").mkdir(parents=True)
        self.error: OSError | None = None
        self.built: list[str] = []
        us = cast("Any", self)
        self.layering = Layering(us, self.keep, self.look, us, us, root / "templates")

    async def keep(self, key: str, fill: Fill) -> Image:
        tree = self.root / key[:20] / "tree"
        await anyio.Path(tree).mkdir(parents=True)
        await fill(tree)
        return Image(name=key, digest=f"sha256:{len(self.built):064}", path=tree)

    @contextmanager
    def look(self, image: Image) -> Iterator[Path]:
        if self.error is not None:
            raise self.error
        yield image.path

    async def run(self, *_: object, workdir: str, **__: object) -> None:
        self.built.append(workdir)

    async def compile(self, *_: object) -> None:
        raise IsolationUnavailable("level container cannot be had here", hint="be root")

    async def over(self, **runtime: Any) -> tuple[str, ...]:
        template = Template(name="a", version="1", runtime=Runtime(**runtime))
        image = Image(name="system", digest=f"sha256:{'0' * 64}", path=self.base)
        return (await self.layering.over(template, image, False, False))[0]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_links_of_a_base_mean_what_they_mean_inside(world: World, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (world.base / "oracle").symlink_to(tmp_path)
    (world.base / "srv/in-the-base").mkdir()
    (world.base / "app").symlink_to("/srv/in-the-base")
    with pytest.raises(BadRequest, match=r"runtime\.workdir"):
        await world.over(workdir="/oracle/host")
    assert (world.base / "oracle/host").is_dir(), "who follows links of the base here finds it"
    await world.over(workdir="/app")


async def test_a_working_directory_that_is_missing_is_looked_for_after_the_set_up(world: World) -> None:
    (world.base / "there").mkdir()
    await world.over(workdir="/there", setup=("true",))
    await world.over(workdir="/made", setup=("mkdir /made",))
    assert world.built == ["", "/made"]


async def test_without_level_container_a_build_is_refused_rather_than_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file over one base is one digest: on a machine that cannot compile it would be another one."""

    def resolve(wanted: tuple[str, ...], *_: object, **__: object) -> Lock:
        return Lock(target=TARGET, requirements=wanted, packages=())

    monkeypatch.setattr(layering, "resolve", resolve)
    monkeypatch.setattr(layering, "read_target", lambda _: TARGET)
    with pytest.raises(IsolationUnavailable):
        await world.over(dependencies=("a==1",), workdir="/srv")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOENT, NotFound), (errno.EIO, StoreDamaged), (errno.EMFILE, DsecError)],
)
async def test_what_the_disk_says_is_told_by_name(world: World, number: int, kind: type[DsecError]) -> None:
    world.error = OSError(number, os.strerror(number), "/x")
    with pytest.raises(kind) as caught:
        await world.over(workdir="/srv")
    assert caught.value.hint
