"""What a template runs when it is built: in a sandbox of its own, which ends with it. What that changed becomes a layer.

A build sandbox is a sandbox like any other: no command of a package, an image or a template ever runs outside of one.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from anyio import CancelScope

from dsec.errors import BadRequest, BuildFailed, DsecError
from dsec.images.attended import attended
from dsec.images.dependencies.install import WHEN, bytecode_command
from dsec.images.dependencies.target import PythonTarget
from dsec.images.entries import reached
from dsec.images.layer_copy import copy_layer
from dsec.model.execs import ExecRequest, ExecResult
from dsec.model.ids import SandboxId
from dsec.model.sandbox import Level, Limits, SandboxSpec
from dsec.model.template import Template
from dsec.ports.engine import Workplace

RECIPE: Final = "2"
"""Goes up when the same steps would be run otherwise."""
SECONDS: Final = 1800.0
"""For all steps of a build together; and for making byte code."""
ROOT: Final = "root"
LABEL: Final = "dsec.build"
NO_NETWORK: Final = (
    "a build has no network yet: it can use what the base and the dependencies brought, and nothing else"
)
LIMITS: Final = Limits(cpu_millis=8000, memory_mib=4096, pids=1024, disk_mib=8192, open_files=4096)
_COMPILED: Final = (0, 1)  # 1: some files are not of its language
_LOOK_SECONDS: Final = 60.0
_CLOCK_GRAIN: Final = 10**9  # ns: the kernel dates files a little late
_TOLD: Final = 2000  # characters of what a failed step said last
_APT: Final = (
    *("apt-get", "-q", "-y", "-o", "Dpkg::Use-Pty=0", "-o", "APT::Sandbox::User=root"),
    *("install", "--no-install-recommends", "--"),
)
_SCRATCH: Final = ("tmp", "var/tmp", "run", "dev/shm")  # nothing of a build stays there


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a build. ``field``: of the template that asks for it. ``hint``: for when it fails."""

    field: str
    argv: tuple[str, ...]
    hint: str = NO_NETWORK


def steps_of(template: Template) -> tuple[Step, ...]:
    """Packages first, then the commands of the set-up, in order."""
    runtime = template.runtime
    packages = [Step(field="runtime.packages", argv=(*_APT, *runtime.packages))] if runtime.packages else []
    setup = [
        Step(field=f"runtime.setup[{index}]", argv=("/bin/sh", "-c", command))
        for index, command in enumerate(runtime.setup)
    ]
    return (*packages, *setup)


