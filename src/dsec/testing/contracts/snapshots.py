"""What every table of snapshots must do.

A back-end's test class inherits this and brings fixtures: ``records``, open and empty, and ``journal``, which keeps their records.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsec.errors import Conflict, NotFound
from dsec.model.ids import SandboxId, new_sandbox_id, new_snapshot_id
from dsec.model.sandbox import SandboxSpec
from dsec.model.snapshots import SnapshotInfo, SnapshotKind
from dsec.ports.journal import Journal, SnapshotRecords
from dsec.testing.contracts.volumes import note

pytestmark = pytest.mark.anyio


def snapshot(
    project: str = "default", *, sandbox: SandboxId | None = None, created_at: float = 1000.25
) -> SnapshotInfo:
    """One with every field set that is kept."""
    return SnapshotInfo(
        id=new_snapshot_id(),
        sandbox=sandbox or new_sandbox_id(),
        kind=SnapshotKind.FILES,
        spec=SandboxSpec(project=project, labels={"a": "b"}),
        created_at=created_at,
        paused=0.5,
    )


class SnapshotsContract:
    """Of :class:`~dsec.ports.journal.SnapshotRecords`."""

    async def test_one_is_kept_found_and_forgotten(self, records: SnapshotRecords, journal: Journal) -> None:
        info = snapshot()
        await records.keep(info, note(info.id))
        assert await records.find(info.id) == info
        with pytest.raises(Conflict):
            await records.keep(info, note("again"))
        await records.forget(info.id, note("gone"))
        with pytest.raises(NotFound):
            await records.find(info.id)
        with pytest.raises(NotFound):
            await records.forget(info.id, note("again"))
        assert [one.ref for one in await journal.latest("engine", "test.volume")] == ["gone", info.id]

    async def test_those_of_a_sandbox_and_of_a_project_oldest_first(self, records: SnapshotRecords) -> None:
        sandbox = new_sandbox_id()
        infos = [snapshot(f"p{n % 2}", created_at=10.0 - n) for n in range(4)]
        infos += [
            snapshot("p0", sandbox=sandbox, created_at=20.0),
            snapshot("p1", sandbox=sandbox, created_at=5.5),
        ]
        for info in infos:
            await records.keep(info, note())
        ordered = tuple(sorted(infos, key=lambda info: info.created_at))
        assert await records.all() == ordered
        for project in ("p0", "p1", "nobody", ""):
            wanted = tuple([info for info in ordered if info.spec.project == project])
            assert await records.all(project=project) == wanted
        assert await records.all(sandbox) == (infos[5], infos[4])
        assert await records.all(sandbox, project="p0") == (infos[4],)
        assert await records.all(new_sandbox_id()) == ()

    async def test_its_project_is_that_of_its_specification(self, records: SnapshotRecords) -> None:
        info = snapshot()
        info = replace(info, spec=replace(info.spec, project="other"))
        await records.keep(info, note())
        assert await records.all(project="other") == (info,)
