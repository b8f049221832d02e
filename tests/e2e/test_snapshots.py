"""Snapshots, forks and rollback on the real thing: exact, apart, and gone when they are removed."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import Dsec, Limits, Settings, Volume
from dsec.client.sync import Sandbox
from dsec.errors import Conflict, DsecError, FileProblem, NotFound, QuotaExceeded, UnknownOutcome, Unsupported
from dsec.model.sandbox import Flag

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]
TREE = r"""
set -e
mkdir -p tree/deep; printf one > tree/file; ln tree/file tree/hard; ln -s file tree/link; chmod 4750 tree/file
printf '\377' > "tree/deep/odd$(printf '\377')"; truncate -s 1M tree/sparse; touch -d 2001-02-03T04:05:06.789Z tree/deep
rm -f /etc/hosts; printf changed > /etc/hostname; mkfifo tree/pipe; printf x > /tmp/t; printf h > /home/user/h
"""
# Everything a snapshot must keep: path, type, mode, owner, size, times, links, targets and content.
FINGERPRINT = (
    r"cd /; { find workspace etc tmp home root -printf '%p %y %m %U %G %s %T@ %n %l\n' | sort;"
    r" find workspace etc tmp home root -type f -print0 | sort -z | xargs -0 sha256sum; } | sha256sum"
)


@pytest.fixture(scope="module")
def dsec(image_store: Path) -> Iterator[Dsec]:
    with Dsec(settings=Settings(images=image_store, pool=0, pool_bytes=1 << 30)) as opened:
        with opened.sandboxes.create() as sandbox:
            sandbox.fork(1)[0].destroy()  # what an engine and its loop open once, they open now
        yield opened


def fingerprint(sandbox: Sandbox) -> str:
    done = sandbox.exec(FINGERPRINT, user="root", timeout=60)
    assert done.ok, done.stderr
    return done.text


def changed(sandbox: Sandbox) -> None:
    done = sandbox.exec(TREE, user="root")
    assert done.ok, done.stderr


def test_a_snapshot_holds_everything_and_nothing_later(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as sandbox:
        changed(sandbox)
        before = fingerprint(sandbox)
        snapshot = sandbox.snapshot()
        assert 0 < snapshot.paused < 5
        sandbox.exec("rm -rf tree; echo 127.0.0.1 x > /etc/hosts; printf later > new", user="root")
        assert fingerprint(sandbox) != before
        with dsec.sandboxes.create(snapshot) as again:
            assert fingerprint(again) == before
        sandbox.rollback(snapshot)
        assert fingerprint(sandbox) == before
        dsec.snapshots.remove(snapshot.id)


def test_a_snapshot_outlives_its_sandbox_and_what_began_with_it_outlives_the_snapshot(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as sandbox:
        changed(sandbox)
        before = fingerprint(sandbox)
        snapshot = sandbox.snapshot()
    with dsec.sandboxes.create(snapshot) as again, dsec.sandboxes.create(snapshot) as other:
        dsec.snapshots.remove(snapshot.id)
        with pytest.raises(NotFound):
            dsec.sandboxes.create(snapshot)
        assert fingerprint(again) == fingerprint(other) == before
        later = again.snapshot()  # of what began with a snapshot that is gone
        with dsec.sandboxes.create(later) as third:
            assert fingerprint(third) == before
        dsec.snapshots.remove(later.id)


def test_children_are_strangers_to_one_another_and_to_their_parent(dsec: Dsec) -> None:
    with dsec.sandboxes.create(env={"A": "b"}) as parent:
        parent.files.write("shared", b"before")
        children = parent.fork(8)
        try:
            parent.files.write("shared", b"parent")
            for number, child in enumerate(children):
                child.exec(
                    f"printf {number} > shared; printf {number} > own{number}; printf {number} > /dev/shm/x"
                )
            for number, child in enumerate(children):
                assert child.files.read("shared") == b"%d" % number
                assert [entry.name for entry in child.files.list()] == [f"own{number}", "shared"]
                assert child.exec("printf $A; cat /dev/shm/x").text == f"b{number}"
            assert parent.files.read("shared") == b"parent"
            sessions = {child.exec("printf $SESSION_ID").text for child in (parent, *children)}
            assert len(sessions) == 9
            assert len({child.exec("head -c 16 /dev/urandom | sha256sum").text for child in children}) == 8
        finally:
            for child in children:
                child.destroy()


def test_every_copy_is_another_machine(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as parent:
        parent.exec("tr -d - < /proc/sys/kernel/random/uuid > /etc/machine-id", user="root")
        snapshot = parent.snapshot()
        with dsec.sandboxes.create(snapshot) as again:
            children = [again, *parent.fork(3)]
            ids = {child.files.read("/etc/machine-id") for child in (parent, *children)}
            assert len(ids) == 5
            assert {len(one) for one in ids} == {33}
            for child in children:
                child.destroy()
        dsec.snapshots.remove(snapshot.id)


def test_processes_are_not_copied_and_end_with_a_rollback(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as sandbox:
        snapshot = sandbox.snapshot()
        process = sandbox.start("sleep 100 & setsid sleep 101 & sleep 102")
        (child,) = sandbox.fork()
        with child:
            assert child.exec("pgrep sleep").exit_code == 1
        assert sandbox.exec("pgrep -c sleep").text == "3\n"
        sandbox.rollback(snapshot)
        with pytest.raises(UnknownOutcome, match="rolled back"):
            process.wait()
        assert sandbox.exec("pgrep sleep").exit_code == 1
        dsec.snapshots.remove(snapshot.id)


def test_a_child_has_the_quota_of_its_parent_beyond_what_they_share(dsec: Dsec) -> None:
    with dsec.sandboxes.create(limits=Limits(disk_mib=32)) as parent:
        parent.exec("head -c 20000000 /dev/urandom > a; sync a")
        (child,) = parent.fork()
        with child:
            assert child.exec("head -c 10000000 /dev/urandom > b; sync b").ok
            assert not child.exec("head -c 60000000 /dev/urandom > c && sync c").ok
            with pytest.raises(QuotaExceeded):
                child.files.write("d", bytes(60_000_000))
            assert parent.exec("sha256sum a").text == child.exec("sha256sum a").text


def test_what_is_written_meanwhile_is_of_one_moment(dsec: Dsec) -> None:
    """A writer appends numbered lines to two files in turn: in every snapshot they agree."""
    with dsec.sandboxes.create() as sandbox:
        sandbox.start("i=0; while :; do i=$((i+1)); echo $i >> a; echo $i >> b; done")
        kept = []
        for _ in range(6):
            time.sleep(0.05)
            kept.append(sandbox.snapshot())
        for snapshot in kept:
            with dsec.sandboxes.create(snapshot) as again:
                a, b = (again.files.read(name).split() for name in "ab")
                assert a == [b"%d" % n for n in range(1, len(a) + 1)]
                assert len(a) - len(b) in (0, 1)
            dsec.snapshots.remove(snapshot.id)


def test_many_at_once(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as sandbox:
        sandbox.files.write("f", b"x")
        kept: list[str] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(5):
                    snapshot = sandbox.snapshot()
                    kept.append(snapshot.id)
                    with dsec.sandboxes.create(snapshot) as again:
                        assert again.files.read("f") == b"x"
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert len(dsec.snapshots.list(sandbox.id)) == len(set(kept)) == 20
        for snapshot in kept:
            dsec.snapshots.remove(snapshot)
        assert dsec.snapshots.list() == ()


def test_twenty_runs_begin_alike(dsec: Dsec) -> None:
    with dsec.sandboxes.create() as sandbox:
        changed(sandbox)
        snapshot = sandbox.snapshot()
    seen = set()
    for _ in range(20):
        with dsec.sandboxes.create(snapshot) as run:
            begun = fingerprint(run)
            around = run.exec(
                "env | grep -v SESSION_ID | sort; cat /proc/mounts /proc/net/tcp; hostname; id"
            ).text
            seen.add(hashlib.sha256((begun + around).encode()).hexdigest())
            run.exec("rm -rf tree; echo residue > /tmp/residue; (setsid sleep 100 &)", user="root")
    assert len(seen) == 1
    dsec.snapshots.remove(snapshot.id)


def test_volumes_are_read_only_in_a_child(dsec: Dsec, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with dsec.sandboxes.create(volumes=[Volume(tmp_path, "/data")]) as parent:
        (child,) = parent.fork()
        with child:
            assert parent.exec("touch /data/a").ok
            assert not child.exec("touch /data/b").ok


def test_level_process_has_none(dsec: Dsec) -> None:
    with dsec.sandboxes.create(level="process") as sandbox:
        assert Flag.SNAPSHOTS not in sandbox.flags
        for act in (sandbox.snapshot, sandbox.fork):
            with pytest.raises(Unsupported):
                act()
    with dsec.sandboxes.create() as sandbox:
        snapshot = sandbox.snapshot()
    with pytest.raises(Conflict):
        dsec.sandboxes.create(snapshot, level="process")
    dsec.snapshots.remove(snapshot.id)


def test_children_of_a_fork_are_machines_of_their_own(dsec: Dsec) -> None:
    """Names of machines differ among siblings and from the parent, also after a rollback; runs of a snapshot are alike (above)."""
    with dsec.sandboxes.create() as parent:
        parent.exec("echo 0123456789abcdef0123456789abcdef > /etc/machine-id", user="root")
        snapshot = parent.snapshot()
        children = parent.fork(3)
        script = "hostname; cat /etc/machine-id /proc/sys/kernel/hostname; echo $SESSION_ID"
        told = [one.exec(script).text.split() for one in (parent, *children)]
        for which in zip(*told, strict=True):
            assert len(set(which)) == 4
        name = told[1][0]
        children[0].rollback(snapshot)
        assert children[0].exec("hostname").text.strip() == name
        for child in children:
            child.destroy()


def test_a_byte_that_was_flipped_on_the_disk_is_never_taken_for_the_right_one(
    image_store: Path, tmp_path: Path
) -> None:
    """A snapshot that stays in its pool is checked by the sums of the file system, block by block, as it is read."""
    home, content = tmp_path / "home", os.urandom(1 << 20)
    settings = Settings(images=image_store, pool=0, pool_bytes=1 << 28)
    with Dsec(home, settings=settings) as engine, engine.sandboxes.create() as sandbox:
        sandbox.files.write("/workspace/kept", content)
        snapshot = sandbox.snapshot()
    (pool,) = home.rglob("layers.img")

    def flip() -> None:
        with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
            place = view.find(content[8192:8256])
            assert place > 0
            view[place + 100] ^= 1

    flip()
    with Dsec(home, settings=settings) as engine, engine.sandboxes.create(snapshot) as copy:
        done = copy.exec("cat /workspace/kept | wc -c; cat /workspace/kept > /dev/null")
        assert (done.exit_code, b"Input/output error" in done.stderr) == (1, True)
        with pytest.raises(FileProblem):
            copy.files.read("/workspace/kept")
        with pytest.raises(DsecError):
            engine.templates.promote(snapshot, "flipped")
    flip()  # positive control
    with Dsec(home, settings=settings) as engine:
        with engine.sandboxes.create(snapshot) as copy:
            assert copy.files.read("/workspace/kept") == content
        engine.snapshots.remove(snapshot.id)
