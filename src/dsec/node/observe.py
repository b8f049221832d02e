"""Looking without changing."""

from __future__ import annotations

from collections.abc import Mapping

from dsec.core.machine import DORMANT, ENDED
from dsec.model.checks import check_count
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Json, Phase, Record
from dsec.model.sandbox import Metrics, Problem, SandboxInfo
from dsec.node import drafts
from dsec.node.handles import refusal
from dsec.node.janitor import Janitor
from dsec.node.kit import Kit
from dsec.ports.engine import ObserveService


class Observe(ObserveService):
    """Figures, records, problems."""

    def __init__(self, kit: Kit, janitor: Janitor) -> None:
        self._kit = kit
        self._janitor = janitor

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        if self._kit.table.find(sandbox) is None:
            info = await self._kit.table.info(sandbox)
            if info.state in DORMANT:
                return Metrics(memory_bytes=0, pids=0)
        handle = await self._kit.table.held(sandbox)
        figures = await handle.runtime.metrics(sandbox)
        handle.oom_kills = max(handle.oom_kills, figures.oom_kills)
        return figures

    async def events(self, sandbox: SandboxId, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        check_count("after", after, 0, 2**63 - 1)
        check_count("limit", limit, 1, 10_000)
        await self._kit.table.info(sandbox)
        return await self._kit.journal.read(sandbox, after=after, limit=limit)

    async def problems(self) -> tuple[Problem, ...]:
        return self._janitor.problems()

    async def wait(self, sandbox: SandboxId) -> SandboxInfo:
        with self._kit.table.ending(sandbox) as ended:
            info = await self._kit.table.info(sandbox)
            handle = self._kit.table.find(sandbox)
            if info.state in ENDED and (handle is None or handle.over.is_set()):
                return info
            await ended.wait()
        return (
            handle.info
            if handle is not None and handle.over.is_set()
            else await self._kit.table.info(sandbox)
        )

    async def decide(self, sandbox: SandboxId, decision: Mapping[str, Json]) -> Record:
        payload = drafts.decision(decision)
        info = await self._kit.table.info(sandbox)
        if info.state in ENDED:
            raise refusal(info)
        draft = Draft(chain=sandbox, act=drafts.DECISION, phase=Phase.NOTE, payload=payload)
        (receipt,) = await self._kit.journal.append(draft)
        handle = self._kit.table.find(sandbox)
        if handle is not None:
            handle.used = self._kit.clock.boot()
        (record,) = await self._kit.journal.read(sandbox, after=receipt.seq - 1, limit=1)
        return record
