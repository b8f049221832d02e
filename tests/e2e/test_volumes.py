"""Volumes on the real thing: kept from one sandbox to the next, bounded and read-only by the kernel, and nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import Dsec, Limits, Settings, Volume
from dsec.client.sync import Sandbox
from dsec.errors import Conflict, Denied, DsecError, NotFound, QuotaExceeded, Unsupported
from dsec.model.sandbox import MIB

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]
# What btrfs grants to whoever may write to a directory: a subvolume, then sharing what a file holds.
SUBVOLUME = r"""
import fcntl, os, struct, sys
place = sys.argv[1]
names = {0x5000940E: "create", 0x50009401: "snapshot", 0x5000940F: "destroy"}
for number, what in names.items():
    directory = os.open(place, os.O_RDONLY)
    argument = struct.pack("=q4088s", directory if what == "snapshot" else 0, what[:4].encode())
    try:
        fcntl.ioctl(directory, number, bytearray(argument))
        print(what, "done")
    except OSError as error:
        print(what, error.errno)
with open(place + "/one", "w+b") as one, open(place + "/two", "w+b") as two:
    one.write(b"x" * 100000)
    one.flush()
    fcntl.ioctl(two.fileno(), 0x40049409, one.fileno())
    print("shared", os.stat(place + "/two").st_size)
