"""Any value for any argument of the SDK is taken, or refused with an error of ours: nothing else ever comes out."""

from __future__ import annotations

import asyncio
import inspect
import io
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from dsec import AsyncDsec as Engine
from dsec import Dsec, Settings
from dsec.client.aio import AsyncDsec, AsyncSandbox
from dsec.errors import BadRequest, DsecError, FileProblem, NotFound, TooLarge
from dsec.model.checks import shown
from dsec.model.files import MakeDir, Remove, Rename, WriteOptions
from dsec.model.ids import new_exec_id
from dsec.model.sandbox import Limits, Volume
from dsec.testing.harness import Harness

BEYOND: Final = 10**5000  # more digits than the interpreter writes
WRONG: Final[tuple[Any, ...]] = (
    *(None, True, -1, 2**32, 2**63, 10**30, BEYOND, 1.5, math.nan, math.inf, -math.inf, 1j),
    *("", "x", "a\0b", "\ud800", "\udc80", "x" * 100_000, b"", b"x", bytearray(b"x")),
    *(Path("/a\0b"), Path("/\ud800"), object(), int, {1}, [], [None], [1], ["\ud800"], ["a\0b"]),
    *({"a": 1}, {"a": "\ud800"}, {"\ud800": "a"}, {"a": "\0"}, {1: "a"}, {BEYOND: BEYOND}),
)
Act = Callable[..., Any]
# What each method needs, besides the argument that is wrong.
ACTS: Final[dict[str, tuple[Callable[[AsyncDsec, AsyncSandbox], Act], dict[str, Any]]]] = {
    "create": (lambda d, sb: d.sandboxes.create, {}),
    "get": (lambda d, sb: d.sandboxes.get, {}),
    "list sandboxes": (lambda d, sb: d.sandboxes.list, {}),
    "create a volume": (lambda d, sb: d.volumes.create, {"name": "data"}),
    "get a volume": (lambda d, sb: d.volumes.get, {"name": "data"}),
    "list volumes": (lambda d, sb: d.volumes.list, {}),
    "remove a volume": (lambda d, sb: d.volumes.remove, {"name": "data"}),
    "exec": (lambda d, sb: sb.exec, {"command": ["true"]}),
    "start": (lambda d, sb: sb.start, {"command": ["true"]}),
    "terminal": (lambda d, sb: sb.terminal, {"command": ["true"]}),
    "attach": (lambda d, sb: sb.attach, {"exec_id": new_exec_id()}),
    "extend": (lambda d, sb: sb.extend, {}),
    "destroy": (lambda d, sb: sb.destroy, {}),
    "events": (lambda d, sb: sb.events, {}),
    "read": (lambda d, sb: sb.files.read, {"path": "f"}),
    "open_read": (lambda d, sb: sb.files.open_read, {"path": "f"}),
    "write": (lambda d, sb: sb.files.write, {"path": "f", "content": b"x"}),
    "stat": (lambda d, sb: sb.files.stat, {"path": "f"}),
    "exists": (lambda d, sb: sb.files.exists, {"path": "f"}),
    "list": (lambda d, sb: sb.files.list, {}),
    "mkdir": (lambda d, sb: sb.files.mkdir, {"path": "d"}),
    "move": (lambda d, sb: sb.files.move, {"source": "g", "target": "h"}),
    "remove": (lambda d, sb: sb.files.remove, {"path": "g"}),
    "watch": (lambda d, sb: sb.files.watch, {}),
    "upload": (lambda d, sb: sb.files.upload, {"local": "mine", "path": "h"}),
    "download": (lambda d, sb: sb.files.download, {"path": "f", "local": "copy"}),
    "unpack": (lambda d, sb: sb.files.unpack, {"archive": b"", "path": "h"}),
    "pack": (lambda d, sb: sb.files.pack, {"path": "."}),
}
OF_COMMANDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "signal": ("signal", {}),
    "send_stdin": ("send_stdin", {}),
    "attach": ("attach", {}),
    "send": ("send", {}),
    "resize": ("resize", {"rows": 24, "cols": 80}),
}


@pytest.fixture
async def dsec() -> AsyncIterator[AsyncDsec]:
    async with AsyncDsec(Harness().connect) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a wrong name of a local file may be a right one
    Path("mine").write_bytes(b"x")


async def _done(begun: object) -> None:
    got = await begun if isinstance(begun, Awaitable) else begun
    if isinstance(got, AsyncIterator):
        async for _ in got:
            break


