"""How big a pool becomes, and the numbers of btrfs's ioctls."""

from __future__ import annotations

import pytest

from dsec.errors import StorageFull
from dsec.stores import btrfs
from dsec.stores.pool import GIB, pool_size


@pytest.mark.parametrize(
    ("free", "wanted", "durable", "size"),
    [
        (100 * GIB, None, False, 4 * GIB),
        (8 * GIB, None, False, 2 * GIB),
        (1000 * GIB, None, True, 16 * GIB),
        (40 * GIB, None, True, 10 * GIB),
        (100 * GIB, 5 * GIB + 1, True, 5 * GIB),
    ],
)
def test_the_size_of_a_pool(free: int, wanted: int | None, durable: bool, size: int) -> None:
    assert pool_size(free, wanted, durable=durable) == size


@pytest.mark.parametrize(("free", "wanted"), [(GIB, 2 * GIB), (GIB // 4, None), (GIB, 4096)])
def test_a_pool_that_does_not_fit_is_refused_with_numbers(free: int, wanted: int | None) -> None:
    with pytest.raises(StorageFull) as caught:
        pool_size(free, wanted, durable=False)
    assert caught.value.facts["free"] == free


def test_numbers_of_the_kernel_headers() -> None:
    assert btrfs._IOC_SUBVOL_CREATE == 0x5000940E
    assert btrfs._IOC_SNAP_DESTROY == 0x5000940F
    assert btrfs._IOC_QUOTA_CTL == 0xC0109428
    assert btrfs._IOC_QGROUP_LIMIT == 0x8030942B


@pytest.mark.parametrize("name", ["", "a/b", "a\0b", "x" * 256])
def test_names_that_no_subvolume_has(name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        btrfs.create_subvolume(-1, name)
