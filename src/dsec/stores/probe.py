"""Whether writable layers can be had here: found out by making a small pool, which leaves nothing behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

from dsec.errors import DsecError
from dsec.model.health import Layer, Status
from dsec.stores import btrfs
from dsec.stores.pool import Pool, open_pool

_SIZE: Final = 256 * 2**20
_QUOTA: Final = 2**20
_SUBVOLUME: Final = "probe"


def storage_layers() -> tuple[Layer, ...]:
    """btrfs over a loop device, and a quota that holds. Blocking, some 100 ms."""
    try:
        with tempfile.TemporaryDirectory(prefix="dsec-probe-") as directory:
            pool = open_pool(Path(directory), _SIZE, durable=False)
            try:
                return (Layer("btrfs on a loop device", Status.ACTIVE, pool.device), _quota(pool))
            finally:
                pool.close()
                pool.wait_gone()
    except DsecError as error:
        why, hint = error.message, error.hint
    except OSError as error:
        why, hint = f"{error.filename}: {error.strerror}", "run as root on the host"
    return (
        Layer("btrfs on a loop device", Status.UNAVAILABLE, why, hint),
        Layer("disk quota", Status.UNAVAILABLE, "it needs the layer above"),
    )


def _quota(pool: Pool) -> Layer:
    """Write more than the quota allows, and be stopped."""
    btrfs.create_subvolume(pool.directory, _SUBVOLUME)
    inside = os.open(_SUBVOLUME, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pool.directory)
    try:
        btrfs.limit_qgroup(pool.directory, btrfs.subvolume_id(inside), _QUOTA)
        held = _stopped(inside)
    finally:
        os.close(inside)
    if not held:
        return Layer(
            "disk quota", Status.UNAVAILABLE, "a quota of 1 MiB let 4 MiB pass", "a kernel with btrfs qgroups"
        )
    return Layer("disk quota", Status.ACTIVE, "simple quotas" if pool.simple_quota else "qgroups")


def _stopped(directory: int) -> bool:
    file = os.open("big", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        for _ in range(4):
            os.write(file, os.urandom(_QUOTA))
            os.fsync(file)
    except OSError as error:
        return error.errno in (errno.EDQUOT, errno.ENOSPC)
    finally:
        os.close(file)
    return False
