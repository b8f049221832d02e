"""When a sandbox ends by itself. Boot time counts, because it cannot be set; wall time is for people."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.model.sandbox import SandboxInfo


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, on both clocks: seconds since the epoch, and CLOCK_BOOTTIME seconds of the boot ``boot_id``."""

    wall: float
    boot: float
    boot_id: str


def expiry_wall(created: Moment, now: Moment, ttl: float) -> float:
    """``expires_at`` of something that shall live ``ttl`` seconds from now (0 = without end).

    It is told on the wall clock of the moment of creation, so that a later step of that clock changes nothing.
    """
    if ttl <= 0:
        return 0.0
    same = created.boot_id == now.boot_id
    return created.wall + (now.boot - created.boot) + ttl if same else now.wall + ttl


def deadline_boot(info: SandboxInfo, now: Moment) -> float:
    """``info.expires_at`` as CLOCK_BOOTTIME seconds of the present boot, 0 = none."""
    if info.expires_at <= 0:
        return 0.0
    if info.boot_id == now.boot_id:
        return info.created_boot + (info.expires_at - info.created_at)
    # Another boot, or a record without one: only the wall clock is left. Never more than was granted at creation.
    left = min(info.expires_at - now.wall, info.expires_at - info.created_at)
    return now.boot + max(left, 0.0)


def next_end(deadline: float, idle: float, used: float, *, busy: bool) -> float:
    """The earliest moment (boot seconds) at which it may end by itself, 0 = never. Idleness never ends a busy one."""
    quiet = used + idle if idle > 0 and not busy else 0.0
    ends = [end for end in (deadline, quiet) if end > 0]
    return min(ends, default=0.0)
