"""The blocking SDK, a module for each service. Generated from `aio/__init__.py` by `scripts/sync_client.py`: do not edit."""

from __future__ import annotations

from dsec.client.sync.engine import Dsec
from dsec.client.sync.execs import Exec, Terminal
from dsec.client.sync.files import Files
from dsec.client.sync.images import Images
from dsec.client.sync.pool import Pool
from dsec.client.sync.sandbox import Sandbox
from dsec.client.sync.sandboxes import Sandboxes
from dsec.client.sync.snapshots import Snapshots
from dsec.client.sync.templates import Templates
from dsec.client.sync.tenants import Keys, Projects
from dsec.client.sync.volumes import Volumes

__all__ = [
    "Dsec",
    "Exec",
    "Files",
    "Images",
    "Keys",
    "Pool",
    "Projects",
    "Sandbox",
    "Sandboxes",
    "Snapshots",
    "Templates",
    "Terminal",
    "Volumes",
]