"""


@pytest.fixture(scope="module")
def dsec(image_store: Path) -> Iterator[Dsec]:
    with Dsec(settings=Settings(images=image_store, pool=0, pool_bytes=1 << 30)) as opened:
        with opened.sandboxes.create() as sandbox:
            sandbox.fork(1)[0].destroy()  # what an engine and its loop open once, they open now
        yield opened


@pytest.fixture
def data(dsec: Dsec) -> Iterator[str]:
    """A volume of 20 MiB called so."""
    dsec.volumes.create("data", size_mib=20)
    yield "data"
    for info in dsec.sandboxes.list():
        dsec.sandboxes.get(info.id).destroy()
    dsec.volumes.remove("data")


def done(sandbox: Sandbox, command: str, user: str = "") -> str:
    result = sandbox.exec(command, user=user, timeout=60)
    assert result.ok, result.stderr
    return result.text


def test_what_one_sandbox_leaves_the_next_one_finds(dsec: Dsec, data: str) -> None:
    with dsec.sandboxes.create(volumes=[f"{data}:/data"]) as first:
        done(first, "mkdir /data/deep && echo kept > /data/deep/file && chmod 640 /data/deep/file")
        done(first, "echo of root > /data/root; chown 0:33 /data/root", user="root")
        first.files.write("/data/big", bytes(2 * MIB))
    assert dsec.volumes.get(data).used_bytes >= 2 * MIB
    with dsec.sandboxes.create(volumes=[Volume.named(data, "/elsewhere", read_only=True)]) as second:
        assert done(second, "cat /elsewhere/deep/file") == "kept\n"
        assert done(second, "stat -c '%u:%g %a' /elsewhere /elsewhere/deep/file /elsewhere/root") == (
            "1000:1000 755\n1000:1000 640\n0:33 644\n"
        )


def test_the_kernel_bounds_it_and_it_can_be_emptied(dsec: Dsec, data: str) -> None:
    limits = Limits(disk_mib=64)
    with dsec.sandboxes.create(volumes=[f"{data}:/data"], limits=limits) as sandbox:
        for user in ("user", "root"):
            result = sandbox.exec("head -c 40M /dev/urandom > /data/big", user=user, timeout=60)
            assert not result.ok
            assert b"quota" in result.stderr.lower() or b"No space" in result.stderr
            assert 15 * MIB < dsec.volumes.get(data).used_bytes <= 20 * MIB
            done(sandbox, "rm /data/big", user=user)
        with pytest.raises(QuotaExceeded):
            sandbox.files.write("/data/big", bytes(40 * MIB))
        done(
            sandbox, "rm -f /data/big; sync; head -c 30M /dev/urandom > /workspace/own"
        )  # its own disk is another
        done(sandbox, "head -c 10M /dev/urandom > /data/fits")


def test_no_subvolume_can_be_made_beside_the_quota(dsec: Dsec, data: str) -> None:
    """The control, in tests/integration/test_volumes.py: outside of a sandbox the kernel grants it to anybody."""
    with dsec.sandboxes.create(volumes=[f"{data}:/data"]) as sandbox:
        for user in ("user", "root"):
            done(sandbox, "rm -rf /data/*", user="root")
            result = sandbox.exec(["python3", "-c", SUBVOLUME, "/data"], user=user)
            assert result.text == "create 1\nsnapshot 1\ndestroy 1\nshared 100000\n", result.stderr


def test_one_writes_and_who_only_reads_cannot(dsec: Dsec, data: str) -> None:
    with dsec.sandboxes.create(volumes=[f"{data}:/data"]) as writer:
        with pytest.raises(Conflict, match=writer.id) as caught:
            dsec.sandboxes.create(volumes=[f"{data}:/x"])
        assert caught.value.facts["holder"] == writer.id
        with dsec.sandboxes.create(volumes=[f"{data}:/data:ro"]) as reader:
            done(writer, "echo one > /data/f")
            assert done(reader, "cat /data/f") == "one\n", "a reader sees what is written"
            for act in (
                "touch /data/f",
                "rm /data/f",
                "mkdir /data/d",
                "chmod 777 /data",
                "mv /data/f /data/g",
            ):
                result = reader.exec(act, user="root")
                assert b"Read-only file system" in result.stderr, act
            assert not reader.exec("mount -o remount,rw /data", user="root").ok
        with pytest.raises(Conflict):
            dsec.volumes.remove(data)
    with dsec.sandboxes.create(volumes=[f"{data}:/data"]) as next_one:
        assert done(next_one, "cat /data/f; touch /data/f") == "one\n"


def test_of_many_at_once_exactly_one_writes(dsec: Dsec, data: str) -> None:
    won: list[Sandbox] = []
    lost: list[DsecError] = []

    def one() -> None:
        try:
            won.append(dsec.sandboxes.create(volumes=[f"{data}:/data"]))
        except DsecError as error:
            lost.append(error)

    threads = [threading.Thread(target=one) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert [type(error) for error in lost] == [Conflict] * 19


def test_projects_see_nothing_of_one_another(dsec: Dsec, data: str) -> None:
    with dsec.sandboxes.create(volumes=[f"{data}:/data"]) as mine:
        done(mine, "echo mine > /data/secret")
        with pytest.raises(NotFound):
            dsec.sandboxes.create(volumes=[f"{data}:/data:ro"], project="other")
        dsec.volumes.create(data, size_mib=5, project="other")
        try:
            with dsec.sandboxes.create(volumes=[f"{data}:/data"], project="other") as theirs:
                assert done(theirs, "ls -A /data") == ""
                assert done(theirs, "ls -A /data/..", user="root") != ""
                done(theirs, "echo theirs > /data/secret")
            assert done(mine, "cat /data/secret") == "mine\n"
        finally:
            dsec.volumes.remove(data, project="other")
        assert [info.name for info in dsec.volumes.list(project="other")] == []
        assert done(mine, "cat /data/secret") == "mine\n"


def test_nothing_of_the_pool_shows_through_it(dsec: Dsec, data: str) -> None:
    with dsec.sandboxes.create(volumes=[f"{data}:/data"]) as sandbox:
        done(sandbox, "ln -s / /data/up; ln -s ../../.. /data/far; mknod /data/fifo p")
        assert (
            done(sandbox, "ls /data/up/etc/passwd; ls -d /data/far/usr")
            == "/data/up/etc/passwd\n/data/far/usr\n"
        )
        assert "slot-" not in done(sandbox, "ls -a /data /data/.. /data/../..", user="root")
        facts = done(sandbox, "grep ' /data ' /proc/self/mountinfo")
        assert "nosuid" in facts
        assert "nodev" in facts
        assert not sandbox.exec("mknod /data/null c 1 3", user="root").ok


def test_copies_see_it_read_only(dsec: Dsec, data: str) -> None:
    with dsec.sandboxes.create(volumes=[f"{data}:/data"]) as sandbox:
        done(sandbox, "echo kept > /data/f")
        result = sandbox.exec("cat /data/f; echo lost > /data/f", scratch=True)
        assert (result.text, result.ok) == ("kept\n", False)
        with sandbox.fork(1)[0] as child:
            assert done(child, "cat /data/f") == "kept\n"
            assert not child.exec("touch /data/f").ok
            assert dsec.volumes.get(data).readers == (child.id,)
        before = sandbox.snapshot()
        done(sandbox, "echo later > /data/f; touch own")
        sandbox.rollback(before)
        assert done(sandbox, "cat /data/f; ls") == "later\n", "a volume is no part of a snapshot"
        done(sandbox, "echo again > /data/f")


def test_level_process_has_none(dsec: Dsec, data: str) -> None:
    with pytest.raises(Unsupported):
        dsec.sandboxes.create(level="process", volumes=[f"{data}:/data"])
    assert dsec.volumes.get(data).writer is None


def test_it_outlives_its_engine_and_so_do_claims(image_store: Path, tmp_path: Path) -> None:
    settings = Settings(images=image_store, pool=0, shelf=1, pool_bytes=256 * MIB)
    with Dsec(tmp_path / "home", settings=settings) as dsec:
        made = dsec.volumes.create("data", size_mib=20)
        holder = dsec.sandboxes.create(volumes=["data:/data"], ttl=120)
        done(holder, "echo kept > /data/f")
        used = dsec.volumes.get("data").used_bytes
    with Dsec(tmp_path / "home", settings=settings) as dsec:
        info = dsec.volumes.get("data")
        assert (info.id, info.writer, info.size_mib, info.used_bytes) == (made.id, holder.id, 20, used)
        with pytest.raises(Conflict, match=holder.id):
            dsec.sandboxes.create(volumes=["data:/data"])
        found = dsec.sandboxes.get(holder.id)
        assert done(found, "cat /data/f") == "kept\n"
        assert not found.exec("head -c 40M /dev/urandom > /data/big", timeout=60).ok, "the quota holds"
        found.destroy()
        with dsec.sandboxes.create(volumes=["data:/data"]) as sandbox:
            assert done(sandbox, "cat /data/f") == "kept\n"
        dsec.volumes.remove("data")
        assert dsec.volumes.list() == ()
    (tmp_path / "home/layers.img").unlink()


# Paths of the host

TEMPLATE = """
name: shows
version: 1.0
volumes: [{{source: {source}, target: /data, read_only: true}}]
"""


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    for name in ("allowed", "secret"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
    return tmp_path / "allowed"


def test_only_what_the_operator_allows_is_shown(image_store: Path, shown: Path) -> None:
    secret = shown.parent / "secret"
    (shown / "out").symlink_to(secret)
    settings = Settings(images=image_store, pool=0, shelf=1, pool_bytes=256 * MIB, host_paths=(shown,))
    with Dsec(settings=settings) as dsec:
        for source in (secret, shown / "out", shown / "../secret", Path("/"), Path("/etc/shadow")):
            with pytest.raises(Denied) as caught:
                dsec.sandboxes.create(volumes=[Volume(source, "/data", read_only=True)])
            assert "host_paths" in caught.value.hint
        assert all(info.state == "failed" for info in dsec.sandboxes.list())
        with dsec.sandboxes.create(volumes=[f"{shown}:/data:ro"]) as sandbox:
            assert done(sandbox, "cat /data/f") == "allowed"
            result = sandbox.exec("cat /data/out/f", user="root")
            assert not result.ok, "a link in it leads nowhere outside"
            before = sandbox.snapshot()
            shown.rename(shown.parent / "aside")
            shown.symlink_to(secret)
            with pytest.raises(Denied):
                sandbox.rollback(before)
            assert done(sandbox, "cat /data/f") == "allowed", "it runs on as it was"


def test_a_template_shows_nothing_of_the_host_unless_it_is_allowed(image_store: Path, shown: Path) -> None:
    common = {"images": image_store, "pool": 0, "shelf": 1, "pool_bytes": 256 * MIB}
    with Dsec(settings=Settings(**common)) as dsec:  # type: ignore[arg-type]
        dsec.templates.build(TEMPLATE.format(source=shown).encode())
        with pytest.raises(Denied, match="template"):
            dsec.sandboxes.create("shows")
        with dsec.sandboxes.create("shows", volumes=[f"{shown}:/data:ro"]) as sandbox:
            assert done(sandbox, "cat /data/f") == "allowed", "who asks named it himself"
        dsec.volumes.create("mine")
        with dsec.sandboxes.create("shows", volumes=["mine:/data"]) as sandbox:
            assert done(sandbox, "ls /data") == "", "... or put something else in its place"
    with (
        Dsec(settings=Settings(host_paths=(shown,), **common)) as dsec,
        dsec.sandboxes.create("shows") as one,
    ):  # type: ignore[arg-type]
        assert done(one, "cat /data/f") == "allowed"
        with one.fork(1)[0] as child:
            assert done(child, "cat /data/f") == "allowed"


def test_a_template_names_a_volume_of_whoever_runs_it(dsec: Dsec, data: str) -> None:
    text = b"name: names\nversion: 1.0\nvolumes: [{name: data, target: /d}]\nisolation: {volumes: shared}\n"
    dsec.templates.build(text)
    with dsec.sandboxes.create("names") as sandbox:
        done(sandbox, "echo kept > /d/f")
        assert dsec.volumes.get(data).writer == sandbox.id
    with pytest.raises(NotFound) as caught:
        dsec.sandboxes.create("names", project="other")
    assert "volume create" in caught.value.hint
