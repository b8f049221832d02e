"""Steps that every part of a sandbox's life takes: a change of state with its record, the end of its commands, what its runtime is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dsec.core.machine import Command, Event, decide
from dsec.errors import Conflict, DsecError
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import SandboxSpec
from dsec.node.handles import Handle
from dsec.node.kit import Kit
from dsec.ports.runtime import Plan

OK: Final[Mapping[str, Json]] = MappingProxyType({"outcome": "ok"})
NOTHING: Final[Mapping[str, Json]] = MappingProxyType({})
TRIES: Final = 8
GRACE: Final = (
    1.0  # seconds after its deadline at which the spawner ends a sandbox that the engine did not end
)
RECORD_PATIENCE: Final = 5.0  # seconds for commands in flight to record how they were cut off


async def move(
    kit: Kit,
    handle: Handle,
    event: Event,
    act: str,
    phase: Phase,
    facts: Mapping[str, Json] = NOTHING,
    reason: str = "",
) -> tuple[Command, ...]:
    """Decide, and record the decision; when somebody else was faster, decide again.

    A step that changes no state leaves no record.

    Raises:
        Conflict: that cannot happen to it now.
    """
    for _ in range(TRIES):
        seen = handle.info.state
        to, commands = decide(seen, event)
        if to is seen:
            return commands
        draft = Draft(chain=handle.id, act=act, phase=phase, payload=facts)
        try:
            handle.info = await kit.sandboxes.move(handle.id, seen=seen, to=to, draft=draft, reason=reason)
            return commands
        except Conflict:
            handle.info = await kit.sandboxes.get(handle.id)
    raise Conflict(f"{handle.id} kept changing state", hint="try again", tries=TRIES)


async def note(kit: Kit, handle: Handle, act: str, facts: Mapping[str, Json] = OK) -> None:
    """The result of a step whose intent changed the state."""
    await kit.journal.append(Draft(chain=handle.id, act=act, phase=Phase.RESULT, payload=facts))


async def cut_off(kit: Kit, handle: Handle, error: DsecError | None = None) -> None:
    """Commands in flight record their fate before the sandbox's own end is recorded."""
    runs = tuple(handle.runs.values())
    for run in runs:
        loss = error or handle.loss("while the command ran")
        if loss is not None:
            run.abandon(loss)
    await kit.guests.drop(handle)
    if runs:
        await asyncio.wait([run.settled for run in runs], timeout=RECORD_PATIENCE)


def plan_for(sandbox: SandboxId, spec: SandboxSpec, deadline: float = 0.0) -> Plan:
    """What the runtime is asked to make. ``deadline``: CLOCK_BOOTTIME seconds, 0 = none."""
    return Plan(
        id=sandbox,
        level=spec.level,
        limits=spec.limits,
        image=spec.base_digest or spec.base,
        layers=spec.layers,
        read_only=spec.read_only,
        volumes=spec.volumes,
        lent=spec.lent,
        deadline=spawner_deadline(deadline),
        hostname=spec.hostname or "sandbox",
    )


def spawner_deadline(deadline: float) -> float:
    """When the runtime ends it by itself, should no engine have done so: boot seconds, 0 = never."""
    return deadline + GRACE if deadline else 0.0
