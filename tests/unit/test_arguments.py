"""Wrong arguments of the SDK are refused by name before anything is made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.client.aio import AsyncDsec
from dsec.errors import BadRequest, Conflict
from dsec.model.sandbox import Volume
from dsec.testing.harness import Harness

pytestmark = pytest.mark.anyio


@pytest.fixture
async def dsec() -> AsyncIterator[AsyncDsec]:
    async with AsyncDsec(Harness().connect) as opened:
        yield opened


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("limits", {"limits": {"memory_mib": 64}}),
        ("labels", {"labels": "a"}),
        ("env", {"env": ["A=1"]}),
        ("volumes", {"volumes": [("/tmp", "/x")]}),
        ("volumes", {"volumes": "/tmp:/x"}),
        ("volumes", {"volumes": ["/tmp:/a", "/usr:/a/"]}),
        ("'/x' and '/x/y' lie in one another", {"volumes": ["/tmp:/x/y:ro", "/usr:/x-", "/usr:/x/"]}),
        ("volume target", {"volumes": ["/tmp:/proc"]}),
        ("volume target", {"volumes": ["/tmp:/x/../proc"]}),
        ("read_only", {"read_only": "no"}),
    ],
)
async def test_create(dsec: AsyncDsec, field: str, given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=field):
        await dsec.sandboxes.create(**given)
    assert await dsec.sandboxes.list() == ()


async def test_volumes_beside_one_another(dsec: AsyncDsec) -> None:
    sandbox = await dsec.sandboxes.create(volumes=["/tmp:/x", "/tmp:/xy", "/tmp:/x-/y:ro"])
    spec = (await sandbox.inspect()).spec
    assert [volume.target for volume in spec.volumes] == ["/x", "/xy", "/x-/y"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda d, sb: d.sandboxes.get(None),
        lambda d, sb: sb.exec("true", user=0),
        lambda d, sb: sb.exec("true", env=["A=1"]),
        lambda d, sb: sb.start("cat", stdin="hello"),
        lambda d, sb: sb.attach(None),
    ],
)
async def test_acts(dsec: AsyncDsec, ask: Callable[[AsyncDsec, Any], Awaitable[object]]) -> None:
    sandbox = await dsec.sandboxes.create()
    with pytest.raises(BadRequest):
        await ask(dsec, sandbox)


def test_a_volumes_target_is_kept_in_one_form() -> None:
    assert Volume(Path("/tmp"), "/a//b/./c/").target == "/a/b/c"
    assert Volume("/tmp", "/a").source == Path("/tmp")
    for wrong in ("./tmp", b"/tmp", None):
        with pytest.raises(BadRequest, match="volume"):
            Volume(wrong, "/a")  # type: ignore[arg-type]


async def test_input_after_its_end_is_refused(dsec: AsyncDsec) -> None:
    sandbox = await dsec.sandboxes.create()
    command = await sandbox.start("cat", stdin=True)
    await command.send_stdin(b"a")
    await command.close_stdin()
    with pytest.raises(Conflict, match="closed"):
        await command.send_stdin(b"b")
    await command.kill()
