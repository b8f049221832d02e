"""One command in a throw-away copy of its sandbox: made for it, and destroyed after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from dsec.errors import Unsupported
from dsec.model.execs import ExecInfo, ExecRequest, ExecResult
from dsec.model.ids import ExecId, SandboxId
from dsec.model.journal import Draft, Phase
from dsec.model.sandbox import Flag, SandboxInfo, SandboxSpec
from dsec.node.kit import Kit
from dsec.node.lifecycle import Lifecycle
from dsec.ports.engine import ExecService, ExecSession

LABEL: Final = "dsec.scratch-of"
GRACE: Final = 60.0  # seconds that a copy may live beyond its command's time-out, should this engine die
LONGEST: Final = 3600.0  # seconds, for a command without one


class ScratchExecs(ExecService):
    """Commands as ``inner`` runs them; those that ask for it, in a copy.

    The copy is a sandbox like any other (recorded, limited, with a time to live), so that nothing that ends this engine leaves it behind.
    Volumes are read-only in it: they are no part of what is thrown away.
    """

    def __init__(self, inner: ExecService, lifecycle: Lifecycle, kit: Kit) -> None:
        self._inner = inner
        self._lifecycle = lifecycle
        self._kit = kit

    def run(
        self, sandbox: SandboxId, request: ExecRequest, stdin: AsyncIterator[bytes] | None = None
    ) -> Coroutine[Any, Any, ExecResult]:
        if request.scratch:
            return self._run_in_copy(sandbox, request, stdin)
        return self._inner.run(sandbox, request, stdin)

    async def _run_in_copy(
        self, sandbox: SandboxId, request: ExecRequest, stdin: AsyncIterator[bytes] | None
    ) -> ExecResult:
        parent = (await self._kit.table.present(sandbox)).info
        copy = await self._lifecycle.create(_copy_of(parent, request), files_of=sandbox)
        try:
            note = Draft(chain=sandbox, act="exec.scratch", phase=Phase.NOTE, payload={"sandbox": copy.id})
            await self._kit.journal.append(note)
            return await self._inner.run(copy.id, replace(request, scratch=False), stdin)
        finally:
            await self._lifecycle.destroy(copy.id, reason="its command ended")

    async def start(self, sandbox: SandboxId, request: ExecRequest) -> ExecSession:
        if request.scratch:
            raise Unsupported(
                "scratch: a background command cannot run in a throw-away copy", hint="use exec()"
            )
        return await self._inner.start(sandbox, request)

    async def attach(
        self, sandbox: SandboxId, exec_id: ExecId, *, stdout: int = 0, stderr: int = 0
    ) -> ExecSession:
        return await self._inner.attach(sandbox, exec_id, stdout=stdout, stderr=stderr)

    async def list(self, sandbox: SandboxId) -> tuple[ExecInfo, ...]:
        return await self._inner.list(sandbox)


def _copy_of(parent: SandboxInfo, request: ExecRequest) -> SandboxSpec:
    """Raises: Unsupported: the level has no copies."""
    if Flag.SCRATCH not in parent.flags:
        raise Unsupported(
            f"scratch: level {parent.spec.level} cannot run a command in a throw-away copy",
            hint="use level='container'",
        )
    return replace(
        parent.spec,
        ttl=request.timeout + GRACE if request.timeout else LONGEST,
        idle=0.0,
        volumes=tuple(replace(volume, read_only=True) for volume in parent.spec.volumes),
        labels=MappingProxyType({LABEL: parent.id}),
    )
