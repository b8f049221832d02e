"""DSec as a sandbox of Inspect: Inspect's own check of providers, its interface in detail, and whole evaluations."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    override_sandbox_output_limit,
)
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy

from dsec import Dsec, Settings
from dsec.errors import Conflict, Unsupported
from dsec.integrations.inspect_ai import DsecSandboxConfig, DsecSandboxEnvironment
from dsec.integrations.inspect_commands import Account, as_account, find_account
from dsec.integrations.inspect_config import config_of

pytestmark = pytest.mark.timeout(100)

LEVELS = [pytest.param("container", marks=pytest.mark.needs_root), "process"]
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def home(image_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where engines of this module look for images: the run's own store."""
    path = tmp_path_factory.mktemp("home")
    (path / "store").symlink_to(image_store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSEC_HOME", str(path))
        yield path


# --- Inspect's own check of a provider

NO_TMP = "level 'process' has no file system of its own: of /tmp only its own directory can be written"
UNMET = {
    "process": {
        "test_cwd_absolute": NO_TMP,
        "test_read_and_write_file_including_directory_absolute": NO_TMP,
        "test_write_binary_file_is_directory": NO_TMP,
        "test_write_text_file_is_directory": NO_TMP,
        "test_read_file_is_directory": "the host's /etc may be searched for single files, and not be opened itself",
        "test_exec_as_user": "level 'process' has one user: SandboxUserUnsupportedError",
    },
    "container": {},
}
"""Checks that a level cannot pass, and why. One that passes all the same fails its test."""

AT_ONCE = 8
ADDUSER = (
    *("adduser", "passwd", "perl-base", "libpam0g", "libaudit1", "libcap-ng0", "libsemanage2", "libsepol2"),
    *(
        "libselinux1",
        "libcrypt1",
        "libdb5.3",
        "libdb5.3t64",
        "libpam-modules",
        "libpam-modules-bin",
        "libpam-runtime",
    ),
)
"""What it needs on one Debian or another."""
ADDUSER_PLACES = (
    *("/usr/bin/", "/usr/sbin/", "/usr/lib/", "/usr/share/perl5/", "/usr/share/adduser/", "/etc/"),
)
CHECKS = [
    pytest.param(
        level,
        name,
        marks=[
            *([pytest.mark.needs_root] if level == "container" else []),
            *([pytest.mark.xfail(reason=UNMET[level][name], strict=True)] if name in UNMET[level] else []),
        ],
        id=f"{level}-{name.removeprefix('test_')}",
    )
    for level in ("container", "process")
    for name in self_check.__all__
]


class Outcomes:
    """All checks of a level, run when one of them is first asked for: side by side, since some of them sleep."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, BaseException | None]] = {}

    def of(self, level: str, name: str) -> BaseException | None:
        if level not in self._found:
            self._found[level] = asyncio.run(_all_checks(level))
        return self._found[level][name]


async def _all_checks(level: str) -> dict[str, BaseException | None]:
    """Each check in a sandbox of its own, made and removed as for a sample."""
    config = DsecSandboxConfig.model_validate({"level": level})
    slots = asyncio.Semaphore(AT_ONCE)
    found: dict[str, BaseException | None] = {}

    async def check(name: str) -> None:
        async with slots:
            made = await DsecSandboxEnvironment.sample_init("check", config, {})
            try:
                sandbox = made["default"].as_type(DsecSandboxEnvironment)
                if (level, name) == ("container", "test_exec_as_user"):
                    await sandbox._sandbox.files.unpack(_adduser(), "/", user="root")
                await getattr(self_check, name)(sandbox)
                found[name] = None
            except Exception as error:  # noqa: BLE001 - raised again in the test of its name
                found[name] = error
            finally:
                await DsecSandboxEnvironment.sample_cleanup("check", config, made, False)

    await DsecSandboxEnvironment.task_init("check", config)
    try:
        await asyncio.gather(*map(check, self_check.__all__))
    finally:
        await DsecSandboxEnvironment.task_cleanup("check", config, True)
    return found


def _adduser() -> bytes:
    """The base has no programs that manage users. As an image for such an evaluation would, the sandbox gets Debian's own."""
    listing = subprocess.run(["dpkg", "-L", *ADDUSER], capture_output=True, text=True, check=False).stdout
    more = ["/etc/adduser.conf", "/etc/login.defs", *map(str, Path("/etc/pam.d").glob("common-*"))]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted({*listing.splitlines(), *more}):
            placed = path if path.startswith(("/usr/", "/etc/")) else f"/usr{path}"
            if placed.startswith(ADDUSER_PLACES) and os.path.lexists(path):
                tar.add(path, arcname=placed.lstrip("/"), recursive=False)
    return archive.getvalue()


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.mark.slow
@pytest.mark.parametrize(("level", "name"), CHECKS)
def test_self_check(outcomes: Outcomes, level: str, name: str) -> None:
    if (error := outcomes.of(level, name)) is not None:
        raise error


# --- the interface in detail


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def opened(config: DsecSandboxConfig) -> AsyncIterator[dict[str, DsecSandboxEnvironment]]:
    """The sandboxes of one sample, in an engine of its own."""
    await DsecSandboxEnvironment.task_init("detail", config)
    try:
        made = await DsecSandboxEnvironment.sample_init("detail", config, {"__sample_id__": "1"})
        yield {name: each.as_type(DsecSandboxEnvironment) for name, each in made.items()}
        await DsecSandboxEnvironment.sample_cleanup("detail", config, made, False)
    finally:
        await DsecSandboxEnvironment.task_cleanup("detail", config, True)


def in_sandbox(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test with ``sandbox`` in an event loop of its own."""

    def run(level: str, **others: object) -> None:
        async def inside() -> None:
            config = DsecSandboxConfig.model_validate({"level": level, "env": {"COLOUR": "green"}})
            async with opened(config) as made:
                await test(made["default"], level, **others)

        asyncio.run(inside())

    signature = inspect.signature(test)
    mine = [one for name, one in signature.parameters.items() if name != "sandbox"]
    run.__signature__ = signature.replace(parameters=mine)  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    return run


@in_sandbox
async def test_exec_is_told_exactly(sandbox: DsecSandboxEnvironment, level: str) -> None:
    told = await sandbox.exec(
        ["sh", "-c", "echo $COLOUR $SIZE; cat; echo bad >&2; exit 3"], "in\r\n", env={"SIZE": "xl"}
    )
    assert (told.success, told.returncode) == (False, 3)
    assert (told.stdout, told.stderr) == ("green xl\nin\r\n", "bad\n")
    lost = await sandbox.exec(["no-such-program"])
    assert lost.returncode == 127
    assert "no-such-program" in lost.stderr
    cut = await sandbox.exec(["printf", r"\303("])
    assert cut.stdout == "\ufffd("
    with pytest.raises(PermissionError):
        await sandbox.exec(["/etc/passwd"])
    refused = await sandbox.exec(["echo", "a\0b"])
    assert not refused.success
    assert "NUL" in refused.stderr


@in_sandbox
async def test_output_limits(sandbox: DsecSandboxEnvironment, level: str) -> None:
    flood = ["sh", "-c", f"head -c {11 * MIB} /dev/zero | tr '\\0' x"]
    with pytest.raises(OutputLimitExceededError) as caught:
        await sandbox.exec(flood)
    assert caught.value.truncated_output == "x" * (10 * MIB)
    with override_sandbox_output_limit(12 * MIB, "exec"):
        assert (await sandbox.exec(flood)).stdout == "x" * (11 * MIB)
    with override_sandbox_output_limit(1000, "exec"), pytest.raises(OutputLimitExceededError):
        await sandbox.exec(["sh", "-c", "head -c 1001 /dev/zero >&2"])
    with override_sandbox_output_limit(10_000_000_000, "exec"), pytest.raises(TimeoutError):
        await sandbox.exec(["sleep", "60"], timeout=1)


@pytest.mark.parametrize("limit", [MIB, 100 * MIB], ids=["kept by the engine", "collected"])
@in_sandbox
async def test_a_cancelled_command_is_killed(sandbox: DsecSandboxEnvironment, level: str, limit: int) -> None:
    with override_sandbox_output_limit(limit, "exec"), anyio.move_on_after(1) as scope:
        await sandbox.exec(["sh", "-c", "while :; do date +%s%N > beat; sleep 0.05; done"])
    assert scope.cancelled_caught
    await anyio.sleep(0.3)
    beat = await sandbox.read_file("beat")
    await anyio.sleep(0.3)
    assert await sandbox.read_file("beat") == beat


@in_sandbox
async def test_long_commands_pass_as_they_are(sandbox: DsecSandboxEnvironment, level: str) -> None:
    words = ["'", "", "$HOME", "a\nb", "-n", "\\", "é", "x" * 100_000, "y" * 100_000]
    told = await sandbox.exec(["sh", "-c", 'cat; printf "%s|" "$@"', "sh", *words], input="first ")
    assert told.stdout == "first " + "".join(f"{word}|" for word in words)
    left = await sandbox.exec(["sh", "-c", "ls -A . $(test -d /workspace && echo /tmp)"])
    assert ".dsec-" not in left.stdout


@in_sandbox
async def test_files_fail_as_their_kind(sandbox: DsecSandboxEnvironment, level: str) -> None:
    await sandbox.write_file("deep/er/file", b"\xff\r\n")
    assert await sandbox.read_file("deep/er/file", text=False) == b"\xff\r\n"
    with pytest.raises(UnicodeDecodeError):
        await sandbox.read_file("deep/er/file")
    with pytest.raises(IsADirectoryError) as caught:
        await sandbox.read_file("deep")
    assert caught.value.filename == "deep"
    with pytest.raises(IsADirectoryError):
        await sandbox.write_file("deep", "x")
    for path in ("deep/er/file/below", "none", "a\0b", "", "n" * 300):
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file(path)
    await sandbox.exec(["mkfifo", "pipe"])
    with pytest.raises(PermissionError):
        await sandbox.read_file("pipe")
    with override_sandbox_output_limit(2, "read_file"), pytest.raises(OutputLimitExceededError):
        await sandbox.read_file("deep/er/file", text=False)


@in_sandbox
async def test_users(sandbox: DsecSandboxEnvironment, level: str) -> None:
    if level == "process":
        with pytest.raises(SandboxUserUnsupportedError):
            await sandbox.exec(["true"], user="root")
        return
    assert (await sandbox.exec(["id", "-u"], user="root")).stdout == "0\n"
    told = await sandbox.exec(["sh", "-c", "id -u; id -G; echo $HOME $USER; cat"], "in", user="nobody")
    assert told.stdout == "65534\n65534\n/nonexistent nobody\nin"
    assert (await sandbox.exec(["id", "-u"], user="4321")).stdout == "4321\n"
    with pytest.raises(PermissionError):
        await sandbox.exec(["sh", "-c", "exit 126"], user="nobody")
    none = await sandbox.exec(["id"], user="nobody-at-all")
    assert not none.success
    assert "nobody-at-all" in none.stderr


@in_sandbox
async def test_a_sandbox_that_is_gone(sandbox: DsecSandboxEnvironment, level: str) -> None:
    with pytest.raises(NotImplementedError):
        await sandbox.connection()
    await sandbox._sandbox.destroy()
    with pytest.raises(SandboxUnavailableError):
        await sandbox.exec(["true"])
    with pytest.raises(SandboxUnavailableError):
        await sandbox.read_file("x")
    with pytest.raises(ConnectionError):
        await sandbox.connection()


@pytest.mark.needs_root
def test_environments_by_name() -> None:
    config = DsecSandboxConfig.model_validate(
        {
            "env": {"WHO": "all"},
            "environments": {
                "victim": {"level": "process"},
                "default": {"user": "root", "env": {"WHO": "one"}},
            },
        }
    )

    async def inside() -> None:
        async with opened(config) as made:
            assert list(made) == ["default", "victim"]
            said = {name: await each.exec(["sh", "-c", "echo $WHO; id -u"]) for name, each in made.items()}
            assert said["default"].stdout == "one\n0\n"
            assert said["victim"].stdout.startswith("all\n")

    asyncio.run(inside())


def test_a_task_that_ends_early_takes_its_sandboxes_along() -> None:
    async def inside() -> None:
        config = DsecSandboxConfig.model_validate({"level": "process"})
        await DsecSandboxEnvironment.task_init("early", config)
        await DsecSandboxEnvironment.task_init("other", config)
        await DsecSandboxEnvironment.task_cleanup("early", config, True)
        made = await DsecSandboxEnvironment.sample_init("other", config, {})
        assert (await made["default"].exec(["true"])).success
        await DsecSandboxEnvironment.task_cleanup("other", config, False)
        with pytest.raises(Conflict):
            await DsecSandboxEnvironment.sample_init("late", config, {})
        await DsecSandboxEnvironment.task_cleanup("late", config, True)

    asyncio.run(inside())


@pytest.mark.needs_root
@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning")
def test_inspects_own_tools_run_inside() -> None:
    async def inside() -> None:
        async with opened(DsecSandboxConfig()) as made:
            remote = SandboxEnvironmentProxy(made["default"])
            told = await remote.exec_remote(["sh", "-c", "id -un; exit 3"], stream=False)
            assert (told.returncode, told.stdout) == (3, "user\n")

    asyncio.run(inside())


@pytest.mark.needs_root
def test_a_sandbox_of_a_template(home: Path) -> None:
    with Dsec(settings=Settings(pool=0)) as dsec:
        built = dsec.templates.build(b"name: inspected\nversion: 1\nruntime: {env: {COLOUR: blue}}\n")
        config = DsecSandboxConfig.model_validate({"base": built.reference, "env": {"SIZE": "xl"}})

        async def inside() -> str:
            async with opened(config) as made:
                return (await made["default"].exec(["sh", "-c", "echo $COLOUR $SIZE"])).stdout

        assert asyncio.run(inside()) == "blue xl\n"
        dsec.templates.remove("inspected")


def test_another_event_loop_is_refused() -> None:
    work = DsecSandboxEnvironment.task_init("trio", None)
    with pytest.raises(Unsupported, match="asyncio"):
        work.send(None)
    work.close()


# --- configuration


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"levle": "process"}, "levle"),
        ({"level": "vm"}, "level"),
        ({"limits": {"memory_mib": 1}}, "limits.memory_mib"),
        ({"limits": {"memory": 1}}, "memory"),
        ({"env": {"A=B": "x"}}, "env"),
        ({"level": "process", "user": "root"}, "user"),
        ({"environments": {"a/b": {}}}, "environments"),
        ({"user": "root", "environments": {"a": {"level": "process"}}}, "user"),
    ],
)
def test_bad_configurations_name_the_field(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DsecSandboxConfig.model_validate(config)


def test_configurations_survive_a_log(tmp_path: Path) -> None:
    config = DsecSandboxConfig.model_validate({"level": "process", "limits": {"pids": 9}, "env": {"A": "b"}})
    spec = SandboxEnvironmentSpec("dsec", config)
    again = SandboxEnvironmentSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert len({spec, again}) == 1
    (tmp_path / "dsec.json").write_text(config.model_dump_json())
    assert config_of(str(tmp_path / "dsec.json")) == config
    (tmp_path / "compose.yaml").write_text("services: {}")
    for wrong in (str(tmp_path / "compose.yaml"), again):
        with pytest.raises(ValueError, match="sandbox config"):
            config_of(wrong)


def test_accounts_are_read_from_hostile_files() -> None:
    passwd = "broken\nbig:x:99999:1:::\nneg:x:-1:1:::\nann:x:7:8:Ann:/home/ann:/bin/sh\n::::\n"
    group = "g:x:8:\nteam:x:9:bob,ann\nbad:x:zz:ann\n"
    ann = Account(name="ann", uid=7, gid=8, groups=(8, 9), home="/home/ann")
    assert find_account("ann", passwd, group) == ann
    assert find_account("7", passwd, group) == ann
    for nobody in ("big", "neg", "broken", "Ann", "99999", "-1", "٣"):
        assert find_account(nobody, passwd, group) is None
    assert as_account(["-x"], ann)[-2:] == ["--", "-x"]


# --- whole evaluations

TASK = textwrap.dedent(
    """
    import json
    import os
    from pathlib import Path
    from inspect_ai import Task, task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import solver
    from inspect_ai.util import sandbox

    # Inspect puts a sample's setup script into /tmp, which level "process" has not.
    SETUP = json.loads(Path("dsec.json").read_text())["level"] == "container"

    @solver
    def works():
        async def solve(state, generate):
            box = sandbox()
            given = (await box.read_file("given.txt")).strip()
            if os.environ.get("HANG"):
                Path(os.environ["HANG"] + given).touch()
                await box.exec(["sleep", "1000"])
            done = await box.exec(["sh", "-c", "cat given.txt setup.txt > both.txt; id -u; ls"])
            assert done.success, done.stderr
            state.output.completion = given + (await box.read_file("both.txt"))
            state.metadata["uid"] = done.stdout.split()[0]
            return state
        return solve

    @task
    def tasks():
        samples = [
            Sample(input="?", id=str(n), target=f"word-{n}set up {n}",
                   files={"given.txt": f"word-{n}", **({} if SETUP else {"setup.txt": f"set up {n}"})},
                   setup=f"printf 'set up {n}' > setup.txt" if SETUP else None)
            for n in range(6)
        ]
        return Task(dataset=samples, solver=works(), scorer=includes())
    """
)


@contextmanager
def _started(directory: Path, level: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """An evaluation of its own process, its sandbox named on the command line, its level in the file beside the task.

    It is killed in the end: what a test of it left running would fail those that follow.
    """
    (directory / "tasks.py").write_text(TASK)
    (directory / "dsec.json").write_text(json.dumps({"level": level}))
    words = (
        "eval tasks.py --model mockllm/model --sandbox dsec --display none --log-dir logs --log-format json"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "inspect_ai", *words.split(), "--max-samples", "6"],
        cwd=directory,
        env={**os.environ, "INSPECT_LOG_LEVEL": "warning", "HOME": str(directory), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def _until_hanging(running: subprocess.Popen[str], directory: Path) -> None:
    deadline = time.monotonic() + 60
    while len(list(directory.glob("hung-*"))) < 6:
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline, "the samples did not start"
        time.sleep(0.05)


@pytest.mark.slow
def test_an_evaluation_by_name(tmp_path: Path, level: str) -> None:
    with _started(tmp_path, level) as running:
        said, _ = running.communicate(timeout=90)
    (path,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(path.read_text())
    assert log["status"] == "success", said
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 1.0
    uids = {sample["metadata"]["uid"] for sample in log["samples"]}
    if level == "container":
        assert uids == {"1000"}
    elif os.geteuid() == 0:
        assert "0" not in uids
    assert log["eval"]["sandbox"] == {"type": "dsec", "config": "dsec.json"}


@pytest.mark.slow
def test_an_interrupted_evaluation_leaves_nothing(tmp_path: Path, level: str) -> None:
    with _started(tmp_path, level, HANG=str(tmp_path / "hung-")) as running:
        _until_hanging(running, tmp_path)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=30)


@pytest.mark.slow
def test_a_killed_evaluation_is_cleaned_up_after(tmp_path: Path, level: str) -> None:
    with _started(tmp_path, level, HANG=str(tmp_path / "hung-")) as running:
        _until_hanging(running, tmp_path)
        running.kill()
        running.communicate(timeout=30)
    words = ["-m", "inspect_ai", "sandbox", "cleanup", "dsec"]
    deadline = time.monotonic() + 20
    while list(Path(os.environ["TMPDIR"]).glob("dsec-*")):
        assert time.monotonic() < deadline, "the killed evaluation's state stays"
        subprocess.run([sys.executable, *words], check=True, timeout=60, capture_output=True)
