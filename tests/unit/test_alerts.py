"""Problems are told: each once when it appears, once when it stays, once when it is solved; whatever the receiver does."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from aiohttp import web

from dsec.control.alerts import BUFFER, Alerts, CommandSender, Sender
from dsec.control.webhook import WebhookSender
from dsec.core.alarms import Alarms
from dsec.errors import BadRequest
from dsec.model.alerts import Alert, Turn
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Problem
from dsec.testing.harness import until

pytestmark = pytest.mark.anyio


def problem(name: str = "sb-1", attempts: int = 1) -> Problem:
    return Problem(sandbox=SandboxId(name), what="destroy", since=1.0, attempts=attempts, error="stuck")


class Receiver(Sender):
    """Takes batches, or refuses them."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.refuses = False
        self.tries = 0
        self.closed = False

    async def send(self, body: bytes) -> None:
        self.tries += 1
        if self.refuses:
            raise OSError("refused")
        self.bodies.append(json.loads(body))

    async def close(self) -> None:
        self.closed = True

    def told(self) -> list[tuple[str, str]]:
        found = []
        for body in self.bodies:
            alarms = body["alarms"]
            assert isinstance(alarms, list)
            found += [(alarm["turn"], alarm["problem"]["sandbox"]) for alarm in alarms]
        return found


class Board:
    """Problems as a test has them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.looks = 0

    async def look(self) -> list[Problem]:
        self.looks += 1
        return self.problems


async def test_each_turn_is_told_once() -> None:
    alarms = Alarms(persists=60)
    assert [one.turn for one in alarms.look([problem()], 0)] == [Turn.APPEARED]
    assert alarms.look([problem(attempts=2)], 59) == []
    (still,) = alarms.look([problem(attempts=3)], 60)
    assert (still.turn, still.problem.attempts) == (Turn.PERSISTS, 3)
    assert alarms.look([problem()], 600) == []
    (solved,) = alarms.look([], 601)
    assert solved.turn is Turn.SOLVED
    assert alarms.look([], 602) == []
    assert [one.turn for one in alarms.look([problem()], 603)] == [Turn.APPEARED]


async def test_alarms_reach_the_receiver() -> None:
    board, receiver = Board(), Receiver()
    alerts = Alerts(board.look, receiver, persists=1e6, wait=0.001)
    alerts.start()
    board.problems = [problem("sb-1"), problem("sb-2")]
    await until(lambda: len(receiver.told()) == 2)
    board.problems = [problem("sb-2")]
    await until(lambda: len(receiver.told()) == 3)
    await alerts.close()
    assert receiver.told() == [("appeared", "sb-1"), ("appeared", "sb-2"), ("solved", "sb-1")]
    assert receiver.closed


async def test_a_receiver_that_is_away_is_a_problem_itself_and_loses_nothing() -> None:
    board, receiver = Board(), Receiver()
    receiver.refuses = True
    alerts = Alerts(board.look, receiver, persists=1e6, wait=0.001)
    alerts.start()
    board.problems = [problem()]
    await until(lambda: receiver.tries > 2)
    (own,) = alerts.problems()
    assert (own.kind, own.error, own.sandbox) == ("alert", "refused", "")
    assert own.next_try > 0
    assert own.hint
    receiver.refuses = False
    await until(lambda: receiver.told() == [("appeared", "sb-1")])
    await until(lambda: alerts.problems() == ())
    await alerts.close()


async def test_what_waits_is_bounded_and_what_is_dropped_is_counted() -> None:
    board, receiver = Board(), Receiver()
    receiver.refuses = True
    alerts = Alerts(board.look, receiver, persists=1e6, wait=0.001)
    alerts.start()
    board.problems = [problem(f"sb-{n}") for n in range(BUFFER + 50)]
    await until(lambda: alerts.dropped == 50)
    receiver.refuses = False
    await until(lambda: len(receiver.told()) >= BUFFER, 10)
    await alerts.close()
    assert sum(int(str(body["dropped"])) for body in receiver.bodies) == 50
    assert receiver.told()[-1] == ("appeared", f"sb-{BUFFER + 49}")


async def test_looking_that_fails_is_tried_again() -> None:
    board, receiver = Board(), Receiver()
    failing = [OSError("no")]

    async def look() -> list[Problem]:
        if failing:
            raise failing.pop()
        return await board.look()

    alerts = Alerts(look, receiver, persists=1e6, wait=0.001)
    alerts.start()
    await until(lambda: board.looks > 1)
    await alerts.close()


async def test_a_command_reads_the_batch_in_a_clean_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    out = tmp_path / "out"
    code = "import os,sys; open(sys.argv[1],'w').write(sys.stdin.read()+'|'+','.join(sorted(os.environ)))"
    await CommandSender([sys.executable, "-c", code, str(out)], 10.0).send(b'{"alarms": []}')
    body, names = (await asyncio.to_thread(out.read_text)).split("|")
    assert body == '{"alarms": []}'
    assert "SECRET_OF_OURS" not in names
    assert "PATH" in names


async def test_a_command_that_fails_or_hangs_is_told_and_ends() -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        await CommandSender(["/bin/sh", "-c", "exit 3"], 10.0).send(b"{}")
    with pytest.raises(TimeoutError, match="within"):
        await CommandSender(["/bin/sh", "-c", "sleep 60 & sleep 60"], 0.2).send(b"{}")
    with pytest.raises(OSError, match="no-such-program"):
        await CommandSender(["/no-such-program"], 1.0).send(b"{}")
    await CommandSender(["/bin/true"], 10.0).send(b"x" * 2**20)  # it reads nothing of it


async def test_a_webhook_gets_json_and_its_answer_counts() -> None:
    seen: list[bytes] = []
    status = [204]

    async def take(request: web.Request) -> web.Response:
        seen.append(await request.read())
        return web.Response(status=status[0], headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_post("/hook", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    sender = WebhookSender(f"http://127.0.0.1:{port}/hook?token=secret", 5.0)
    try:
        await sender.send(b'{"alarms": []}')
        for status[0] in (500, 302):
            with pytest.raises(RuntimeError, match=str(status[0])):
                await sender.send(b"{}")
    finally:
        await runner.cleanup()
    with pytest.raises(RuntimeError) as caught:
        await sender.send(b"{}")
    assert "secret" not in str(caught.value)
    await sender.close()
    assert seen[0] == b'{"alarms": []}'
    assert len(seen) == 3


@pytest.mark.parametrize(
    "given",
    [{}, {"command": ("x",), "url": "http://x"}, {"url": "ftp://x"}, {"command": ("",)}, {"command": "x"}],
)
async def test_an_alert_that_is_none_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        Alert(**given)  # type: ignore[arg-type]
