"""Problems of an engine that are told to somebody."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from dsec.control.alerts import Alerts, CommandSender, Sender
from dsec.model.alerts import Alert
from dsec.model.ids import SandboxId
from dsec.model.journal import Json, Record
from dsec.model.sandbox import Metrics, Problem, SandboxInfo
from dsec.ports.engine import ObserveService, Services


def alerting(services: Services, alert: Alert, stack: contextlib.AsyncExitStack) -> Services:
    """The same services, whose problems are told until the stack is closed; that they cannot be told is one of them."""
    alerts = Alerts(services.observe.problems, _sender(alert), persists=alert.persists)
    alerts.start()
    stack.push_async_callback(alerts.close)
    return replace(services, observe=_Alerted(services.observe, alerts))


def _sender(alert: Alert) -> Sender:
    if alert.command:
        return CommandSender(alert.command, alert.timeout)
    webhook = import_module("dsec.control.webhook")  # its HTTP library is slow to load
    sender: Sender = webhook.WebhookSender(alert.url, alert.timeout)
    return sender


class _Alerted(ObserveService):
    """Looking, with the problems of telling problems."""

    def __init__(self, inner: ObserveService, alerts: Alerts) -> None:
        self._inner = inner
        self._alerts = alerts

    async def metrics(self, sandbox: SandboxId) -> Metrics:
        return await self._inner.metrics(sandbox)

    async def events(self, sandbox: SandboxId, *, after: int = 0, limit: int = 1000) -> tuple[Record, ...]:
        return await self._inner.events(sandbox, after=after, limit=limit)

    async def problems(self) -> tuple[Problem, ...]:
        return (*await self._inner.problems(), *self._alerts.problems())

    async def wait(self, sandbox: SandboxId) -> SandboxInfo:
        return await self._inner.wait(sandbox)

    async def decide(self, sandbox: SandboxId, decision: Mapping[str, Json]) -> Record:
        return await self._inner.decide(sandbox, decision)
