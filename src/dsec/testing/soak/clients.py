"""Those who ask a server for everything at once, and keep in a ledger what they were told."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec import Dsec
from dsec.client.sync import Sandbox
from dsec.errors import DsecError, RuntimeUnavailable
from dsec.model.sandbox import Flag, State
from dsec.model.snapshots import SnapshotInfo
from dsec.testing.crashes import until
from dsec.testing.soak.ledger import AWAKE, Command, Known, Ledger
from dsec.testing.soak.plan import chance
from dsec.testing.soak.twice import made_twice

MOST: Final = 5
"""Sandboxes of a project beyond which one is destroyed before another is made."""
LABEL: Final = "soak"
RAN: Final = "ran"
WITNESS: Final = "/witness"
_EXIT: Final = 5
_OPENS: Final = 60.0  # seconds for a client to find the server
_PIECE: Final = 40_000  # bytes of an upload, at most
_CROWDED: Final = ("busy", "over_quota", "conflict")
_STRUCK: Final = ("runtime_unavailable", "unknown_outcome")
_ENDED: Final = ("not_found", "sandbox_failed")


def content_of(token: str) -> bytes:
    """What an upload of that name has in it."""
    luck = chance(0, token)
    return (token.encode() * 4096)[: luck.randint(1, _PIECE)]


@dataclass(slots=True)
class Server:
    """Where it is, and who asks: keys of projects, and one of everything."""

    url: str
    socket: str
    admin: str
    keys: dict[str, str]
    levels: tuple[str, ...]
    witnesses: Path
    stop: threading.Event = field(default_factory=threading.Event)


class Client:
    """One of them: of one project, one act after another.

    Args:
        name: its own, of the round: part of all its tokens. seed, number: of the run and the round.
    """

    def __init__(
        self, server: Server, ledger: Ledger, project: str, name: str, seed: int, number: int
    ) -> None:
        self._server = server
        self._ledger = ledger
        self._project = project
        self._luck = chance(seed, number, project, name)
        self._prefix = f"r{number}-{project[0]}{name}"
        self._count = 0
        self.thread = threading.Thread(target=self._run, name=self._prefix, daemon=True)

    def _run(self) -> None:
        acts, weights = list(_ACTS), list(_ACTS.values())
        try:
            with (
                self._opened(self._server.keys[self._project]) as self._dsec,
                self._opened(self._server.admin) as self._admin,
            ):
                while not self._server.stop.is_set():
                    self._try(self._luck.choices(acts, weights)[0])
        except BaseException:  # noqa: BLE001 - told to the judge
            self._wrong(f"a client ended:\n{traceback.format_exc()}")

    def _opened(self, key: str) -> Dsec:
        """A client, when the server is there."""
        found = until(lambda: _open(self._server.url, key), "a server to begin with", _OPENS)
        assert found is not None
        return found

    def _try(self, act: Callable[[Client], str]) -> None:
        """One act, and what it came to."""
        try:
            name = act(self)
        except DsecError as error:
            with self._ledger.lock:
                self._ledger.refused[error.code] += 1
                if error.code not in (*_CROWDED, *_STRUCK, *_ENDED):
                    self._wrong(f"{act.__name__}: {error!r}\n{traceback.format_exc(limit=-6)}")
            if error.code in _STRUCK:
                self._server.stop.wait(0.05)
            return
        if name:
            with self._ledger.lock:
                self._ledger.acts[name] += 1

    def _wrong(self, text: str) -> None:
        with self._ledger.lock:
            self._ledger.wrong.append(f"{self._prefix} ({self._project}): {text}")

    def _token(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"

    def _some(self, flag: Flag | None = None) -> tuple[Known, Sandbox] | None:
        """A sandbox of the project; None: there is none of that kind."""
        living = self._ledger.living(self._project)
        if flag is not None:
            living = [one for one in living if one.level == "container"]
        if not living:
            return None
        one = self._luck.choice(living)
        with self._alive(one):
            return one, self._dsec.sandboxes.get(one.id)

    @contextmanager
    def _alive(self, one: Known) -> Iterator[None]:
        """An act on a sandbox that lives: that it has ended is in order only where that may be."""
        try:
            yield
        except DsecError as error:
            with self._ledger.lock:
                if error.code in _ENDED and not (one.ending or one.shaky or one.rolling):
                    self._wrong(f"{one.id}, which nobody ended: {error!r}\n{traceback.format_exc(limit=-6)}")
            raise

    # Making

    def create(self) -> str:
        """One, in a way that chance chooses; another goes first where there are many."""
        if len(self._ledger.living(self._project)) >= MOST:
            return self.destroy()
        token = self._token()
        level = self._luck.choice(self._server.levels)
        with self._ledger.lock:
            self._ledger.open_creates.add(token)
        try:
            made = self._made(token, level, self._luck.random())
        except DsecError as error:
            if error.code in _CROWDED:  # nothing of it is there
                self._ledger.open_creates.discard(token)
            raise
        with self._ledger.lock:
            self._ledger.open_creates.discard(token)
            self._ledger.sandboxes[made.id] = made
        return "create"

    def _made(self, token: str, level: str, luck: float) -> Known:
        labels = {LABEL: token}
        if luck < 0.25 and level == "container":
            place = self._server.witnesses / token
            place.mkdir(mode=0o777)
            place.chmod(0o777)
            made = self._admin.sandboxes.create(
                level=level, labels=labels, project=self._project, volumes=[f"{place}:{WITNESS}"]
            )
            return Known(made.id, self._project, level, witness=str(place / RAN), states=AWAKE)
        if luck < 0.4:
            made = self._dsec.sandboxes.create(level=level, labels=labels, cold=True)
            return Known(made.id, self._project, level, states=frozenset({State.COLD}))
        if luck < 0.6:
            key = self._server.keys[self._project]
            found = made_twice(self._server.url, key, {"level": level, "labels": labels}, token)
            return Known(found, self._project, level, states=AWAKE)
        if luck < 0.75 and (snapshot := self._snapshot()) is not None:
            made = self._dsec.sandboxes.create(snapshot, labels=labels)
            traces = self._ledger.snapshots[snapshot.id][1].copy()
            return Known(made.id, self._project, "container", states=AWAKE, ran=traces)
        made = self._dsec.sandboxes.create(level=level, labels=labels)
        return Known(made.id, self._project, level, states=AWAKE)

    def _snapshot(self) -> SnapshotInfo | None:
        """One of the project that nobody drops: the last."""
        with self._ledger.lock:
            mine = [one for one, (project, _) in self._ledger.snapshots.items() if project == self._project]
        return self._dsec.snapshots.get(mine[-1]) if mine else None

    def fork(self) -> str:
        if (found := self._some(Flag.SNAPSHOTS)) is None or len(self._ledger.living(self._project)) > MOST:
            return ""
        one, sandbox = found
        count = self._luck.randint(1, 2)
        with self._ledger.lock:
            self._ledger.open_forks[one.id] += count
            before, rolls = one.ran.copy(), one.rolls
        with self._ledger.touching(one), self._alive(one):
            children = sandbox.fork(count)
        with self._ledger.lock:
            self._ledger.open_forks[one.id] -= count
            traces = one.kept(before, rolls)
            for child in children:
                self._ledger.sandboxes[child.id] = Known(
                    child.id, self._project, one.level, states=AWAKE, ran=traces.copy()
                )
        return "fork"

    def snapshot(self) -> str:
        if (found := self._some(Flag.SNAPSHOTS)) is None:
            return ""
        one, sandbox = found
        with self._ledger.lock:
            before, rolls = one.ran.copy(), one.rolls
        with self._ledger.touching(one), self._alive(one):
            taken = sandbox.snapshot()
        with self._ledger.lock:
            self._ledger.snapshots[taken.id] = (self._project, one.kept(before, rolls))
        return "snapshot"

    def drop(self) -> str:
        """The oldest snapshot, where there are several."""
        with self._ledger.lock:
            mine = [one for one, (project, _) in self._ledger.snapshots.items() if project == self._project]
            if len(mine) < 4:
                return ""
            del self._ledger.snapshots[mine[0]]
        self._dsec.snapshots.remove(mine[0])
        with self._ledger.lock:
            self._ledger.dropped.add(mine[0])
        return "snapshot.remove"

    # Doing

    def execute(self) -> str:
        if (found := self._some()) is None:
            return ""
        one, sandbox = found
        token, code = self._token(), self._luck.randint(0, 100)
        with self._ledger.lock:
            rolls = one.to_come(token)
        with self._ledger.touching(one), self._alive(one):
            if self._luck.random() < 0.5:
                result = sandbox.exec(f"{_traced(one, token)}echo {token}; exit {code}")
            else:
                result = sandbox.start(f"{_traced(one, token)}echo {token}; exit {code}").wait()
        with self._ledger.lock:
            one.done(token, rolls)
            one.outside.add(token)
            one.execs[result.id] = code
            whole = result.stdout == f"{token}\n".encode() or (result.truncated and result.dropped > 0)
            if result.exit_code != code or not whole:
                self._wrong(f"{one.id}: {token} should have ended with {code}: {result}")
        return "exec"

    def wait(self) -> str:
        """Start a command that goes on until it is signalled."""
        if (found := self._some()) is None:
            return ""
        one, sandbox = found
        token = self._token()
        script = f"trap 'kill $! 2>/dev/null; echo over; exit {_EXIT}' USR1; {_traced(one, token)}sleep 100000 & wait"
        command = Command("", script, one.id)
        with self._ledger.lock:
            one.to_come(token)
            command.sure = not one.enders
            self._ledger.commands[token] = command
        try:
            with self._ledger.touching(one), self._alive(one):
                command.id = sandbox.start(script).id
        except DsecError:
            command.sure = False
            raise
        return "start"

    def upload(self) -> str:
        if (found := self._some()) is None:
            return ""
        one, sandbox = found
        token = self._token()
        with self._ledger.lock:
            rolls = one.to_come(f"/{token}")
        with self._ledger.touching(one), self._alive(one):
            sandbox.files.write(token, content_of(token))
        with self._ledger.lock:
            one.done(f"/{token}", rolls)
        return "upload"

    def decide(self) -> str:
        if (found := self._some()) is None:
            return ""
        one, sandbox = found
        with self._alive(one):
            sandbox.decide({"token": self._token()})
        return "decide"

    def look(self) -> str:
        self._dsec.sandboxes.list()
        return "list"

    # Moving

    def pause(self) -> str:
        if (found := self._some()) is None:
            return ""
        one, sandbox = found
        with self._ledger.moving(one, frozenset({State.PAUSED})), self._alive(one):
            sandbox.pause()
        return "pause"

    def resume(self) -> str:
        if (found := self._some()) is None:
            return ""
        one, sandbox = found
        with self._ledger.moving(one, AWAKE), self._alive(one):
            sandbox.resume()
        return "resume"

    def hibernate(self) -> str:
        if (found := self._some(Flag.HIBERNATE)) is None:
            return ""
        one, sandbox = found
        dormant = frozenset({State.HIBERNATED, State.COLD})
        with self._ledger.moving(one, dormant, ends=True), self._alive(one):
            sandbox.hibernate()
        return "hibernate"

    def rollback(self) -> str:
        if (found := self._some(Flag.SNAPSHOTS)) is None or (snapshot := self._snapshot()) is None:
            return ""
        one, sandbox = found
        with self._ledger.lock:
            kept = self._ledger.snapshots.get(snapshot.id)
            if kept is None:
                return ""
            one.roll(kept[1])
        try:
            with self._ledger.moving(one, AWAKE, ends=True), self._alive(one):
                sandbox.rollback(snapshot)
        except DsecError:
            with self._ledger.lock:
                one.rolling -= 1
                one.shaky = True
            raise
        with self._ledger.lock:
            one.rolled(kept[1])
        return "rollback"

    def destroy(self) -> str:
        living = self._ledger.living(self._project)
        if len(living) < 2:
            return ""
        one = self._luck.choice(living)
        with self._ledger.lock:
            one.ending = True
            self._ledger.unsure(one.id)
        self._dsec.sandboxes.get(one.id).destroy()
        with self._ledger.lock:
            one.ended, one.states = True, frozenset({State.GONE})
        return "destroy"


def _open(url: str, key: str) -> Dsec | None:
    """None: it is not there now."""
    try:
        return Dsec(url, api_key=key).open()
    except RuntimeUnavailable:
        return None


def _traced(one: Known, token: str) -> str:
    """Words of a shell that leave a token."""
    outside = f"echo {token} >> {WITNESS}/{RAN}; " if one.witness else ""
    return f"echo {token} >> {RAN}; {outside}"


_ACTS: Final[dict[Callable[[Client], str], int]] = {
    Client.create: 12,
    Client.execute: 24,
    Client.wait: 5,
    Client.upload: 10,
    Client.decide: 4,
    Client.look: 3,
    Client.pause: 5,
    Client.resume: 9,
    Client.hibernate: 5,
    Client.snapshot: 5,
    Client.drop: 3,
    Client.fork: 4,
    Client.rollback: 4,
    Client.destroy: 6,
}
"""Weights."""
