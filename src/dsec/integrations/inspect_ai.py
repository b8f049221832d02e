"""Sandboxes of DSec for Inspect evaluations: ``sandbox="dsec"``.

Inspect finds this module through its entry point. See docs/how-to/inspect-ai.md for what differs from other providers.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, Literal, NamedTuple, overload

import anyio
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util import concurrency as throttle
from pydantic import BaseModel
from typing_extensions import override

from dsec import AsyncDsec
from dsec.client.aio import AsyncSandbox
from dsec.errors import BadRequest, CleanupFailed, FileMissing, TooLarge
from dsec.integrations.inspect_commands import Account, as_account, as_script, find_account, is_long
from dsec.integrations.inspect_config import DsecSandboxConfig, SandboxConfig, config_of
from dsec.integrations.inspect_engine import Engines
from dsec.integrations.inspect_errors import file_errors, sandbox_errors
from dsec.model.execs import ExecResult as Ended
from dsec.model.execs import Stream
from dsec.model.sandbox import Flag, State

__all__ = ["DsecSandboxConfig", "DsecSandboxEnvironment", "SandboxConfig"]

ACCOUNTS_BYTES: Final = 1 << 20  # of /etc/passwd and of /etc/group
EXECS_PER_CPU: Final = 8
SANDBOXES_PER_CPU: Final = 8
_NATIVE_USERS: Final = ("", "root", "user")
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127

logger = logging.getLogger(__name__)


class _Call(NamedTuple):
    """A command made ready: what is run, as whom, with what besides."""

    command: list[str]
    user: str
    env: dict[str, str]


@sandboxenv(name="dsec")
class DsecSandboxEnvironment(SandboxEnvironment):
    """One sandbox of one sample. Sandboxes of all samples of a run belong to one private engine."""

    _engines: Final = Engines()  # Inspect calls class methods only: there is no object that could hold it

    def __init__(self, sandbox: AsyncSandbox, user: str) -> None:
        super().__init__()
        self._sandbox = sandbox
        self._user = user

    # Life

    @override
    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Open the engine and try every sandbox of the configuration once.

        Raises:
            ValueError: the configuration. IsolationUnavailable: this machine cannot have a level.
            Unsupported: an event loop other than asyncio's.
        """
        sandboxes = config_of(config).sandboxes()
        dsec = await cls._engines.acquire()
        try:
            for each in set(sandboxes.values()):
                await (await _create(dsec, each, {"task": task_name})).destroy("tried out")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await cls._engines.release()
            raise

    @override
    @classmethod
    async def task_cleanup(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool
    ) -> None:
        """The last task closes the engine, which ends whatever is left, asked to or not: sandboxes never outlive it."""
        if not cleanup:
            logger.warning("dsec sandboxes end with the evaluation: they cannot be kept after it")
        await cls._engines.release()

    @override
    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Every sandbox of the configuration, or none."""
        dsec = cls._engines.current()
        labels = {"task": task_name, "sample": str(metadata.get("__sample_id__", ""))}
        made: dict[str, SandboxEnvironment] = {}
        try:
            for name, each in config_of(config).sandboxes().items():
                sandbox = await _create(dsec, each, {**labels, "environment": name})
                made[name] = cls(sandbox, each.user)
        except BaseException:
            await cls.sample_cleanup(task_name, config, made, True)
            raise
        return made

    @override
    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Destroy them. One that resists is recorded by the engine, which goes on trying."""
        with anyio.CancelScope(shield=True):
            for environment in environments.values():
                try:
                    await environment.as_type(DsecSandboxEnvironment)._sandbox.destroy("the sample ended")
                except CleanupFailed as error:
                    logger.warning("a sandbox is not completely removed yet: %s", error)

    @override
    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Remove what evaluations left that were killed; a running one is never touched. ``id`` cannot narrow it."""
        await cls._engines.acquire()  # an engine that opens sweeps
        await cls._engines.release()

    @override
    @classmethod
    def default_concurrency(cls) -> int | None:
        """Sandboxes at once."""
        return SANDBOXES_PER_CPU * _cpus()

    @override
    @classmethod
    def config_files(cls) -> list[str]:
        """Found beside a task that names no configuration."""
        return ["dsec.json"]

    @override
    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """From a log or a task."""
        return DsecSandboxConfig.model_validate(config)

    @override
    def default_polling_interval(self) -> float:
        """Seconds; a look into a sandbox takes a millisecond."""
        return 0.2

    @override
    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Nobody can join.  Raises: NotImplementedError; ConnectionError: it does not run."""
        info = await self._sandbox.inspect()
        if info.state not in (State.RUNNING, State.PAUSED):
            raise ConnectionError(f"{info.id} is {info.state.value}: {info.reason}")
        raise NotImplementedError(
            "the sandboxes of an evaluation belong to its own process: no other can enter"
        )

    # Commands

    @override
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """As the base class says. A command is never run twice: a time-out here is the command's own, not a transport's.

        Raises:
            TimeoutError: its whole process tree is dead.
            PermissionError: the program may not be executed.
            OutputLimitExceededError: with the first bytes of the stream that is too long.
            SandboxUserUnsupportedError, SandboxUnavailableError.
        """
        with sandbox_errors():
            try:
                account = await self._account(user)
                if isinstance(account, ExecResult):
                    return account
                call = await self._ready(cmd, env or {}, account)
                async with _slot(concurrency):
                    ended = await self._run(call, _bytes(input), cwd or "", timeout)
            except (BadRequest, TooLarge) as error:  # no such command can exist: it failed
                return ExecResult(False, _NOT_EXECUTABLE, "", str(error))
        return _result(ended, cmd, timeout)

    async def _account(self, user: str | None) -> str | Account | ExecResult[str]:
        """A user that DSec knows, one that only the sandbox knows, or the failure of a command of nobody."""
        name = user or self._user
        if user and Flag.USERS not in self._sandbox.flags:
            level = self._sandbox.info.spec.level.value
            raise SandboxUserUnsupportedError(
                f"level {level!r} runs every command as one user, not as {user!r}"
            )
        if name in _NATIVE_USERS:
            return name
        account = find_account(name, await self._accounts("/etc/passwd"), await self._accounts("/etc/group"))
        return account or ExecResult(
            False, _NOT_EXECUTABLE, "", f"there is no user {name!r} in this sandbox\n"
        )

    async def _accounts(self, path: str) -> str:
        try:
            return (await self._sandbox.files.read(path, max_bytes=ACCOUNTS_BYTES, user="root")).decode(
                "utf-8", "replace"
            )
        except FileMissing:
            return ""

    async def _ready(self, cmd: list[str], env: dict[str, str], account: str | Account) -> _Call:
        if isinstance(account, Account):
            call = _Call(as_account(cmd, account), "root", {**account.env, **env})
        else:
            call = _Call(cmd, account, env)
        if not is_long(call.command, call.env) or any("\0" in word for word in cmd):
            return call
        private_tmp = Flag.ROOT_FS in self._sandbox.flags
        directory = "/tmp" if private_tmp else self._sandbox.info.workdir
        path = f"{directory}/.dsec-{secrets.token_hex(16)}"
        script = as_script(call.command, path)
        await self._sandbox.files.write(path, script, mode=0o600, exclusive=True, user=call.user)
        return call._replace(command=["/bin/sh", path])

    async def _run(self, call: _Call, stdin: bytes | None, cwd: str, timeout: int | None) -> Ended:
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        if limit > self._sandbox.info.spec.limits.output_bytes:
            return await self._collect(call, stdin, cwd, timeout, limit)
        return await self._sandbox.exec(
            call.command, timeout=timeout, env=call.env, cwd=cwd, user=call.user, stdin=stdin
        )

    async def _collect(
        self, call: _Call, stdin: bytes | None, cwd: str, timeout: int | None, limit: int
    ) -> Ended:
        """Run it and keep more of its output than the engine does: Inspect raises its limit for single calls."""
        started = await self._sandbox.start(
            call.command, timeout=timeout, env=call.env, cwd=cwd, user=call.user, stdin=stdin
        )
        kept = {Stream.STDOUT: bytearray(), Stream.STDERR: bytearray()}
        dropped = 0
        try:
            async for chunk in started.output:
                room = max(0, limit - len(kept[chunk.stream]))
                kept[chunk.stream] += chunk.data[:room]
                dropped += max(0, len(chunk.data) - room)
            ended = await started.wait()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await started.kill()
            raise
        return Ended(
            id=ended.id,
            exit_code=ended.exit_code,
            stdout=bytes(kept[Stream.STDOUT]),
            stderr=bytes(kept[Stream.STDERR]),
            timed_out=ended.timed_out,
            truncated=dropped > 0,
        )

    # Files

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        """As the base class says, with the permissions of the sandbox's user."""
        with file_errors(file):
            await self._sandbox.files.write(file, _bytes(contents) or b"", user=self._user)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    @override
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """As the base class says, with the permissions of the sandbox's user."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with file_errors(file):
            try:
                content = await self._sandbox.files.read(file, max_bytes=limit, user=self._user)
            except TooLarge as error:
                raise OutputLimitExceededError(
                    SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None
                ) from error
        return content.decode("utf-8") if text else content


async def _create(dsec: AsyncDsec, config: SandboxConfig, labels: dict[str, str]) -> AsyncSandbox:
    return await dsec.sandboxes.create(
        config.base,
        level=config.level,
        limits=config.limits.limits(output_bytes=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE),
        read_only=config.read_only,
        env=config.env,
        labels=labels,
    )


def _bytes(content: str | bytes | None) -> bytes | None:
    return content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content


def _slot(wanted: bool) -> AbstractAsyncContextManager[object]:
    """One of the commands that run at once in all sandboxes."""
    return throttle("dsec", EXECS_PER_CPU * _cpus()) if wanted else nullcontext()


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _result(ended: Ended, cmd: list[str], timeout: int | None) -> ExecResult[str]:
    """How it ended, in Inspect's words.  Raises: TimeoutError, PermissionError, OutputLimitExceededError."""
    if ended.timed_out:
        raise TimeoutError(f"the command ran longer than {timeout} seconds; its processes were killed")
    stdout, stderr = (data.decode("utf-8", "replace") for data in (ended.stdout, ended.stderr))
    limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    if ended.truncated or max(len(ended.stdout), len(ended.stderr)) > limit:
        longest = stdout if len(ended.stdout) >= len(ended.stderr) else stderr
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, longest[:limit])
    # A command that could not be started says nothing; a shell that could not start one says so itself.
    silent = not ended.stdout and not ended.stderr
    if silent and ended.exit_code == _NOT_EXECUTABLE:
        raise PermissionError(errno.EACCES, "it may not be executed", cmd[0])
    if silent and ended.exit_code == _NOT_FOUND:
        stderr = f"{cmd[0]}: no such program, or no such working directory\n"
    return ExecResult(ended.exit_code == 0, ended.exit_code, stdout, stderr)
