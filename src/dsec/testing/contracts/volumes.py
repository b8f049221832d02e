"""What every table of volumes must do.

A back-end's test class inherits this and brings fixtures: ``records``, open, empty and with room for five, and ``journal``, which keeps their records.
"""

from __future__ import annotations

import pytest

from dsec.errors import Conflict, NotFound, StorageFull
from dsec.model.ids import new_volume_id
from dsec.model.journal import Draft, Phase
from dsec.model.volumes import VolumeInfo
from dsec.ports.journal import Journal, VolumeRecords

pytestmark = pytest.mark.anyio
MOST = 5


def volume(name: str = "data", project: str = "default") -> VolumeInfo:
    """One with every field set that is kept."""
    return VolumeInfo(id=new_volume_id(), project=project, name=name, size_mib=7, created_at=1000.25)


def note(ref: str = "") -> Draft:
    """A record to go with a change."""
    return Draft(chain="engine", act="test.volume", phase=Phase.NOTE, ref=ref, payload={})


class VolumesContract:
    """Of :class:`~dsec.ports.journal.VolumeRecords`."""

    async def test_one_is_kept_found_and_forgotten(self, records: VolumeRecords, journal: Journal) -> None:
        info = volume()
        await records.keep(info, note(info.id))
        assert await records.find("default", "data") == info
        assert await records.all() == await records.all("default") == (info,)
        await records.forget("default", "data", note("gone"))
        assert await records.all() == ()
        assert [one.ref for one in await journal.latest("engine", "test.volume")] == ["gone", info.id]

    async def test_a_project_sees_its_own(self, records: VolumeRecords) -> None:
        one, other = volume(), volume(project="other")
        await records.keep(one, note())
        for act in (records.find("other", "data"), records.forget("other", "data", note())):
            with pytest.raises(NotFound) as caught:
                await act
            assert "default" not in str(caught.value)
        await records.keep(other, note())
        assert (await records.find("default", "data"), await records.find("other", "data")) == (one, other)
        assert (await records.all("default"), await records.all("other")) == ((one,), (other,))
        assert await records.all() == (one, other)
        await records.forget("other", "data", note())
        assert await records.find("default", "data") == one

    async def test_a_name_is_given_once(self, records: VolumeRecords, journal: Journal) -> None:
        await records.keep(volume(), note("first"))
        with pytest.raises(Conflict, match="data"):
            await records.keep(volume(), note("second"))
        assert [one.ref for one in await journal.latest("engine", "test.volume")] == ["first"]

    async def test_a_name_that_is_forgotten_can_be_given_again(self, records: VolumeRecords) -> None:
        await records.keep(volume(), note())
        await records.forget("default", "data", note())
        with pytest.raises(NotFound, match="data"):
            await records.forget("default", "data", note())
        again = volume()
        await records.keep(again, note())
        assert (await records.find("default", "data")).id == again.id

    async def test_full_is_said_at_once(self, records: VolumeRecords, journal: Journal) -> None:
        for number in range(MOST):
            await records.keep(volume(f"v{number}", f"p{number % 2}"), note())
        with pytest.raises(StorageFull, match=str(MOST)):
            await records.keep(volume("more"), note("more"))
        assert "more" not in [one.ref for one in await journal.latest("engine", "test.volume")]
        await records.forget("p0", "v0", note())
        await records.keep(volume("more"), note())
