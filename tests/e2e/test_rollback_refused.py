"""A rollback that cannot be made leaves the sandbox as it is."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dsec import Dsec, Limits, Settings
from dsec.client.sync import Sandbox
from dsec.errors import BadRequest, Conflict, DsecError, StorageFull
from dsec.model.snapshots import SnapshotInfo

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]


def opened(image_store: Path) -> Dsec:
    return Dsec(settings=Settings(images=image_store, pool=0, pool_bytes=512 << 20))


def test_a_full_pool(image_store: Path) -> None:
    with opened(image_store) as dsec, dsec.sandboxes.create(limits=Limits(disk_mib=1024)) as sandbox:
        before = sandbox.snapshot()
        sandbox.exec("echo kept > note; head -c 480M /dev/urandom > big", timeout=60)
        with pytest.raises(StorageFull):
            sandbox.rollback(before)
        assert sandbox.exec("cat note; rm big").text == "kept\n"


def test_a_volume_that_is_gone(image_store: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    with opened(image_store) as dsec, dsec.sandboxes.create(volumes=[f"{shown}:/mnt/v"]) as sandbox:
        before = sandbox.snapshot()
        shown.rmdir()
        with pytest.raises(BadRequest):
            sandbox.rollback(before)
        assert sandbox.exec("true").ok


def _back(sandbox: Sandbox, snapshot: SnapshotInfo) -> None:
    with suppress(DsecError):
        sandbox.rollback(snapshot)


def test_a_snapshot_that_is_removed_meanwhile(image_store: Path) -> None:
    with opened(image_store) as dsec:
        for turn in range(10):
            with dsec.sandboxes.create() as sandbox:
                before = sandbox.snapshot()
                threads = [threading.Thread(target=_back, args=(sandbox, before)) for _ in range(3)]
                for each in threads:
                    each.start()
                time.sleep(0.002 * turn)
                with suppress(Conflict):
                    dsec.snapshots.remove(before.id)
                for each in threads:
                    each.join()
                assert sandbox.exec("true").ok


def test_commands_in_flight_do_not_delay_it(image_store: Path) -> None:
    with opened(image_store) as dsec, dsec.sandboxes.create() as sandbox:
        before = sandbox.snapshot()

        def run() -> None:
            with suppress(DsecError):
                sandbox.exec("sleep 20")

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.3)
        begun = time.monotonic()
        sandbox.rollback(before)
        assert time.monotonic() - begun < 1
        thread.join()