async def _taken_or_refused(act: Act, given: dict[str, Any], name: str, wrong: object) -> None:
    refused: DsecError | None = None
    try:
        async with asyncio.timeout(0.2):  # a watch waits for something to happen
            await _done(act(**{**given, name: wrong}))
    except TimeoutError:
        return
    except DsecError as error:
        refused = error
    except FileNotFoundError:  # of this machine: no error of ours
        assert name == "local"
    if refused is not None and not isinstance(refused, FileProblem | NotFound | TooLarge):  # of paths
        assert len(str(refused)) < 1000
    if isinstance(refused, BadRequest):
        names = {"command": "argv", "exec_id": "exec id"}
        assert name in refused.message or names.get(name, name) in refused.message


@pytest.mark.anyio
@pytest.mark.parametrize("name", ACTS)
async def test_methods(dsec: AsyncDsec, name: str) -> None:
    find, given = ACTS[name]
    for argument in inspect.signature(find(dsec, await dsec.sandboxes.create())).parameters:
        for wrong in WRONG:
            sandbox = await dsec.sandboxes.create()
            await sandbox.files.write("f", b"x")
            await _taken_or_refused(find(dsec, sandbox), given, argument, wrong)


@pytest.mark.anyio
@pytest.mark.parametrize("name", OF_COMMANDS)
async def test_methods_of_commands(dsec: AsyncDsec, name: str) -> None:
    method, given = OF_COMMANDS[name]
    sandbox = await dsec.sandboxes.create()
    terminal = await sandbox.terminal(["sleep", "inf"])
    for argument in inspect.signature(getattr(terminal, method)).parameters:
        for wrong in WRONG:
            await _taken_or_refused(getattr(terminal, method), given, argument, wrong)
    await terminal.kill()


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (Limits, {}),
        (Volume, {"source": Path("/tmp"), "target": "/x"}),
        (Settings, {}),
        (WriteOptions, {}),
        (MakeDir, {"path": "a"}),
        (Rename, {"source": "a", "target": "b"}),
        (Remove, {"path": "a"}),
        (Dsec, {}),
        (Engine, {}),
    ],
)
def test_values(value: Callable[..., object], given: dict[str, Any]) -> None:
    for name in inspect.signature(value).parameters:
        for wrong in WRONG:
            refused: DsecError | None = None
            try:
                value(**{**given, name: wrong})
            except DsecError as error:
                refused = error
            assert refused is None or name in refused.message


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("message", "act"),
    [
        ("mode: '755' is not permission bits", lambda f: f.write("a", b"", mode="755")),
        ("mode: 512000 is not permission bits", lambda f: f.mkdir("a", mode=512000)),
        ("atomic: 1 is not True or False", lambda f: f.write("a", b"", atomic=1)),
        ("recursive: 'no' is not True or False", lambda f: f.remove("a", recursive="no")),
        ("local: None is not a path", lambda f: f.upload(None, "a")),
        ("local: b'x' is not a path", lambda f: f.download("a", b"x")),
        ("max_bytes: '1' is not a whole number", lambda f: f.read("a", max_bytes="1")),
        ("content: str is not bytes", lambda f: f.write("a", "text")),
        ("content: a piece is NoneType", lambda f: f.write("a", [b"a", None, b"b"])),
        ("content: a piece is str", lambda f: f.write("a", io.StringIO("text"))),
        ("archive: NoneType is not bytes", lambda f: f.unpack(None, "a")),
        ("user: None is not a str", lambda f: f.stat("a", user=None)),
    ],
)
async def test_the_message_names_the_argument(
    dsec: AsyncDsec, message: str, act: Callable[[Any], Awaitable[object]]
) -> None:
    sandbox = await dsec.sandboxes.create()
    with pytest.raises(BadRequest, match=message):
        await act(sandbox.files)


@pytest.mark.anyio
async def test_pieces_of_an_asynchronous_iterator_are_looked_at_too(dsec: AsyncDsec) -> None:
    async def pieces() -> AsyncIterator[Any]:
        yield b"a"
        yield "b"

    sandbox = await dsec.sandboxes.create()
    with pytest.raises(BadRequest, match="content: a piece is str"):
        await sandbox.files.write("a", pieces())


def test_a_wrong_value_is_shown_short_and_whatever_it_is() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    assert shown(BEYOND) == "a value of type int"
    assert shown(Silent()) == "a value of type Silent"
    assert shown("ab") == "'ab'"
    assert len(shown("x" * 10**6)) < 300
    assert len(shown(["x" * 10**6])) < 300


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("home", "state"),
        ("images", "/images"),
        ("durability", "ram"),
        ("journal_bytes", 0),
        ("journal_bytes", "1"),
        ("pool_bytes", 1024),
        ("shelf", -1),
        ("pool", 1001),
        ("pool", True),
        ("wait", math.nan),
    ],
)
def test_settings_are_checked_when_made(name: str, wrong: object) -> None:
    given: dict[str, Any] = {name: wrong}
    with pytest.raises(BadRequest, match=rf"settings\.{name}: "):
        Settings(**given)