class Builder:
    """Runs steps in build sandboxes, and keeps what they change. Whoever is cancelled here leaves neither a sandbox nor a thread.

    Args:
        place: the engine's own services. clock: seconds, monotonic. wall: ns since the epoch, as files are dated.
    """

    def __init__(
        self,
        place: Workplace,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._place = place
        self._clock = clock
        self._wall = wall

    async def run(
        self, spec: SandboxSpec, steps: Sequence[Step], tree: Path, *, latest: int, workdir: str = ""
    ) -> None:
        """Fill the empty directory ``tree`` with what the steps change of the images that ``spec`` names.

        Args:
            latest: ns since the epoch: what is dated later, or was written by the build, gets this date, so that the time of the build
                does not show.
            workdir: where commands must be able to run afterwards; "" = nothing is asked.

        Raises:
            BuildFailed: a step did not succeed, or all together took too long. BadRequest: there is no such ``workdir``.
            As :meth:`~dsec.ports.engine.SandboxService.create` and :func:`~dsec.images.layer_copy.copy_layer`.
        """
        begin, deadline = self._wall() - _CLOCK_GRAIN, self._clock() + SECONDS
        async with self._sandbox(_for_building(spec, latest)) as sandbox:
            for step in steps:
                await self._step(sandbox, step, deadline - self._clock())
            if workdir:
                await self._check_workdir(sandbox, workdir)
            async with self._place.changes.changes(sandbox) as changed:
                await attended(
                    lambda check: copy_layer(changed, tree, latest=latest, since=begin, check=check)
                )
        await attended(lambda _: clear_scratch(tree))

    async def compile(self, spec: SandboxSpec, target: PythonTarget, tree: Path) -> None:
        """Fill the empty directory ``tree`` with the byte code of packages, made by the Python of the image itself.

        It stays empty when that Python makes none. What else it may have written is in it too.

        Raises: BuildFailed: it did not end. As :meth:`run`.
        """
        async with self._sandbox(_for_building(spec, WHEN * 10**9)) as sandbox:
            result = await self._place.execs.run(sandbox, _request(bytecode_command(target), SECONDS))
            if result.timed_out or result.signal:
                raise BuildFailed(
                    f"byte code of dependencies: {_outcome(result)}{_last_words(result)}",
                    hint="build it again",
                    field="runtime.dependencies",
                    exit_code=result.exit_code,
                )
            if result.exit_code not in _COMPILED:
                return
            async with self._place.changes.changes(sandbox) as changed:
                await attended(lambda check: copy_layer(changed, tree, check=check))

    @asynccontextmanager
    async def _sandbox(self, spec: SandboxSpec) -> AsyncIterator[SandboxId]:
        info = await self._place.sandboxes.create(spec)
        try:
            yield info.id
        finally:
            with CancelScope(shield=True), suppress(DsecError):  # with the janitor
                await self._place.sandboxes.destroy(info.id, reason="its build ended")

    async def _step(self, sandbox: SandboxId, step: Step, left: float) -> None:
        """``left``: seconds for it, and for all that follow."""
        if left <= 0:
            raise _failed(step, f"no time was left for it: a build may take {SECONDS:g} s", None)
        result = await self._place.execs.run(sandbox, _request(step.argv, left))
        if not result.ok:
            raise _failed(step, _outcome(result), result)

    async def _check_workdir(self, sandbox: SandboxId, workdir: str) -> None:
        """Asked inside, where the image's own links lead nowhere else.  Raises: BadRequest."""
        result = await self._place.execs.run(
            sandbox, _request(("/bin/sh", "-c", 'cd -- "$1"', "sh", workdir), _LOOK_SECONDS)
        )
        if not result.ok or _is_scratch(workdir):
            raise BadRequest(
                f"runtime.workdir: there is no directory {workdir}, neither in the base nor after runtime.setup",
                hint="let a command of runtime.setup make it; nothing stays below /tmp, /var/tmp and /run",
                field="runtime.workdir",
            )


def _request(argv: Sequence[str], seconds: float) -> ExecRequest:
    return ExecRequest(argv=tuple(os.fsencode(word) for word in argv), user=ROOT, timeout=seconds)


def _failed(step: Step, outcome: str, result: ExecResult | None) -> BuildFailed:
    """``result``: None when it was not begun."""
    said = _last_words(result) if result is not None else ""
    late = result is None or result.timed_out
    return BuildFailed(
        f"{step.field}: {outcome}: {shlex.join(step.argv):.200}{said}",
        hint="let the build do less" if late else step.hint,
        field=step.field,
        exit_code=result.exit_code if result is not None else None,
    )


def _is_scratch(path: str) -> bool:
    return any(path.startswith(f"/{name}/") for name in _SCRATCH)


def _for_building(spec: SandboxSpec, latest: int) -> SandboxSpec:
    """The images, variables and directory of a template's sandboxes; nothing of the host, and time enough."""
    settings = {
        "DEBIAN_FRONTEND": "noninteractive",
        "PYTHONDONTWRITEBYTECODE": "1",  # made later, for all packages at once
        "SESSION_ID": "build",  # every build's: one of its own would be another each time
        "SOURCE_DATE_EPOCH": str(latest // 10**9),
    }
    return replace(
        spec,
        level=Level.CONTAINER,
        limits=LIMITS,
        ttl=SECONDS + 600,  # whoever else ends
        idle=0.0,
        read_only=False,
        user="",
        hostname="",
        volumes=(),
        env=MappingProxyType({**settings, **spec.env}),
        labels=MappingProxyType({LABEL: spec.template or "template"}),
    )


def _outcome(result: ExecResult) -> str:
    if result.timed_out:
        return f"it did not end within the {SECONDS:g} s that a build may take"
    if result.start_errno:
        return f"it could not be started ({os.strerror(result.start_errno)})"
    return f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"


def _last_words(result: ExecResult) -> str:
    said = (result.stderr.strip() or result.stdout.strip())[-_TOLD:].decode("utf-8", "backslashreplace")
    return f"\n{said}" if said else ""


def clear_scratch(tree: Path) -> None:
    """Take out what is below the places that are new for every run. The tree is a stranger's: no link is followed."""
    for name in _SCRATCH:
        descriptor = _folder(tree, name)
        if descriptor is None:
            continue
        try:
            before = os.fstat(descriptor)
            for entry in os.listdir(descriptor):
                _remove(entry, descriptor)
            os.utime(descriptor, ns=(before.st_mtime_ns, before.st_mtime_ns))
        finally:
            os.close(descriptor)


def _folder(tree: Path, name: str) -> int | None:
    """A directory below the tree, reached through directories alone."""
    root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return reached(root, name.split("/"))
    finally:
        os.close(root)


def _remove(name: str, directory: int) -> None:
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISDIR(info.st_mode):
        shutil.rmtree(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)
