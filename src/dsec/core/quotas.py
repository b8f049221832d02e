"""What each project holds, and whether it may hold more. Without a store or a task of its own: one owner, who asks before he acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final

from dsec.errors import OverQuota
from dsec.model.sandbox import SandboxSpec, State
from dsec.model.snapshots import SnapshotInfo
from dsec.model.tenants import Quota
from dsec.model.volumes import VolumeInfo

BYTES_PER_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What is held of each thing that a quota bounds; as a change, numbers may be negative. ``journal`` in bytes."""

    sandboxes: int = 0
    dormant: int = 0
    cpu_millis: int = 0
    memory_mib: int = 0
    disk_mib: int = 0
    journal: int = 0

    def __add__(self, other: Holding) -> Holding:
        return Holding(
            sandboxes=self.sandboxes + other.sandboxes,
            dormant=self.dormant + other.dormant,
            cpu_millis=self.cpu_millis + other.cpu_millis,
            memory_mib=self.memory_mib + other.memory_mib,
            disk_mib=self.disk_mib + other.disk_mib,
            journal=self.journal + other.journal,
        )

    def __mul__(self, count: int) -> Holding:
        return Holding(**{name: getattr(self, name) * count for name in NAMES})

    def __sub__(self, other: Holding) -> Holding:
        return self + other * -1

    def __bool__(self) -> bool:
        return self != NOTHING

    def covers(self, other: Holding) -> bool:
        """Whether it is at least as much of everything."""
        return all(getattr(self, name) >= getattr(other, name) for name in NAMES)

    @property
    def growth(self) -> Holding:
        """Of a change, what becomes more."""
        return Holding(**{name: max(getattr(self, name), 0) for name in NAMES})


NAMES: Final = tuple(field.name for field in fields(Holding))
NOTHING: Final = Holding()
_UNITS: Final[Mapping[str, str]] = {
    "sandboxes": "sandboxes that run, are paused or are being made",
    "dormant": "hibernated and cold sandboxes",
    "cpu_millis": "thousandths of a CPU of its sandboxes together",
    "memory_mib": "MiB of memory of its sandboxes together",
    "disk_mib": "MiB of disk of its sandboxes, snapshots, volumes and the images of its templates together",
    "journal_mib": "MiB in the journal",
}
_HINTS: Final[Mapping[str, str]] = {
    "disk_mib": "destroy sandboxes, remove snapshots, volumes or templates, name smaller limits, or have an administrator raise the quota",
    "dormant": "destroy some that are dormant, or have an administrator raise the quota",
    "journal_mib": "its oldest records go with time; or have an administrator raise the quota",
}
_HINT: Final = (
    "destroy or hibernate some, name smaller limits, or have an administrator raise the project's quota"
)

DORMANT: Final = frozenset({State.HIBERNATED, State.COLD})
_ENDED: Final = frozenset({State.GONE, State.FAILED, State.LOST})


def held(state: State, spec: SandboxSpec) -> Holding:
    """What one sandbox holds. One that is cold has no files yet; one that has ended holds nothing."""
    if state in _ENDED:
        return NOTHING
    limits = spec.limits
    if state in DORMANT:
        return Holding(dormant=1, disk_mib=0 if state is State.COLD else limits.disk_mib)
    return Holding(
        sandboxes=1,
        cpu_millis=limits.cpu_millis,
        memory_mib=limits.memory_mib,
        disk_mib=limits.disk_mib,
    )


def may_be_refused(seen: State, to: State) -> bool:
    """Whether a sandbox that changes so comes to hold more of anything. Ending one is never refused."""
    return to not in _ENDED and to is not State.STOPPING and (seen in DORMANT) is not (to in DORMANT)


def snapshot_of(info: SnapshotInfo) -> Holding:
    """What one snapshot holds."""
    return Holding(disk_mib=info.spec.limits.disk_mib)


def volume(info: VolumeInfo) -> Holding:
    """What one volume holds."""
    return Holding(disk_mib=info.size_mib)


def bound(quota: Quota, name: str) -> int:
    """Of one thing, in the unit of a holding; 0 = none."""
    return quota.journal_mib * BYTES_PER_MIB if name == "journal" else getattr(quota, name)


@dataclass(slots=True, eq=False)
class Reservation:
    """What a project may still come to hold without being asked again. ``left`` shrinks as that is used, and is nothing in the end."""

    project: str
    left: Holding


class Ledger:
    """What projects hold, and what is reserved for what is being made for them, in memory.

    Args:
        quota: of a project, as it stands now.
    """

    def __init__(self, quota: Callable[[str], Quota]) -> None:
        self._quota = quota
        self._held: dict[str, Holding] = {}
        self._reserved: dict[str, Holding] = {}

    def held(self, project: str) -> Holding:
        """By one project; without what is reserved."""
        return self._held.get(project, NOTHING)

    def reserved(self, project: str) -> Holding:
        """For one project."""
        return self._reserved.get(project, NOTHING)

    def all(self) -> Mapping[str, Holding]:
        """What is held, by every project that holds anything."""
        return dict(self._held)

    def check(self, project: str, change: Holding) -> None:
        """Whether it may, now. What does not grow is never refused, also when a quota was lowered below what is held.

        Raises:
            OverQuota: ``facts`` holds ``quota`` (its name), ``used`` and ``limit``, in the quota's unit.
        """
        quota, now = self._quota(project), self.held(project) + self.reserved(project)
        for name in NAMES:
            more, most = getattr(change, name), bound(quota, name)
            if more > 0 and 0 < most < getattr(now, name) + more:
                raise _over(project, name, getattr(now, name), more, most)

    def put(self, project: str, change: Holding) -> None:
        """A change that is a fact, whatever the quota is."""
        _add(self._held, project, change)

    def reserve(self, project: str, change: Holding) -> Reservation:
        """Check, and keep room for it.  Raises: OverQuota: nothing was changed."""
        growth = change.growth
        self.check(project, growth)
        _add(self._reserved, project, growth)
        return Reservation(project, growth)

    def use(self, reservation: Reservation | None, project: str, change: Holding) -> Reservation:
        """Room for one change out of a larger reservation, or anew where that has none left for it.

        Raises:
            OverQuota: nothing was changed.
        """
        growth = change.growth
        if reservation is None or reservation.project != project or not reservation.left.covers(growth):
            return self.reserve(project, growth)
        reservation.left -= growth
        return Reservation(project, growth)

    def release(self, reservation: Reservation) -> None:
        """What is left of it is for others. Twice is once."""
        left, reservation.left = reservation.left, NOTHING
        _add(self._reserved, reservation.project, left * -1)

    def settle(self, reservation: Reservation, change: Holding) -> None:
        """It was made: what was reserved for it is held."""
        self.release(reservation)
        self.put(reservation.project, change)


def _add(numbers: dict[str, Holding], project: str, change: Holding) -> None:
    now = numbers.get(project, NOTHING) + change
    if now:
        numbers[project] = now
    else:
        numbers.pop(project, None)


def _over(project: str, name: str, used: int, more: int, most: int) -> OverQuota:
    if name == "journal":
        name, used, most = "journal_mib", -(-used // BYTES_PER_MIB), most // BYTES_PER_MIB
        asked = ""
    else:
        asked = f", and {more} more were asked for"
    return OverQuota(
        f"project {project!r} may have {most} {_UNITS[name]}: it has {used}{asked}",
        hint=_HINTS.get(name, _HINT),
        quota=name,
        used=used,
        limit=most,
        project=project,
    )
