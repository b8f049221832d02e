"""The asynchronous SDK, a module for each service. The blocking one (`dsec.client.sync`) is generated from it."""

from __future__ import annotations

from dsec.client.aio.engine import AsyncDsec
from dsec.client.aio.execs import AsyncExec, AsyncTerminal
from dsec.client.aio.files import AsyncFiles
from dsec.client.aio.images import AsyncImages
from dsec.client.aio.pool import AsyncPool
from dsec.client.aio.sandbox import AsyncSandbox
from dsec.client.aio.sandboxes import AsyncSandboxes
from dsec.client.aio.snapshots import AsyncSnapshots
from dsec.client.aio.templates import AsyncTemplates
from dsec.client.aio.tenants import AsyncKeys, AsyncProjects
from dsec.client.aio.volumes import AsyncVolumes

__all__ = [
    "AsyncDsec",
    "AsyncExec",
    "AsyncFiles",
    "AsyncImages",
    "AsyncKeys",
    "AsyncPool",
    "AsyncProjects",
    "AsyncSandbox",
    "AsyncSandboxes",
    "AsyncSnapshots",
    "AsyncTemplates",
    "AsyncTerminal",
    "AsyncVolumes",
]
