"""What must be true when a server is back and nobody asks any more, asked of the server, of the kernel and of files."""

from __future__ import annotations

import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsec import Dsec
from dsec.client.sync import Sandbox
from dsec.errors import DsecError
from dsec.model.sandbox import SandboxInfo, State
from dsec.runtimes.homes import AHEAD, PROMISED
from dsec.testing.crashes import Home, until
from dsec.testing.soak.clients import LABEL, RAN, content_of
from dsec.testing.soak.ledger import ALIVE, Command, Known, Ledger
from dsec.wiring import verify_journal

LIVE: Final = (State.RUNNING, State.PAUSED)
_KEPT: Final = (*LIVE, State.HIBERNATED, State.COLD)
_SETTLES: Final = 15.0
_FILES: Final = 3
"""Uploads of a sandbox whose content is compared in a round; of all others that they are there."""


def signal_commands(home: Home, commands: list[Command]) -> int:
    """Let these end, whoever sees it; how many there were. Those of frozen sandboxes end when they go on."""
    count = 0
    for command in commands:
        for pid in home.running(command.script):
            os.kill(pid, signal.SIGUSR1)
            command.ended = True
            count += 1
    return count


class Judge:
    """Of one round. What is wrong goes to the ledger.

    Args:
        owner: sees everything. tell: says what is wrong.
    """

    def __init__(self, home: Home, ledger: Ledger, owner: Dsec) -> None:
        self._home = home
        self._ledger = ledger
        self._owner = owner

    def all(self) -> None:
        """Everything, whatever else is wrong."""
        for question in (
            self.calm,
            self.states,
            self.strangers,
            self.destroyed,
            self.snapshots,
            self.usable,
            self.commands,
            self.records,
            self.witnesses,
            self.orphans,
            self.chain,
        ):
            self._ask(question)

    def _ask(self, question: Callable[[], None]) -> None:
        try:
            question()
        except (DsecError, AssertionError, OSError, ValueError):
            self._wrong(f"{question.__name__}:\n{traceback.format_exc(limit=-5)}")

    def _wrong(self, text: str) -> None:
        self._ledger.wrong.append(text)

    def _infos(self) -> dict[str, SandboxInfo]:
        return {info.id: info for info in self._owner.sandboxes.list()}

    def calm(self) -> None:
        """What is being cleaned up is done."""
        until(lambda: self._owner.problems() == (), f"no problems but {self._owner.problems()}", _SETTLES)

    def states(self) -> None:
        """Every acknowledged sandbox is there, as it must be."""
        infos = self._infos()
        for one in self._ledger.sandboxes.values():
            info = infos.get(one.id) or self._owner.sandboxes.get(one.id).info
            allowed = set(one.states) | ({State.GONE, State.STOPPING} if one.ending else set())
            if one.ending and not one.ended:
                allowed |= set(ALIVE)
            if one.shaky or one.ending:
                allowed |= {State.LOST, State.FAILED}
            if one.ended:
                allowed = {State.GONE} | (one.states & {State.LOST, State.FAILED})
            if info.state not in allowed:
                wanted = ", ".join(sorted(allowed))
                self._wrong(
                    f"{one.id} is {info.state} ({info.reason!r}), not {wanted}: {one}\n{self._last(one.id)}"
                )
            if info.state in (State.LOST, State.FAILED, State.GONE):
                one.ending = one.ended = True
                one.states = frozenset({info.state})
                self._ledger.unsure(one.id)
            else:
                one.shaky = False

    def _last(self, sandbox: str) -> str:
        """The end of what the journal says of it."""
        records = self._owner.sandboxes.get(sandbox).events(limit=10_000)[-12:]
        return "\n".join(
            f"    {each.seq} {each.act} {each.phase} {each.ref} {each.payload}"[:300] for each in records
        )

    def strangers(self) -> None:
        """What lives and was never acknowledged is the whole of one act whose end nobody knows; it is destroyed."""
        known = self._ledger.sandboxes
        found = [info for info in self._infos().values() if info.state in _KEPT and info.id not in known]
        made: Counter[str] = Counter()
        for info in found:
            token = info.spec.labels.get(LABEL, "")
            parents = [one for one in self._ledger.open_forks if info.id in self._children(one)]
            if parents:
                made[parents[0]] += 1
            elif token in self._ledger.open_creates:
                made[token] += 1
            else:
                self._wrong(f"nobody asked for {info.id}: {info}\n{self._last(info.id)}")
        for name, count in made.items():
            if count > self._ledger.open_forks.get(name, 1):
                self._wrong(f"{name} was made {count} times")
        for info in found:
            self._owner.sandboxes.get(info.id).destroy()
        self._ledger.open_forks.clear()
        self._ledger.open_creates.clear()

    def _children(self, parent: str) -> list[str]:
        records = self._owner.sandboxes.get(parent).events(limit=10_000)
        told = [each.payload.get("children") for each in records if each.act == "sandbox.fork"]
        return [str(child) for children in told if isinstance(children, list) for child in children]

    def destroyed(self) -> None:
        """What is alive of what was destroyed, or may have been, goes, and the kernel has what the server has."""
        for one in self._ledger.sandboxes.values():
            if one.ending and not one.ended:
                self._owner.sandboxes.get(one.id).destroy()
                one.ended, one.states = True, frozenset({State.GONE})

        def agree() -> bool:
            living = {one for one, info in self._infos().items() if info.state in LIVE}
            return living == set(self._home.inits())

        try:
            until(agree, "kernel and server agree", _SETTLES)
        except AssertionError:
            living = {one for one, info in self._infos().items() if info.state in LIVE}
            found = set(self._home.inits())
            self._wrong(
                f"recorded as living, and not there: {living - found}; there, and not recorded: {found - living}"
            )

    def snapshots(self) -> None:
        """Those that were acknowledged are there, and what was dropped is not."""
        there = {one.id for one in self._owner.snapshots.list()}
        for taken, (_, traces) in list(self._ledger.snapshots.items()):
            if taken not in there:
                self._wrong(f"snapshot {taken} is not there; it has {traces.must}")
                del self._ledger.snapshots[taken]
        for taken in self._ledger.dropped & there:
            self._wrong(f"snapshot {taken} was removed, and is there")
        self._ledger.dropped.clear()
        for taken in there - set(self._ledger.snapshots):  # and nobody was told; or half removed
            self._owner.snapshots.remove(taken)

    def usable(self) -> None:
        """Every sandbox does a command, and its files are those that they must be."""
        for one in self._ledger.living():
            try:
                self._usable(one)
            except (DsecError, AssertionError):
                self._wrong(
                    f"{one.id} cannot be used: {one}\n{traceback.format_exc(limit=-5)}\n{self._last(one.id)}"
                )

    def _usable(self, one: Known) -> None:
        sandbox = self._owner.sandboxes.get(one.id)
        if sandbox.info.state is State.PAUSED:
            sandbox.resume()
        script = f"test -e {RAN} && cat {RAN}; echo ---; ls"
        result = sandbox.exec(script)
        ran, _, names = result.stdout.decode().partition("---\n")
        one.states = frozenset({State.RUNNING})
        assert result.exit_code == 0, result
        lines = Counter(ran.split())
        twice = [token for token, count in lines.items() if count > 1]
        if twice:
            self._wrong(f"{one.id}: done more than once: {twice}")
        there = set(lines) | {f"/{name}" for name in names.split()}
        if missing := one.ran.must - there:
            self._wrong(
                f"{one.id}: acknowledged, and not in its files: {sorted(missing)}; {one}\n{self._last(one.id)}"
            )
        strange = {each for each in lines if each not in one.ran.must | one.ran.may}
        if strange:
            self._wrong(f"{one.id}: nobody asked for {sorted(strange)}")
        self._compare(sandbox, [name[1:] for name in sorted(one.ran.must & there) if name.startswith("/")])
        one.ran.must, one.ran.may = {token for token in one.ran.must | one.ran.may if token in there}, set()

    def _compare(self, sandbox: Sandbox, names: list[str]) -> None:
        for name in names[-_FILES:]:
            if sandbox.files.read(name) != content_of(name):
                self._wrong(f"{sandbox.id}: {name} is not what was uploaded")

    def commands(self) -> None:
        """Those that wait are running, those that were signalled have their true end, recorded once; all are then ended."""
        waiting = {token: one for token, one in self._ledger.commands.items() if one.id}
        for token, command in waiting.items():
            one = self._ledger.sandboxes[command.sandbox]
            if one.ended or one.ending or not command.sure:
                continue
            if not command.ended and not self._home.running(command.script):
                self._wrong(f"{token} in {one.id} does not run any more\n{self._last(one.id)}")
                command.sure = False
        signal_commands(self._home, [one for one in self._ledger.commands.values() if not one.ended])
        for token, command in waiting.items():
            if command.sure and not self._ledger.sandboxes[command.sandbox].ending:
                self._ended_truly(token, command)
        self._ledger.commands.clear()

    def _ended_truly(self, token: str, command: Command) -> None:
        sandbox = self._owner.sandboxes.get(command.sandbox)

        def ended() -> bool:
            return any(one.id == command.id and one.exit is not None for one in sandbox.execs())

        until(
            ended,
            f"the end of {token}, {command.id} in {command.sandbox}\n{self._last(command.sandbox)}",
            _SETTLES,
        )
        result = sandbox.attach(command.id).wait()
        whole = result.stdout == b"over\n" or (result.truncated and result.dropped > 0)
        if result.exit_code != 5 or not whole:
            self._wrong(f"{token} in {command.sandbox}: {result}\n{self._last(command.sandbox)}")
        self._ledger.sandboxes[command.sandbox].execs[command.id] = 5

    def records(self) -> None:
        """Every acknowledged command has one intent and one result, its true one."""
        for one in self._ledger.sandboxes.values():
            if not one.execs:
                continue
            records = self._owner.sandboxes.get(one.id).events(after=one.seen, limit=10_000)
            told: dict[str, list[object]] = {}
            for record in records:
                if record.act == "exec":
                    told.setdefault(record.ref, []).append(
                        record.payload.get("exit_code", record.phase.value)
                    )
            for exec_id, code in one.execs.items():
                if told.get(exec_id) != ["intent", code]:
                    self._wrong(
                        f"{one.id}: the journal says of {exec_id}, which ended with {code}: {told.get(exec_id)}"
                    )
            one.execs.clear()
            one.seen = records[-1].seq if records else one.seen

    def witnesses(self) -> None:
        """What was done outside of any layer was done once; and what was acknowledged, was."""
        for one in self._ledger.sandboxes.values():
            if not one.witness:
                continue
            path = Path(one.witness)
            lines = Counter(path.read_text().split() if path.exists() else [])
            if twice := [token for token, count in lines.items() if count > 1]:
                self._wrong(f"{one.id}: done more than once, as its witness says: {twice}")
            if missing := one.outside - set(lines):
                self._wrong(f"{one.id}: acknowledged, and its witness knows nothing of {sorted(missing)}")

    def orphans(self) -> None:
        """No directory of a sandbox is left that does not live, but for those that are made ahead."""
        try:
            until(lambda: not self._left(), "no directory of what is gone", _SETTLES)
        except AssertionError:
            self._wrong(f"left behind: {self._left()}")

    def _left(self) -> list[str]:
        infos = self._infos()
        kept = {one for one, info in infos.items() if info.state in (*_KEPT, State.PENDING, State.STOPPING)}
        found = [
            each
            for each in self._home.directories()
            if "/sb-" in each and not any(one in each for one in kept)
        ]
        ahead = [
            each for each in found if _ahead(Path(each)) and Path(each).name not in self._ledger.sandboxes
        ]
        return [each for each in found if each not in ahead or len(ahead) > AHEAD + PROMISED]

    def chain(self) -> None:
        damage = verify_journal(self._home.engine)
        if damage:
            self._wrong(f"the journal: {damage}")


def _ahead(path: Path) -> bool:
    """Whether it may be a directory of a sandbox to come: nothing is in it yet."""
    try:
        return sorted(os.listdir(path)) == ["home", "tmp"] and not any(
            os.listdir(path / one) for one in ("home", "tmp")
        )
    except OSError:
        return False
