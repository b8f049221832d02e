"""The `dsec` command as people and programs run it: real processes, real signals, a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dsec import Dsec, Settings
from dsec.model.ids import new_sandbox_id
from dsec.testing.serving import stop_server_of

pytestmark = pytest.mark.timeout(120)

DSEC = str(Path(sys.executable).with_name("dsec"))
PATIENCE = 60.0
POOL = 512 * 2**20
LEVELS = [pytest.param("container", marks=pytest.mark.needs_root), "process"]


class Cli:
    """Runs `dsec` with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "DSEC_HOME": str(home), "TERM": "xterm"}

    @contextlib.contextmanager
    def start(self, *arguments: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
        """A running `dsec`, killed at the end if it has not ended by then."""
        streams = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        with subprocess.Popen([DSEC, *arguments], env=self.env, **streams) as process:  # type: ignore[call-overload]
            try:
                yield process
            finally:
                process.kill()

    def __call__(self, *arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        source = subprocess.PIPE if stdin is not None else subprocess.DEVNULL
        with self.start(*arguments, stdin=source) as process:
            out, err = process.communicate(stdin, timeout=PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def ok(self, *arguments: str, stdin: bytes | None = None) -> str:
        done = self(*arguments, stdin=stdin)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout.decode()

    def json(self, *arguments: str) -> object:
        return json.loads(self.ok(*arguments, "--json"))


@pytest.fixture(scope="module")
def cli(image_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A home with a small pool of layers; the base image is the run's. The server that commands share runs from the beginning."""
    home = tmp_path_factory.mktemp("home")
    (home / "store").symlink_to(image_store)
    with Dsec(home / "engine", settings=Settings(images=image_store, pool_bytes=POOL, shelf=1)):
        pass
    made = Cli(home)
    made.ok("ls")
    yield made
    stop_server_of(home)


@pytest.fixture
def sandbox(cli: Cli) -> Iterator[str]:
    """A lasting sandbox of level `container`, made by one process and removed by another."""
    name = cli.ok("create", "--label", "test=cli").strip()
    yield name
    cli.ok("rm", name)


def read_until(stream: int, wanted: bytes, seconds: float = PATIENCE) -> bytes:
    """Output up to what is waited for."""
    seen = b""
    deadline = time.monotonic() + seconds
    while wanted not in seen:
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{wanted!r} did not come, but {seen!r}"
        try:
            piece = os.read(stream, 65536)
        except OSError:
            piece = b""
        assert piece, f"{wanted!r} did not come before the end of {seen!r}"
        seen += piece
    return seen


# --- run: exit codes and streams


@pytest.mark.parametrize("level", LEVELS)
def test_run_passes_output_and_exit_code_on(cli: Cli, level: str) -> None:
    done = cli("run", "--level", level, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


@pytest.mark.parametrize("level", LEVELS)
def test_run_tells_the_signal_that_ended_the_command(cli: Cli, level: str) -> None:
    assert cli("run", "--level", level, "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert cli("run", "--level", level, "--", "sh", "-c", "kill -TERM $$").returncode == 143


@pytest.mark.parametrize("level", LEVELS)
def test_run_ends_a_command_whose_time_is_up(cli: Cli, level: str) -> None:
    done = cli("run", "--level", level, "--timeout", "0.3", "--", "sleep", "100")
    assert done.returncode == 124
    assert b"longer than 0.3 s" in done.stderr


@pytest.mark.parametrize("level", LEVELS)
def test_run_passes_standard_input_on(cli: Cli, level: str) -> None:
    data = os.urandom(3_000_000)
    done = cli("run", "--level", level, "--", "sha256sum", stdin=data)
    assert done.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


@pytest.mark.needs_root
def test_run_passes_more_output_on_than_is_kept(cli: Cli) -> None:
    done = cli("run", "--", "head", "-c", "20000000", "/dev/zero")
    assert done.returncode == 0
    assert len(done.stdout) == 20_000_000
    assert not done.stdout.strip(b"\0")


@pytest.mark.needs_root
def test_run_takes_a_command_with_options_of_its_own(cli: Cli) -> None:
    assert cli.ok("run", "echo", "-n", "--level", "--", "x") == "--level -- x"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--", "no-such-program"], 127, b"there is no program no-such-program"),
        (["-w", "/nowhere", "--", "true"], 127, b"--workdir: there is no directory /nowhere"),
        (["-w", "/etc/passwd", "--", "true"], 126, b"--workdir: there is no directory /etc/passwd"),
        (["-w", "/tmp", "--", "./no"], 127, b"there is no program ./no"),
        (["--", "/etc/hostname"], 126, b"/etc/hostname could not be started: Permission denied"),
        (["--", "sh", "-c", "exit 127"], 127, b""),
    ],
)
def test_run_says_why_there_was_no_command(
    cli: Cli, level: str, arguments: list[str], code: int, words: bytes
) -> None:
    done = cli("run", "--level", level, *arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert bool(done.stderr) == bool(words), done.stderr


@pytest.mark.needs_root
def test_run_takes_variables_directory_user_and_limits(cli: Cli) -> None:
    words = ("-e", "A=b=c", "-w", "/tmp", "-u", "root", "--memory", "64", "--pids", "50", "--cpus", "0.5")
    said = cli.ok("run", *words, "--disk", "64", "--", "sh", "-c", "echo $A $(pwd) $(id -u)")
    assert said == "b=c /tmp 0\n"


@pytest.mark.needs_root
def test_run_with_a_read_only_root(cli: Cli) -> None:
    done = cli(
        "run", "--read-only", "-u", "root", "--", "sh", "-c", "echo x > /workspace/ok && echo x > /usr/no"
    )
    assert done.returncode != 0
    assert b"Read-only" in done.stderr


@pytest.mark.needs_root
def test_run_shows_volumes(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("hello")
    tmp_path.chmod(0o777)
    inside = "cat /mnt/in/given; echo written > /mnt/out/new; echo x > /mnt/in/no"
    done = cli("run", "-v", f"{tmp_path}:/mnt/in:ro", "-v", f"{tmp_path}:/mnt/out", "--", "sh", "-c", inside)
    assert done.stdout == b"hello"
    assert done.returncode != 0, "a read-only volume was written"
    assert (tmp_path / "new").read_text() == "written\n"
    assert not (tmp_path / "no").exists()


@pytest.mark.needs_root
def test_volumes_by_name(cli: Cli) -> None:
    assert cli.ok("volume", "create", "data", "--size", "16") == "data\n"
    assert cli("volume", "create", "data").returncode == 5
    assert cli("volume", "create", "Data").returncode == 2
    assert cli.ok("run", "-v", "data:/data", "--", "sh", "-c", "echo kept > /data/f") == ""
    id = cli.ok("create", "--ttl", "600", "-v", "data:/data").strip()
    assert cli.ok("exec", id, "cat", "/data/f") == "kept\n"
    busy = cli("run", "-v", "data:/data", "--", "true")
    assert (busy.returncode, id in busy.stderr.decode()) == (5, True)
    assert cli.ok("run", "-v", "data:/data:ro", "--", "cat", "/data/f") == "kept\n"
    found = cli.json("volume", "inspect", "data")
    assert isinstance(found, dict)
    assert (found["writer"], found["size_mib"], found["readers"]) == (id, 16, [])
    assert f"writer: {id}\n" in cli.ok("volume", "inspect", "data")
    assert id in cli.ok("volume", "ls")
    inspected = cli.json("inspect", id)
    assert isinstance(inspected, dict)
    assert inspected["volumes"] == [{"source": "data", "target": "/data", "read_only": False}]
    assert inspected["project"] == "default"
    assert cli("volume", "rm", "data").returncode == 5
    absent = cli("run", "--project", "other", "-v", "data:/data", "--", "true")
    assert (absent.returncode, b"volume create" in absent.stderr) == (4, True)
    assert cli("volume", "inspect", "data", "--project", "other").returncode == 4
    assert cli.json("volume", "ls", "--project", "other") == []
    cli.ok("rm", id)
    cli.ok("volume", "rm", "data")
    cli.ok("volume", "rm", "data")
    assert cli.json("volume", "ls") == []


@pytest.mark.needs_root
def test_run_finds_the_volumes_that_a_template_names(cli: Cli, tmp_path: Path) -> None:
    document = tmp_path / "names.yaml"
    document.write_text(
        "name: names\nversion: 1.0\nvolumes: [{name: seen, target: /seen, read_only: true}]\n"
    )
    cli.ok("template", "build", str(document))
    missing = cli("run", "-t", "names", "--", "true")
    assert (missing.returncode, b"seen" in missing.stderr) == (4, True)
    cli.ok("volume", "create", "seen")
    cli.ok("run", "-v", "seen:/seen", "--", "sh", "-c", "echo kept > /seen/f")
    assert cli.ok("run", "-t", "names", "--", "cat", "/seen/f") == "kept\n"
    assert cli("run", "-t", "absent", "--", "true").returncode == 4
    cli.ok("volume", "rm", "seen")


@pytest.mark.needs_root
def test_run_starts_from_a_snapshot(cli: Cli, sandbox: str) -> None:
    cli.ok("exec", sandbox, "--", "sh", "-c", "echo kept > f")
    snapshot = cli.ok("snapshot", sandbox).strip()
    assert cli.ok("run", "-t", snapshot, "--", "cat", "f") == "kept\n"
    assert cli.ok("ls", "-q").split() == [sandbox], "it ended with its command"
    cli.ok("rm", snapshot)


@pytest.mark.needs_root
def test_tags_are_taken_away_once(cli: Cli, tmp_path: Path) -> None:
    document = tmp_path / "once.yaml"
    document.write_text("name: once\nversion: 1.0\n")
    cli.ok("template", "build", str(document), "--tag", "v1")
    assert cli("template", "rm", "once").returncode == 4, "no tag `latest`"
    cli.ok("template", "rm", "once:v1")
    assert cli("template", "rm", "once:v1").returncode == 4


@pytest.mark.needs_root
def test_paths_of_the_machine_that_are_allowed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/f").write_text("hello")
    limited = Cli(cli.home)
    limited.env["DSEC_HOST_PATHS"] = f"{tmp_path}/in:/nowhere"
    assert limited.ok("run", "-v", f"{tmp_path}/in:/in:ro", "--", "cat", "/in/f") == "hello"
    done = limited("run", "-v", f"{tmp_path}:/in:ro", "--", "true")  # a server has what it was started with
    assert done.returncode == 77
    assert b"DSEC_HOST_PATHS" in done.stderr
    limited.env["DSEC_HOST_PATHS"] = ""
    assert limited("run", "-v", f"{tmp_path}/in:/in:ro", "--", "true").returncode == 77
    limited.env["DSEC_HOST_PATHS"] = "relative"
    assert limited("run", "--", "true").returncode == 2


@pytest.mark.parametrize("level", LEVELS)
def test_run_as_json(cli: Cli, level: str) -> None:
    done = cli(
        "run", "--json", "--level", level, "--", "sh", "-c", "cat; printf '\\377' >&2; exit 4", stdin=b"hi"
    )
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == 4
    assert found["stdout"] == {"data": "hi", "encoding": "utf-8"}
    assert found["stderr"] == {"data": "/w==", "encoding": "base64"}
    assert set(found) == {
        "id", "exit_code", "signal", "timed_out", "oom", "duration", "stdout", "stderr", "truncated", "dropped"
    }  # fmt: skip


@pytest.mark.needs_root
def test_a_reader_that_leaves_ends_the_run(cli: Cli) -> None:
    with cli.start("run", "--", "yes") as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"y\ny\n"
        process.stdout.close()
        assert process.wait(PATIENCE) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_no_harm(cli: Cli, level: str, closed: str, tmp_path: Path) -> None:
    inside = "read x; echo out; echo err >&2; exit 6"
    script = f'"$0" run --level {level} -- sh -c "{inside}" {closed}'
    done = subprocess.run(
        ["sh", "-c", script, DSEC], env=cli.env, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 6, done.stderr
    assert done.stdout == (b"" if "1>" in closed else b"out\n")


@pytest.mark.needs_root
def test_a_full_disk_below_our_output(cli: Cli) -> None:
    with open("/dev/full", "wb") as full, cli.start("run", "--", "echo", "hi", stdout=full) as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.startswith(b"dsec: No space left on device: standard output\n      hint: ")


# --- run: signals


@pytest.mark.parametrize("level", LEVELS)
def test_signals_go_to_the_command(cli: Cli, level: str) -> None:
    script = "trap 'echo got; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    with cli.start("run", "--level", level, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 9
        assert process.stdout.read() == b"got\n"


@pytest.mark.parametrize("level", LEVELS)
def test_a_hangup_ends_it_but_under_nohup(cli: Cli, level: str) -> None:
    script = "echo ready; sleep 1; echo whole"
    with cli.start("run", "--level", level, "--", "sh", "-c", script) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready")
        process.send_signal(signal.SIGHUP)
        assert process.wait(PATIENCE) == 128 + signal.SIGHUP
    words = ["nohup", DSEC, "run", "--level", level, "--", "sh", "-c", script]
    with subprocess.Popen(
        words, env=cli.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready")
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=PATIENCE)[0].split() == [b"whole"]


@pytest.mark.needs_root
def test_a_command_that_ignores_three_interrupts_is_killed(cli: Cli) -> None:
    with cli.start("run", "--", "sh", "-c", "trap '' INT; echo ready; sleep 100; sleep 100") as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready")
        for _ in range(3):
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert process.wait(PATIENCE) == 137


@pytest.mark.needs_root
def test_a_reader_that_stalls_cannot_hold_us(cli: Cli) -> None:
    with cli.start("run", "--", "yes") as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"y")
        time.sleep(0.3)  # now the pipe is full, and nobody reads it
        for _ in range(6):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert process.wait(PATIENCE) in (128 + signal.SIGINT, 137)
    cli.ok("gc")


@pytest.mark.needs_root
@pytest.mark.parametrize("delay", [0.5, 0.8, 1.1])
def test_an_interrupt_at_any_time_leaves_nothing(cli: Cli, delay: float) -> None:
    with cli.start("run", "--", "sleep", "100") as process:
        time.sleep(delay)  # may fall before, during or after the creation: the census is the test
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) in (130, -signal.SIGINT)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read() or process.returncode == -signal.SIGINT


@pytest.mark.needs_root
def test_what_a_killed_run_left_is_collected(cli: Cli) -> None:
    with cli.start("run", "--", "sh", "-c", "echo ready; sleep 100") as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready")
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while "removed" not in (said := cli.ok("gc")):
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


# --- run: a terminal


class Terminal:
    """A terminal of ours with `dsec` on it."""

    def __init__(self, cli: Cli, arguments: Sequence[str], rows: int = 33, cols: int = 101) -> None:
        self.ours, self.theirs = os.openpty()
        self.resize(rows, cols)
        self.before = termios.tcgetattr(self.theirs)
        self.process = subprocess.Popen(
            [
                "setsid",
                "--ctty",
                DSEC,
                *arguments,
            ],  # a session whose terminal it is: who resizes it signals us
            env=cli.env,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
        )

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("4H", rows, cols, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self.ours, text)

    def until(self, wanted: bytes) -> bytes:
        return read_until(self.ours, wanted)

    def restored(self) -> bool:
        return termios.tcgetattr(self.theirs) == self.before

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@contextlib.contextmanager
def terminal(cli: Cli, *arguments: str) -> Iterator[Terminal]:
    found = Terminal(cli, arguments)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("level", LEVELS)
def test_a_terminal_on_both_sides_is_passed_on(cli: Cli, level: str) -> None:
    with terminal(cli, "run", "--level", level, "-e", "PS1=$ ", "--", "sh") as term:
        term.until(b"$ ")
        assert not term.restored(), "it is raw while the command runs"
        term.type(b"stty size; test -t 0 && test -t 1 && echo TT''Y\r")
        assert b"33 101\r\n" in term.until(b"TTY\r\n")
        term.resize(40, 120)
        time.sleep(0.2)
        term.type(b"stty size; echo DO''NE\r")
        assert b"40 120\r\n" in term.until(b"DONE\r\n")
        term.type(b"sleep 100\r")
        term.until(b"sleep 100")
        time.sleep(0.3)
        term.type(b"\x03")  # the interrupt key ends the command inside, not us
        term.type(b"echo AL''IVE; exit 7\r")
        term.until(b"ALIVE")
        assert term.process.wait(PATIENCE) == 7
        assert term.restored()


@pytest.mark.needs_root
def test_a_terminal_is_put_back_when_we_are_ended(cli: Cli) -> None:
    with terminal(cli, "run", "--", "sh", "-c", "echo ready; exec sleep 100") as term:
        term.until(b"ready")
        assert not term.restored()
        term.process.send_signal(signal.SIGTERM)
        assert term.process.wait(PATIENCE) == 143
        assert term.restored()


@pytest.mark.needs_root
def test_no_terminal_when_none_is_wanted(cli: Cli) -> None:
    with terminal(cli, "run", "--no-tty", "--", "sh", "-c", "test -t 1 || echo none") as term:
        term.until(b"none")
        assert term.process.wait(PATIENCE) == 0
    assert cli("run", "--tty", "--", "sh", "-c", "test -t 0 && test -t 1").returncode == 0


# --- lasting sandboxes


@pytest.mark.needs_root
def test_a_sandbox_lives_across_processes(cli: Cli) -> None:
    name = cli.ok("create", "--ttl", "600", "--label", "a=b", "-e", "V=1").strip()
    cli.ok("exec", name, "--", "sh", "-c", "echo $V > kept")
    assert cli.ok("exec", name, "cat", "kept") == "1\n"
    listed = cli.json("ls")
    assert isinstance(listed, list)
    assert [(one["id"], one["state"], one["labels"]) for one in listed] == [(name, "running", {"a": "b"})]
    assert cli.ok("ls", "-q", "--label", "a=b") == f"{name}\n"
    assert cli.ok("ls", "-q", "--label", "a=c") == ""
    assert cli.json("rm", name) == [{"id": name, "error": None}]
    assert name not in cli.ok("ls")
    assert f"{name}  gone" in cli.ok("ls", "--all")
    assert cli("rm", name).returncode == 0, "twice is no error"
    done = cli("exec", name, "true")
    assert done.returncode in (4, 5)
    assert done.stderr.startswith(b"dsec: ")


def test_a_sandbox_of_level_process_lives_across_processes(cli: Cli) -> None:
    name = cli.ok("create", "--level", "process").strip()
    cli.ok("exec", name, "--", "sh", "-c", "echo 1 > kept")
    assert cli.ok("exec", name, "cat", "kept") == "1\n"
    cli.ok("rm", name)


@pytest.mark.needs_root
def test_inspect_tells_figures_and_guarantees(cli: Cli, sandbox: str) -> None:
    found = cli.json("inspect", sandbox)
    assert isinstance(found, dict)
    assert found["state"] == "running"
    assert "pid_namespace" in found["flags"]
    assert found["metrics"]["memory_bytes"] > 0
    assert found["limits"]["memory_mib"] == 512
    assert isinstance(found["created_at"], float)
    shown = dict(line.split(": ", 1) for line in cli.ok("inspect", sandbox).splitlines())
    assert shown["id"] == sandbox
    created = datetime.fromisoformat(shown["created_at"])
    assert created == datetime.fromtimestamp(int(found["created_at"]), UTC)
    assert shown["ended_at"] == shown["expires_at"] == "-"


@pytest.mark.needs_root
def test_exec_passes_streams_and_codes_on(cli: Cli, sandbox: str) -> None:
    done = cli(
        "exec",
        "-u",
        "root",
        "-w",
        "/tmp",
        "-e",
        "A=1",
        sandbox,
        "sh",
        "-c",
        "cat; id -u; pwd; echo $A; exit 5",
        stdin=b"in\n",
    )
    assert (done.returncode, done.stdout) == (5, b"in\n0\n/tmp\n1\n")
    assert cli("exec", "--timeout", "0.2", sandbox, "sleep", "9").returncode == 124


@pytest.mark.needs_root
def test_what_a_scratch_command_does_is_thrown_away(cli: Cli, sandbox: str) -> None:
    cli.ok("exec", sandbox, "--", "sh", "-c", "echo kept > file")
    done = cli("exec", "--scratch", sandbox, "--", "sh", "-c", "cat file -; rm file; exit 3", stdin=b"in")
    assert (done.returncode, done.stdout) == (3, b"kept\nin")
    assert cli.ok("exec", sandbox, "cat", "file") == "kept\n"
    assert cli("exec", "--scratch", "-d", sandbox, "true").returncode == 2


@pytest.mark.needs_root
def test_a_shell_with_and_without_a_terminal(cli: Cli, sandbox: str) -> None:
    assert cli.ok("shell", sandbox, stdin=b"echo $((6*7))\n") == "42\n"
    with terminal(cli, "shell", sandbox) as term:
        term.until(b"$ ")
        term.type(b"exit 3\r")
        assert term.process.wait(PATIENCE) == 3
        assert term.restored()


@pytest.mark.needs_root
def test_a_command_left_running_is_listed(cli: Cli, sandbox: str) -> None:
    name = cli.ok("exec", "-d", sandbox, "--", "sleep", "100").strip()
    listed = cli.json("ps")
    assert isinstance(listed, list)
    assert [(one["id"], one["running"], one["argv"]) for one in listed] == [(name, True, ["sleep", "100"])]
    assert listed[0]["pid"] > 1
    cli.ok("exec", sandbox, "true")
    ended = cli.json("ps", "-a", sandbox)
    assert isinstance(ended, list)
    assert [one["exit_code"] for one in ended] == [None, 0]
    assert cli.json("ps", "--problems") == []
    assert cli.json("ps", "--pool")["kinds"] == []
    assert cli.ok("ps", "--pool") == "this engine keeps no sandboxes ready\n"


@pytest.mark.needs_root
def test_pause_and_resume(cli: Cli, sandbox: str) -> None:
    cli.ok("pause", sandbox)
    assert f"{sandbox}  paused" in cli.ok("ls")
    done = cli("exec", sandbox, "true")
    assert done.returncode == 5
    cli.ok("resume", sandbox)
    cli.ok("exec", sandbox, "true")


@pytest.mark.needs_root
def test_commands_at_once_share_one_server(cli: Cli, sandbox: str) -> None:
    with cli.start("exec", sandbox, "--", "sh", "-c", "echo ready; cat", stdin=subprocess.PIPE) as first:
        assert first.stdout is not None
        read_until(first.stdout.fileno(), b"ready")
        assert f"{sandbox}  running" in cli.ok("ls")
        assert "echo ready; cat" in cli.ok("ps")
        assert "exec" in cli.ok("events", sandbox)
        assert cli.ok("audit", "verify") == "sound\n"
        assert cli.ok("exec", sandbox, "echo", "second") == "second\n", "nobody waits for anybody else"
        assert first.communicate(b"end\n", timeout=PATIENCE)[0].endswith(b"end\n")


@pytest.mark.slow
def test_one_server_is_started_by_many_at_once(cli: Cli, tmp_path: Path) -> None:
    fresh = Cli(tmp_path / "h")
    try:
        with contextlib.ExitStack() as stack:
            many = [stack.enter_context(fresh.start("ls", "--json")) for _ in range(4)]
            assert [one.communicate(timeout=PATIENCE)[0] for one in many] == [b"[]\n"] * 4
        assert (fresh.home / "serve.log").read_text().count("socket:") == 1
    finally:
        stop_server_of(fresh.home)


@pytest.mark.slow
def test_who_finds_the_engine_taken_is_told(cli: Cli, tmp_path: Path) -> None:
    held = Cli(tmp_path / "h")
    settings = Settings(pool_bytes=POOL, shelf=0, pool=0)
    with Dsec(held.home / "engine", settings=settings):
        done = held("create", "--level", "process")
        assert done.returncode == 75
        assert b"another command" in done.stderr
        assert held.ok("ls") == cli.ok("ls", "--state", "lost"), "the records tell, meanwhile"


@pytest.mark.needs_root
def test_events_are_followed_until_the_end(cli: Cli) -> None:
    name = cli.ok("create").strip()
    with cli.start("events", "--follow", "--json", name) as follower:
        assert follower.stdout is not None
        cli.ok("exec", name, "true")
        cli.ok("rm", name)
        out, _ = follower.communicate(timeout=PATIENCE)
        assert follower.returncode == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [one["seq"] for one in records] == list(range(1, len(records) + 1))
    acts = [one["act"] for one in records]
    assert acts[0] == "sandbox.create"
    assert "exec" in acts
    assert records[-1]["phase"] == "result"
    later = cli.ok("events", "--after", str(len(records) - 1), name)
    assert len(later.splitlines()) == 1
    assert {one["actor"] for one in records} == {"local"}
    assert all(line.split()[4] == "local" for line in cli.ok("events", name).splitlines())


# --- cp


@pytest.mark.needs_root
def test_copies_go_both_ways(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "a").write_bytes(b"one")
    (tree / "sub" / "b").write_bytes(os.urandom(300_000))
    (tree / "link").symlink_to("a")
    cli.ok("cp", str(tree), f"{sandbox}:/workspace")
    assert cli.ok("exec", sandbox, "cat", "tree/a", "tree/link") == "oneone"
    cli.ok("cp", str(tree / "a"), f"{sandbox}:/workspace/renamed")
    cli.ok("cp", str(tree / "a"), f"{sandbox}:new/dir/")
    assert cli.ok("exec", sandbox, "cat", "renamed", "new/dir/a") == "oneone"
    cli.ok("cp", f"{sandbox}:/workspace/tree", str(tmp_path / "back"))
    assert (tmp_path / "back" / "sub" / "b").read_bytes() == (tree / "sub" / "b").read_bytes()
    assert os.readlink(tmp_path / "back" / "link") == "a"
    cli.ok("cp", f"{sandbox}:tree/a", str(tmp_path))
    assert (tmp_path / "a").read_bytes() == b"one"


@pytest.mark.needs_root
def test_archives_go_both_ways(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x" * 100_000)
    archive = subprocess.run(["tar", "c", "-C", tmp_path, "f"], capture_output=True, check=True).stdout
    cli.ok("cp", "-", f"{sandbox}:in", stdin=archive)
    done = cli("cp", f"{sandbox}:in", "-")
    assert done.returncode == 0
    out = subprocess.run(
        ["tar", "x", "-O", "-f", "-"], input=done.stdout, capture_output=True, check=True
    ).stdout
    assert out == b"x" * 100_000


@pytest.mark.needs_root
def test_copies_that_cannot_be(cli: Cli, sandbox: str, tmp_path: Path) -> None:
    assert cli("cp", f"{sandbox}:missing", str(tmp_path)).returncode == 4
    assert cli("cp", f"{sandbox}:/root/x", str(tmp_path)).returncode == 77
    assert cli("cp", str(tmp_path / "missing"), f"{sandbox}:x").returncode in (2, 4)
    assert cli("cp", "a", "b").returncode == 2
    assert cli("cp", f"{sandbox}:a", f"{sandbox}:b").returncode == 2
    assert cli("cp", f"{sandbox}:", str(tmp_path)).returncode == 2
    done = cli("cp", f"{sandbox}:/etc/passwd", "-")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"-- cat /etc/passwd" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs_root
def test_an_archive_that_nobody_takes(cli: Cli, sandbox: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, open(writer, "wb") as pipe:
        for stream, code in ((pipe, 141), (full, 1)):
            with cli.start("cp", f"{sandbox}:/etc", "-", stdout=stream) as process:
                _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == code, err
            assert b"Traceback" not in err
    packed = [line for line in cli.ok("events", sandbox).splitlines() if "files.pack" in line]
    assert len(packed) == 2  # also what was not taken to its end is recorded


# --- audit


@pytest.mark.needs_root
def test_a_chain_that_is_not_there(cli: Cli, sandbox: str) -> None:
    assert cli.ok("audit", "log", sandbox)
    assert cli("audit", "log", "engine").returncode == 0
    for wrong in (new_sandbox_id(), "nosuch", ""):
        done = cli("audit", "log", wrong)
        assert (done.returncode, done.stdout) == (4, b"")
        assert b"there is no chain" in done.stderr
        assert b"hint: " in done.stderr


@pytest.mark.needs_root
def test_a_changed_and_a_cut_journal_are_found(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "own")
    name = cli.ok("create", "--level", "process").strip()
    cli.ok("exec", name, "true")
    cli.ok("rm", name)
    assert cli.ok("audit", "verify") == "sound\n"
    assert cli.json("audit", "verify") == {"sound": True, "findings": []}
    lines = [json.loads(line) for line in cli.ok("audit", "log", name, "--json").splitlines()]
    assert lines[0]["act"] == "sandbox.create"
    stop_server_of(cli.home)  # what is copied is to stand still
    for place, change in enumerate(
        (
            "UPDATE record SET act = 'other' WHERE seq = 2",
            "DELETE FROM record WHERE seq = (SELECT max(seq) FROM record r WHERE r.chain = record.chain)",
        )
    ):
        copy = Cli(tmp_path / str(place))
        for part in ("journal", "keys"):
            shutil.copytree(cli.home / "engine" / part, copy.home / "engine" / part)
        with contextlib.closing(sqlite3.connect(copy.home / "engine" / "journal" / "journal.db")) as database:
            chain = "(SELECT number FROM chain WHERE name = ?)"
            database.execute(f"{change} AND chain = {chain}", (name,))
            database.commit()
        done = copy("audit", "verify")
        assert done.returncode == 1
        assert f"{name} record {2 if place == 0 else len(lines)}".encode() in done.stdout, done.stdout
        assert b"tail was cut" in done.stdout or place == 0


# --- machine


def test_doctor_tells_every_layer(cli: Cli) -> None:
    found = cli.json("doctor")
    assert isinstance(found, dict)
    names = {one["name"] for one in found["layers"]}
    assert {
        "user namespace",
        "landlock",
        "seccomp",
        "overlayfs",
        "idmapped mounts",
        "disk quota",
        "base system",
    } <= names
    for layer in found["layers"]:
        assert layer["status"] in ("active", "degraded", "unavailable")
        assert layer["status"] == "active" or layer["detail"]
    levels = {one["level"]: one for one in found["levels"]}
    assert set(levels) == {"process", "container"}
    for one in levels.values():
        assert one["flags"] if one["available"] else one["reason"]
        assert not set(one["flags"]) & set(one["missing"])
    if os.geteuid() == 0:
        assert levels["container"]["available"], levels["container"]["reason"]


def test_doctor_for_people(cli: Cli) -> None:
    said = cli.ok("doctor")
    assert "  landlock " in said
    assert "Levels" in said


def test_bench_measures(cli: Cli) -> None:
    found = json.loads(cli.ok("bench", "-n", "3", "--level", "process", "--json"))
    assert [one["count"] for one in found["results"]] == [3] * len(found["results"])
    assert all(0 < one["p50_ms"] <= one["max_ms"] for one in found["results"])


# --- errors


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run"], 2, "CMD"),
        (["run", "--level", "vm", "--", "true"], 2, "choose one of"),
        (["run", "-v", "/usr:/x", "-v", "/etc:/x/y", "--", "true"], 2, "'/x' and '/x/y' lie in one another"),
        (["run", "--memory", "1", "--", "true"], 2, "--memory: 1 "),
        (["run", "-v", "x", "--", "true"], 2, "SOURCE:TARGET"),
        (["run", "-t", "nosuch", "--", "true"], 4, "no template"),
        (["run", "-t", "system", "--", "true"], 4, "'system' is a base"),
        (["run", "-t", "docker://a.example/b", "--", "true"], 2, "base: docker://a.example/b}"),
        (["create", "-t", "debian:bookworm"], 4, "(`runtime: {base: debian:bookworm}`)"),
        (["run", "-t", f"sn-{'a' * 26}", "--", "true"], 4, "there is no snapshot"),
        (["template", "rm", "nosuch"], 4, "there is no template 'nosuch'"),
        (["template", "rm", "nosuch@x"], 2, "is not the name of a template"),
        (["template", "history", "nosuch"], 4, "there is no template 'nosuch'"),
        (["run", "--level", "process", "-u", "root", "--", "true"], 69, "--user"),
        (["run", "--level", "process", "-v", "/usr:/x", "--", "true"], 69, "use --level container"),
        (["create", "--ttl", "-1"], 2, "ttl"),
        (["rm", "sb-x"], 2, "not a sandbox id"),
        (["inspect", "x"], 2, "not a sandbox id"),
        (["exec", new_sandbox_id(), "true"], 4, "there is no sandbox"),
        (["shell", new_sandbox_id()], 4, "there is no sandbox"),
        (["inspect", new_sandbox_id()], 4, "there is no sandbox"),
        (["events", new_sandbox_id()], 4, "there is no sandbox"),
        (["ps", new_sandbox_id()], 4, "there is no sandbox"),
        (["ps", "--problems", new_sandbox_id()], 4, "there is no sandbox"),
        (["pause", new_sandbox_id()], 4, "there is no sandbox"),
        (["cp", "/etc/hostname", f"{new_sandbox_id()}:x"], 4, "there is no sandbox"),
    ],
)
def test_errors_have_a_code_and_words(cli: Cli, arguments: list[str], code: int, words: str) -> None:
    done = cli(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    assert words in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    if not done.stderr.startswith(b"Usage:"):
        assert done.stderr.startswith(b"dsec: ")
        assert b"\n      hint: " in done.stderr


def test_where_there_never_was_an_engine(tmp_path: Path) -> None:
    empty = Cli(tmp_path / "home")
    assert empty("audit", "verify").returncode == 4
    assert empty("events", new_sandbox_id()).returncode == 4
    assert empty.ok("gc") == "nothing to remove\n"
    assert not (tmp_path / "home" / "engine").exists()


def test_a_home_that_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    wrong = Cli(tmp_path)
    wrong.env["DSEC_HOME"] = str(file)
    for arguments in (["run", "true"], ["ls"], ["events", new_sandbox_id()], ["gc"]):
        done = wrong(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert b"$DSEC_HOME" in done.stderr
    assert wrong("run", "--level", "process", "true").returncode == 0  # it keeps nothing there


def test_errors_under_json_print_no_json(cli: Cli) -> None:
    done = cli("inspect", new_sandbox_id(), "--json")
    assert (done.returncode, done.stdout) == (4, b"")


@pytest.mark.needs_root
def test_removing_some_that_are_unknown_removes_the_others(cli: Cli) -> None:
    name, unknown = cli.ok("create").strip(), new_sandbox_id()
    done = cli("rm", unknown, name)
    assert done.returncode == 4
    assert unknown.encode() in done.stderr
    assert name not in cli.ok("ls")
