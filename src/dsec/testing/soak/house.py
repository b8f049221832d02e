"""A home, its server, and those who ask it: rounds, one after another, in which something is killed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from dsec import Dsec, Settings
from dsec.errors import DsecError
from dsec.model.sandbox import State
from dsec.model.tenants import Scope
from dsec.stores.layers import BtrfsLayers
from dsec.testing.crashes import Home, Server, until
from dsec.testing.nursery import Nursery
from dsec.testing.soak import clients, plan
from dsec.testing.soak.judge import Judge, signal_commands
from dsec.testing.soak.ledger import AWAKE, Ledger
from dsec.testing.soak.plan import Strike, chance
from dsec.wiring import verify_journal

PROJECTS: Final = ("alpha", "beta", "gamma")
CLIENTS: Final = 2
"""Of each project."""
POOL_BYTES: Final = 768 * 2**20
_REACHED: Final = 8.0  # seconds for it to be reached; then the server is killed at that moment
_AFTER: Final = 1.0  # seconds for which clients go on when the server is back
_PATIENCE: Final = 20.0  # seconds for clients to leave; then what is frozen is thawed
_JOIN: Final = 60.0


@dataclass(slots=True)
class Told:
    """What rounds came to.

    Attributes:
        kills: by kind; failpoints: by name, of those that were reached. restarts: seconds, each. acts, refused: of clients, by name and code.
        wrong: violations, each with its round.
    """

    rounds: int = 0
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    failpoints: Counter[str] = field(default_factory=Counter)
    restarts: list[float] = field(default_factory=list)
    acts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class House:
    """From the first start of a home to its removal.

    Args:
        path: of the home, which is made. images: the image store. database: what the setting says. port: of HTTP.
        levels: of sandboxes. seed: of the run. restart: seconds within which a server must be back.
    """

    def __init__(
        self,
        path: Path,
        images: Path,
        database: str,
        port: int,
        levels: tuple[str, ...],
        seed: int,
        told: Told,
        restart: float,
    ) -> None:
        self.home = Home(path)
        self._levels = levels
        self._seed = seed
        self._told = told
        self._bound = restart
        self._options = ("--port", str(port), "--freeze", "0", "--hibernate", "0")
        (path / "store").symlink_to(images)
        settings = Settings(images=images, pool=0, pool_bytes=POOL_BYTES, database=database)
        with Dsec(self.home.engine, settings=settings) as dsec:
            dsec.sandboxes.create(level=levels[0]).destroy()
        self.nursery = Nursery()
        self._ledger = Ledger()
        self.server = Server(self.home, "", self.nursery, self._options)
        until(self.server.answers, "the first server", 6 * restart)
        with Dsec(self.home.url) as dsec:
            self._asked = clients.Server(
                url=f"http://127.0.0.1:{port}",
                socket=self.home.url,
                admin=dsec.keys.create(Scope.ADMIN).key,
                keys={name: dsec.keys.create(project=name).key for name in PROJECTS},
                levels=levels,
                witnesses=path.with_name(path.name + ".witnesses"),
            )
        self._asked.witnesses.mkdir(mode=0o755)

    def _start(self) -> Server:
        """A server that answers, in time."""
        begun = time.monotonic()
        server = Server(self.home, "", self.nursery, self._options)
        until(server.answers, "a server that answers", 6 * self._bound)
        assert not server.killed
        clock, waited = time.monotonic() - begun, server.waited()
        self._told.restarts.append(clock - waited)
        if clock - waited > self._bound:
            loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
            words = (
                f"a server was back after {clock:.1f} s, of which it waited for a processor {waited:.1f} s"
            )
            self._ledger.wrong.append(f"{words} (load {loads})")
        return server

    def round(self, number: int) -> bool:
        """One round; whether all was as it must be."""
        blow = plan.strike(self._seed, number, self._levels)
        self._asked.stop.clear()
        crowd = [
            clients.Client(self._asked, self._ledger, project, f"{n}", self._seed, number)
            for project in PROJECTS
            for n in range(CLIENTS)
        ]
        for client in crowd:
            client.thread.start()
        try:
            self._struck(blow, number)
            time.sleep(_AFTER)
        finally:
            self._asked.stop.set()
            stuck = self._gone_home(crowd)
        with Dsec(self.home.url) as owner:
            self._ledger.wrong += [f"still being answered: {_doing(client)}" for client in stuck]
            Judge(self.home, self._ledger, owner).all()
        return self._counted(blow, number)

    def _gone_home(self, crowd: list[clients.Client]) -> list[clients.Client]:
        """Those that are still being answered when all others have left, and nothing is frozen any more: a command waits as long as its sandbox does."""
        if slow := [client for client in crowd if _join(client, _PATIENCE)]:
            with Dsec(self.home.url) as owner:
                for info in owner.sandboxes.list([State.PAUSED]):
                    owner.sandboxes.get(info.id).resume()
                    if info.id in self._ledger.sandboxes:
                        self._ledger.sandboxes[info.id].states = AWAKE
        return [client for client in slow if _join(client, _JOIN)]

    def _counted(self, blow: Strike, number: int) -> bool:
        wrong = [f"round {number}, {blow}: {text}" for text in self._ledger.wrong]
        self._told.rounds += 1
        self._told.acts += self._ledger.acts
        self._told.refused += self._ledger.refused
        self._told.wrong += wrong
        for each in (self._ledger.acts, self._ledger.refused, self._ledger.wrong):
            each.clear()
        return not wrong

    def _struck(self, blow: Strike, number: int) -> None:
        """Do what the plan says, and have a server again."""
        kind = blow.kind
        if kind == plan.FAILPOINT:
            time.sleep(blow.after)
            kind = self._at_failpoint(blow)
        elif kind == plan.SPAWNER:
            time.sleep(blow.after)
            self._one_spawner(number)
            self._told.kills[kind] += 1
            return
        elif kind == plan.STOP:
            time.sleep(blow.after)
            code = self.server.stop()
            if code != 0:
                self._ledger.wrong.append(f"it was stopped, and ended with {code}")
        else:
            time.sleep(blow.after)
            self.server.kill()
        if blow.spawners:
            self.home.kill_spawners()
        self._told.kills[f"{kind}+spawners" if blow.spawners else kind] += 1
        self._end_some(number)
        if kind == plan.RECOVERY:
            dying = Server(self.home, "", self.nursery, self._options)
            time.sleep(blow.again)
            dying.kill()
        self.server = self._start()

    def _at_failpoint(self, blow: Strike) -> str:
        """What it was killed at: a failpoint that is not reached in time is a moment."""
        self.server.arm(blow.failpoint)
        with suppress(AssertionError):
            until(lambda: self.server.killed, blow.failpoint, _REACHED)
        if self.server.killed:
            self._told.failpoints[blow.failpoint.partition(":")[0]] += 1
            return plan.FAILPOINT
        self.server.kill()
        return plan.MOMENT

    def _one_spawner(self, number: int) -> None:
        found = sorted(self.home.spawners())
        if found:
            with suppress(ProcessLookupError):
                os.kill(chance(self._seed, number, "spawner").choice(found), signal.SIGKILL)

    def _end_some(self, number: int) -> None:
        """Commands that end while no server is there."""
        luck = chance(self._seed, number, "commands")
        with self._ledger.lock:
            waiting = [one for one in self._ledger.commands.values() if one.id and luck.random() < 0.5]
        signal_commands(self.home, waiting)

    def close(self) -> bool:
        """Everything goes in good order, and nothing is left; whether it was so."""
        before = len(self._told.wrong)
        try:
            with Dsec(self.home.url) as owner:
                for snapshot in owner.snapshots.list():
                    owner.snapshots.remove(snapshot.id)
                for info in owner.sandboxes.list():
                    owner.sandboxes.get(info.id).destroy()
            assert self.server.stop() == 0
            assert verify_journal(self.home.engine) == ()
            until(lambda: not self.home.traces(), f"removal of {self.home.traces()}", 10)
            if "container" in self._levels:
                layers = anyio.run(_layers, self.home.engine)
                assert layers == (), f"layers are left: {layers}"
        except (AssertionError, DsecError, OSError) as error:
            self._told.wrong.append(f"when all was destroyed: {error!r}")
        finally:
            self.remove()
        return len(self._told.wrong) == before

    def remove(self) -> None:
        """Every process of it, however the run went."""
        self.server.kill()
        self.nursery.close()
        self.home.kill_spawners()
        for pid in self.home.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def erase(self) -> None:
        """The files, which a run that failed keeps."""
        shutil.rmtree(self.home.path, ignore_errors=True)
        shutil.rmtree(self._asked.witnesses, ignore_errors=True)


def _join(client: clients.Client, seconds: float) -> bool:
    """Whether it goes on for longer."""
    client.thread.join(seconds)
    return client.thread.is_alive()


def _doing(client: clients.Client) -> str:
    """Where it waits."""
    frame = sys._current_frames().get(client.thread.ident or 0)
    return (
        f"{client.thread.name}\n{''.join(traceback.format_stack(frame)[-8:])}"
        if frame
        else "nothing any more"
    )


async def _layers(engine: Path) -> tuple[str, ...]:
    layers = await BtrfsLayers.open(engine, size_bytes=POOL_BYTES, durable=True)
    try:
        return await layers.list()
    finally:
        await layers.close()
