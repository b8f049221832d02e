"""What DSec does, shown on this machine: `make demo`.

Every level of isolation that can be had here runs the same steps. Each says what happened and how long it took. Whatever a
program in a sandbox claims is checked from outside it; attacks are first run with nothing around them, and must succeed there.
The exit code is 0 when every step went as expected.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dsec import Dsec, Level, Limits
from dsec.client.sync import Sandbox
from dsec.errors import DsecError, IsolationUnavailable
from dsec.model.sandbox import MIB, Flag, State

INSIDE = Path(__file__).with_name("inside")
TIMEOUT = 2.0
PATIENCE = 20.0
TIGHT = Limits(pids=64, memory_mib=128, disk_mib=64)


class Unexpected(Exception):
    """A step went otherwise than it should."""


class NotHere(Exception):
    """This level does not promise that, and says so by a missing flag."""


def expect(fact: object, otherwise: str) -> None:
    if not fact:
        raise Unexpected(otherwise)


def needs(sandbox: Sandbox, flag: Flag) -> None:
    if flag not in sandbox.flags:
        raise NotHere(f"not tried: level {sandbox.info.spec.level} does not promise {flag} here")


# --- the table


@dataclass
class Report:
    """Prints a row for each step, and remembers which went wrong."""

    wrong: list[str] = field(default_factory=list)

    def head(self, title: str) -> None:
        print(f"\n{title}\n{'-' * len(title)}", flush=True)

    def step(self, name: str, work: Callable[[], str]) -> None:
        begun = time.perf_counter()
        mark = " "
        try:
            said = work()
        except NotHere as reason:
            mark, said = "-", str(reason)
        except (Unexpected, DsecError, OSError, subprocess.SubprocessError) as error:
            mark, said = "!", f"NOT AS EXPECTED: {error}"
            self.wrong.append(name)
        took = (time.perf_counter() - begun) * 1000
        print(f"{mark} {name:<15} {took:>8.1f} ms  {said}", flush=True)


# --- the view from outside


def processes(word: str) -> set[int]:
    """Processes of this machine with that word among their arguments."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                pass  # it has just ended
    return found


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def until(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return done


def uncontained(*command: str) -> bytes:
    """What the same attack brings home with nothing around it."""
    program = [sys.executable, str(INSIDE / "hostile.py"), *command]
    return subprocess.run(program, capture_output=True, timeout=PATIENCE, check=True).stdout


# --- ordinary work


@dataclass
class Work:
    """Steps in a sandbox that means well."""

    sandbox: Sandbox
    here: Path

    def hello(self) -> str:
        done = self.sandbox.exec("id -u; pwd; ls / | wc -l; exit 3")
        uid, directory, _ = done.text.split()
        expect(done.exit_code == 3, f"exit code {done.exit_code}, not 3")
        return f"as uid {uid} in {shorter(directory)}; exit code 3 came back"

    def index(self) -> str:
        self.sandbox.files.upload(INSIDE, "programs")
        done = self.sandbox.exec(["python3", "programs/wordcount.py", "."], timeout=60)
        expect(done.ok, done.stderr.decode(errors="replace"))
        return f"two processes wrote and counted 40 texts: {done.text.strip()}, in SQLite"

    def files(self) -> str:
        files, blob = self.sandbox.files, secrets.token_bytes(MIB)
        files.write("data/blob", blob)
        expect(files.read("data/blob") == blob, "what was read is not what was written")
        expect([entry.name for entry in files.list("data")] == ["blob"], "the directory lists something else")
        moved = files.download("texts", self.here / "texts")
        files.download("index.sqlite", self.here / "index.sqlite")
        return f"1 MiB written and read back; {moved.entries} entries, {moved.bytes:,} bytes downloaded"

    def recount(self) -> str:
        texts = sorted((self.here / "texts").iterdir())
        counted = Counter(word for text in texts for word in text.read_text().split())
        with sqlite3.connect(self.here / "index.sqlite") as index:
            indexed = dict(index.execute("SELECT word, count FROM word"))
        expect(counted.total() == 80_000 and counted == indexed, "the index does not match the texts")
        return f"counted again here: all {len(indexed)} words of the index agree"

    def timeout(self) -> str:
        word = secrets.token_hex(8)
        command = self.sandbox.start(["python3", "programs/daemon.py", word], timeout=TIMEOUT)
        expect(until(lambda: len(processes(word)) == 3, TIMEOUT), "its three processes were never seen")
        done = command.wait()
        left = processes(word)
        expect(done.timed_out and not left, f"timed_out={done.timed_out}, left {sorted(left)}")
        expect(self.sandbox.exec("echo on").text == "on\n", "the sandbox is not usable any more")
        return f"after {done.duration:.2f} s all 3 processes are dead, the daemon that forked twice too"

    def pause(self) -> str:
        needs(self.sandbox, Flag.PAUSE)
        word = secrets.token_hex(8)
        command = self.sandbox.start(["python3", "-c", "while True: pass", word])
        expect(until(lambda: len(processes(word)) == 1), "the busy process was never seen")
        (busy,) = processes(word)
        expect(runs(busy), "the busy process used no CPU time")
        self.sandbox.pause()
        stopped = not runs(busy, 0.3)
        self.sandbox.resume()
        expect(stopped, "it used CPU time while paused")
        expect(runs(busy), "it used no CPU time after resume")
        command.kill()
        command.wait()
        return "a busy process used no CPU time for 0.3 s, then went on"

    def scratch(self) -> str:
        needs(self.sandbox, Flag.SCRATCH)
        before = self.sandbox.exec("ls -R | sha256sum").stdout
        done = self.sandbox.exec("rm -rf ./* && ls | wc -l", scratch=True)
        expect(done.text.strip() == "0", f"nothing was removed in the copy: {done}")
        expect(self.sandbox.exec("ls -R | sha256sum").stdout == before, "the sandbox itself was changed")
        return "rm -rf * emptied a throw-away copy; here nothing is missing"

    def snapshot(self) -> str:
        needs(self.sandbox, Flag.SNAPSHOTS)
        before, kept = self.sandbox.exec("ls -R | sha256sum").stdout, self.sandbox.snapshot()
        self.sandbox.exec("rm -rf ./*; touch residue")
        self.sandbox.rollback(kept)
        expect(self.sandbox.exec("ls -R | sha256sum").stdout == before, "it did not go back to what it was")
        return f"stood still for {kept.paused * 1000:.1f} ms; after rm -rf * it went back, and nothing is missing"

    def fork(self) -> str:
        needs(self.sandbox, Flag.SNAPSHOTS)
        children = self.sandbox.fork(10)
        for number, child in enumerate(children):
            child.exec(f"echo {number} > mine")
        wrote = [child.files.read("mine") for child in children]
        expect(wrote == [b"%d\n" % number for number in range(10)], "a child sees what another wrote")
        expect(not self.sandbox.files.exists("mine"), "a child wrote to its parent")
        for child in children:
            child.destroy()
        return "10 sandboxes began with these files and changed them, each for itself"


def runs(pid: int, seconds: float = 5.0) -> bool:
    """It uses CPU time within so long."""
    ticks = cpu_ticks(pid)
    return until(lambda: cpu_ticks(pid) > ticks, seconds)


def shorter(path: str) -> str:
    return path if len(path) < 30 else f"…/{Path(path).name}"


# --- a hostile program


@dataclass
class Attacks:
    """Attacks in a sandbox with tight limits; the other sandbox is its neighbour."""

    sandbox: Sandbox
    neighbour: Sandbox
    here: Path

    def attack(self, *command: str, user: str = "") -> tuple[str, str]:
        """Standard output and the errors, shortened to one line."""
        done = self.sandbox.exec(["python3", "hostile.py", *command], timeout=PATIENCE, user=user)
        expect(not done.timed_out, "it did not end")
        errors = [line.rpartition(": ")[2] for line in done.stderr.decode(errors="replace").splitlines()]
        return done.stdout.decode(errors="replace").strip(), ", ".join(dict.fromkeys(errors))

    def bomb(self) -> str:
        needs(self.sandbox, Flag.PIDS_LIMIT)
        word = secrets.token_hex(8)
        command = self.sandbox.start(["python3", "hostile.py", "bomb", word], timeout=TIMEOUT)
        end = time.monotonic() + PATIENCE
        most = answers = 0
        while time.monotonic() < end and (now := len(processes(word))) >= min(most, 1):
            most = max(most, now)
            answers += self.neighbour.exec(["true"]).ok
            time.sleep(0.05)
        done = command.wait()
        expect(8 < most <= TIGHT.pids, f"{most} processes were seen")
        expect(done.timed_out and not processes(word), f"timed_out={done.timed_out}, some may live")
        expect(answers, "its neighbour could not work meanwhile")
        return f"at most {most} processes (limit {TIGHT.pids}), all dead at its time-out; its neighbour ran {answers} commands"

    def secrets(self) -> str:
        secret = secrets.token_hex(16)
        canary = self.here / "secret"
        canary.touch(mode=0o600)
        canary.write_text(secret)
        paths = [str(canary), "/etc/shadow"]
        expect(secret.encode() in uncontained("read", *paths), "even outside it could not read the secret")
        shadow = uncontained("read", "/etc/shadow").decode().strip()
        users = ["user", "root"] if Flag.USERS in self.sandbox.flags else [""]
        refused: list[str] = []
        for user in users:
            got, errors = self.attack("read", *paths, user=user)
            refused += errors.split(", ")
            expect(secret not in got and not (shadow and shadow in got), "it read a secret of this machine")
        who = f" as {' and as '.join(users)}" if users[0] else ""
        return f"no private file and no /etc/shadow of this machine{who}: {', '.join(dict.fromkeys(refused))}"

    def fill(self) -> str:
        needs(self.sandbox, Flag.DISK_QUOTA)
        written, error = self.attack("fill", str(4 * TIGHT.disk_mib))
        used = self.sandbox.metrics().disk_bytes
        expect(0 < int(written) <= TIGHT.disk_mib, f"it wrote {written} MiB")
        expect(used <= TIGHT.disk_mib * MIB, f"{used} bytes are used")
        self.sandbox.files.remove("filler")
        return f"{error} after {written} MiB (limit {TIGHT.disk_mib} MiB)"

    def memory(self) -> str:
        done = self.sandbox.exec(["python3", "hostile.py", "memory", "1024"], timeout=PATIENCE)
        got = int(done.text.split()[-1])
        expect(not done.ok and got < TIGHT.memory_mib, f"it got {got} MiB")
        how = "killed by the kernel, reported as oom" if done.oom else "refused (MemoryError)"
        return f"{how} after {got} MiB (limit {TIGHT.memory_mib} MiB)"

    def network(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(PATIENCE)
            port = str(listener.getsockname()[1])
            expect(b"connected" in uncontained("connect", port, "127.0.0.1"), "even outside nobody answered")
            listener.accept()[0].close()
            got, errors = self.attack("connect", port, "127.0.0.1", "192.0.2.1")
            listener.settimeout(0)
            try:
                listener.accept()[0].close()
                raise Unexpected("it reached this machine")
            except BlockingIOError:
                pass
        expect("connected" not in got, got)
        return f"no server of this machine, no address outside: {errors}"

    def after(self) -> str:
        expect(self.sandbox.exec("echo on").text == "on\n", "the attacked sandbox is not usable")
        expect(self.neighbour.exec("ls index.sqlite").ok, "its neighbour lost a file")
        return "the sandbox still works, and so does its neighbour"


# --- the whole


def destroy(engine: Dsec, *sandboxes: Sandbox) -> str:
    for sandbox in sandboxes:
        held = Path(sandbox.info.workdir) if sandbox.info.spec.level is Level.PROCESS else None
        expect(sandbox.exec(["true"]).ok, "it did not live")
        sandbox.destroy()
        expect(sandbox.inspect().state is State.GONE, f"state {sandbox.inspect().state}")
        expect(not processes(sandbox.id), "a process of it lives")
        expect(held is None or not held.exists(), f"{held} is left")
    mounts = Path("/proc/self/mountinfo").read_text()
    expect(not any(sandbox.id in mounts for sandbox in sandboxes), "a mount of it is left")
    expect(not engine.problems(), f"{engine.problems()}")
    return "no process, mount or directory of them is left"


NAME = "dsec-demo"  # templates are shared by all engines of a user: it is taken away again
TEMPLATE = f"""
version: 1.0
name: {NAME}
runtime: {{base: system, env: {{GREETING: hello}}, workdir: /tmp}}
resources: {{profile: chat}}
strategy: {{timezone: Asia/Shanghai, max_steps: 20}}
""".encode()


def template(engine: Dsec) -> str:
    try:
        return alike(engine)
    finally:
        engine.templates.remove(NAME)


def alike(engine: Dsec) -> str:
    built = engine.templates.build(TEMPLATE)
    expect(engine.templates.build(TEMPLATE).digest == built.digest, "the same template has another digest")
    seen = set()
    for _ in range(3):
        with engine.sandboxes.create(built.reference) as run:
            seen.add(run.exec("pwd; echo $GREETING; date +%Z; ls; touch residue").text)
    expect(seen == {"/tmp\nhello\nCST\n"}, f"its runs began with {seen}")
    fields = ", ".join(note.field for note in built.unenforced)
    return f"3 runs began alike, each after one that left a file; declared, not enforced: {fields}"


def show(engine: Dsec, report: Report, level: Level, here: Path) -> None:
    here.mkdir()
    box, target = engine.sandboxes.create(level=level), engine.sandboxes.create(level=level, limits=TIGHT)
    if Flag.LAYERS in box.flags:
        report.step("template", lambda: template(engine))
    with box, target:
        work, attacks = Work(box, here), Attacks(target, box, here)
        report.step("hello", work.hello)
        report.step("real work", work.index)
        report.step("files", work.files)
        report.step("checked here", work.recount)
        report.step("time-out", work.timeout)
        report.step("pause, resume", work.pause)
        report.step("scratch exec", work.scratch)
        report.step("snapshot, back", work.snapshot)
        report.step("fork", work.fork)
        target.files.upload(INSIDE / "hostile.py", "hostile.py")
        report.step("fork bomb", attacks.bomb)
        report.step("steal secrets", attacks.secrets)
        report.step("fill the disk", attacks.fill)
        report.step("take memory", attacks.memory)
        report.step("use a network", attacks.network)
        report.step("afterwards", attacks.after)
        report.step("destroy", lambda: destroy(engine, box, target))


def shown(engine: Dsec, report: Report, level: Level, here: Path) -> bool:
    """Show a level. False when this machine or user cannot have it."""
    report.head(f"level {level}")
    refused: list[IsolationUnavailable] = []

    def create() -> str:
        try:
            with engine.sandboxes.create(level=level) as sandbox:
                expect(sandbox.exec(["true"]).ok, "/bin/true failed")
        except IsolationUnavailable as reason:
            refused.append(reason)
            if os.geteuid() == 0:
                raise
            raise NotHere(f"skipped: {reason}") from reason
        first = "; the very first also builds the base image" if level is Level.CONTAINER else ""
        return f"made, used and destroyed{first}"

    before = len(report.wrong)
    report.step("one sandbox", create)
    works = not refused and len(report.wrong) == before
    if works:
        show(engine, report, level, here / level)
    return works


def opened(engine: Dsec) -> str:
    engine.open()
    return "a durable engine, with its journal"


def audit(home: Path) -> str:
    dsec, env = Path(sys.executable).with_name("dsec"), {**os.environ, "DSEC_HOME": str(home)}
    checked = subprocess.run(
        [dsec, "audit", "verify", "--json"], env=env, capture_output=True, timeout=60, check=False
    )
    expect(checked.returncode == 0, checked.stdout.decode() + checked.stderr.decode())
    expect(json.loads(checked.stdout)["sound"], "the journal is not sound")
    log = subprocess.run(
        [dsec, "audit", "log", "--json"], env=env, capture_output=True, timeout=60, check=True
    )
    return f"{len(log.stdout.splitlines())} records of all that was done; every hash and signature is right"


def main() -> int:
    report = Report()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dsec-demo-") as top:
        home, here = Path(top, "home"), Path(top, "here")
        here.mkdir()
        home.mkdir()
        report.head("engine")
        engine = Dsec(home / "engine")
        report.step("open", lambda: opened(engine))
        with engine:
            levels = [
                level for level in (Level.CONTAINER, Level.PROCESS) if shown(engine, report, level, here)
            ]
        report.head("journal")
        report.step("audit", lambda: audit(home))
    print(f"\n{time.perf_counter() - begun:.1f} s in all; ", end="")
    if report.wrong or not levels:
        print(f"NOT AS EXPECTED: {', '.join(report.wrong) or 'no level of isolation works here'}")
        return 1
    print(f"everything went as expected at level {' and '.join(levels)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
