"""Builders that race, die and are slow; registries; Debian."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from dsec.errors import (
    BadRequest,
    Busy,
    Conflict,
    NotFound,
    RuntimeUnavailable,
    StoreDamaged,
    TooLarge,
    Unsupported,
)
from dsec.images import host, system
from dsec.images.gc import collect
from dsec.images.registry import fetch
from dsec.images.store import ImageStore
from dsec.images.tools import enclosed, environment, run
from dsec.ports.storage import SHOWABLE, Image
from dsec.testing import images as make
from dsec.testing.images import directory, file, layer
from dsec.testing.registries import Registry, docker_registry, small_registry

pytestmark = [pytest.mark.needs_root]

ENTRY = "00000000-0000-4000-8000-000000000000"
LAYERS = (layer(directory("etc"), file("etc/motd", b"hello\n")),)

BUILDER = """
import anyio, sys, time
from pathlib import Path
from dsec.images.store import ImageStore

def told(step):
    word = step.what
    print(word, flush=True)
    if word == sys.argv[3]:
        time.sleep(60)

image = anyio.run(ImageStore(Path(sys.argv[1]), progress=told).get, sys.argv[2])
print(image.digest)
"""


def builder(store: Path, name: str, stop_at: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, os.fspath(store), name, stop_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def get(store: Path, name: str) -> Image:
    return anyio.run(ImageStore(store).get, name)


def test_builders_at_once_build_once(tmp_path: Path) -> None:
    name = f"oci:{make.write_layout(tmp_path / 'layout', LAYERS)}"
    running = [builder(tmp_path / "store", name) for _ in range(3)]
    said = [process.communicate(timeout=60)[0].split("\n") for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len({lines[-2] for lines in said}) == 1
    assert sorted(lines.count("done") for lines in said) == [0, 0, 1]
    assert os.listdir(tmp_path / "store/building") == []


@pytest.mark.parametrize("moment", ["checking the layers", "computing the digest", "writing the image"])
def test_a_builder_that_was_killed_leaves_nothing_that_matters(tmp_path: Path, moment: str) -> None:
    store = tmp_path / "store"
    name = f"oci:{make.write_layout(tmp_path / 'layout', LAYERS)}"
    with builder(store, name, moment) as process:
        assert process.stdout is not None
        while process.stdout.readline() != f"{moment}\n":
            pass
        (alive,) = os.listdir(store / "building")
        assert collect(store) == ()  # it lives
        assert os.listdir(store / "building") == [alive]
        process.kill()
    assert os.listdir(store / "building") == [alive]
    assert os.listdir(store / "names") == []
    assert collect(store) == (store / "building" / alive,)
    image = get(store, name)
    assert image.digest == get(tmp_path / "other", name).digest
    assert os.listdir(store / "building") == []


PARENT = """
import sys
from pathlib import Path
from dsec.images.tools import enclosed, environment, run
run(enclosed(["sh", "-c", "sleep 61.25 & mount -t tmpfs none /mnt; touch " + sys.argv[1] + "; sleep 61.25"]),
    seconds=60, env=environment(), log=Path(sys.argv[2]))
"""


def sleepers() -> list[str]:
    return subprocess.run(
        ["pgrep", "-f", "^sleep 61[.]25"], capture_output=True, text=True, check=False
    ).stdout.split()


def test_what_a_killed_builder_had_started_dies_with_it(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, os.fspath(begun), os.fspath(tmp_path / "log")]
    ) as process:
        until(begun.exists)
        assert len(sleepers()) == 2  # positive control
        assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
        process.send_signal(signal.SIGKILL)
    until(lambda: sleepers() == [])


def until(holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(Busy, match="after 0 s"):
        run(enclosed(["sleep", "61.25"]), seconds=0.2, env=environment(), log=tmp_path / "log")
    until(lambda: sleepers() == [])


def test_host_is_a_skeleton_and_says_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = get(tmp_path / "store", "host")
    assert image.mutable
    assert {"/usr/bin", "/usr/lib"} <= set(image.shows) <= set(SHOWABLE)
    assert get(tmp_path / "other", "host").digest == image.digest
    by_digest = get(tmp_path / "store", image.digest)
    assert (by_digest.name, by_digest.shows) == ("host", image.shows)
    assert image.path.stat().st_size < 2**20
    with pytest.raises(BadRequest, match="cannot be pinned"):
        get(tmp_path / "store", f"host@{image.digest}")
    bases = tmp_path / "bases.toml"
    bases.write_text('[bases]\nplain = "host"\n')
    with pytest.raises(BadRequest, match="must not stand for"):
        anyio.run(ImageStore(tmp_path / "store", bases=bases).get, "plain")
    # What it shows changes with the machine; the skeleton is made again when it would be another.
    monkeypatch.setattr("dsec.images.host.shown", lambda *_: ("/usr/bin",))
    monkeypatch.setattr("dsec.images.host.fingerprint", lambda: "another")
    assert get(tmp_path / "store", "host").shows == ("/usr/bin",)


def test_nothing_but_host_shows_this_machine(tmp_path: Path) -> None:
    """Whatever is said to be pinned: the digest of what shows this machine is no other base's."""
    store, name = tmp_path / "store", f"oci:{make.write_layout(tmp_path / 'layout', LAYERS)}"
    image = get(store, "host")
    with pytest.raises(Conflict, match="not sha256"):
        get(store, f"{name}@{image.digest}")
    plain = get(store, name)
    assert get(store, f"{name}@{plain.digest}").digest == plain.digest  # positive control


def test_an_image_has_all_that_its_tree_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, tree, target = system.require_builder(), tmp_path / "tree", tmp_path / "image"
    (tree / "d/e").mkdir(parents=True)
    (tree / "a").write_text("x")
    (tree / "d/again").hardlink_to(tree / "a")
    (tree / "d/link").symlink_to("a")
    os.mkfifo(tree / "d/pipe")
    os.mknod(tree / "d/gone", stat.S_IFCHR, os.makedev(0, 0))
    (tree / "d/gone-too").hardlink_to(tree / "d/gone")
    system.make_erofs(tool, tree, target, ENTRY)
    target.unlink()
    (tree / "d/e/lost+found2").mkdir()
    with pytest.raises(Unsupported, match=r"/d/e/lost\+found2"):
        system.make_erofs(tool, tree, target, ENTRY)
    assert not target.exists()
    monkeypatch.setattr(system, "_PASSED_OVER", "none")  # as if there was another reason
    with pytest.raises(Unsupported, match="7 of the 8"):
        system.make_erofs(tool, tree, target, ENTRY)


def test_an_empty_place_for_lost_files_is_dropped_and_a_full_one_refused(tmp_path: Path) -> None:
    empty = make.write_layout(tmp_path / "empty", (layer(directory("lost+found"), file("a", b"x")),))
    image = get(tmp_path / "store", f"oci:{empty}")
    plain = make.write_layout(tmp_path / "plain", (layer(file("a", b"x")),))
    assert image.digest == get(tmp_path / "store", f"oci:{plain}").digest
    full = make.write_layout(tmp_path / "full", (layer(directory("lost+found"), file("lost+found/a", b"x")),))
    with pytest.raises(Unsupported, match=r"lost\+found"):
        get(tmp_path / "store", f"oci:{full}")


def test_a_store_that_was_tampered_with_shows_nothing_else(tmp_path: Path) -> None:
    store = tmp_path / "store"
    image = get(store, "host")
    for path in (store / "names/host", image.path.with_suffix(".json")):
        path.chmod(0o600)
        path.write_text(path.read_text().replace('"/usr/bin"', '"/etc"'))
    for name in ("host", image.digest):
        with pytest.raises(StoreDamaged, match="would show /etc"):
            get(store, name)


def test_what_alternatives_chose_is_followed_into_usr_only(tmp_path: Path) -> None:
    usr, root = tmp_path / "host/usr", tmp_path / "root"
    (usr / "bin").mkdir(parents=True)
    (usr / "local").mkdir()
    (tmp_path / "host/bin").symlink_to("usr/bin")
    (usr / "lib64").symlink_to("lib")
    (usr / "libx32").symlink_to("/etc")
    (usr / "bin/which").symlink_to("/etc/alternatives/which")
    (usr / "bin/odd").symlink_to("/etc/alternatives/../shadow")
    root.mkdir()
    host.build_skeleton(root, usr)
    assert os.listdir(root / "etc/alternatives") == ["which"]
    assert sorted(os.listdir(root / "usr")) == ["bin", "lib64", "local"]
    assert (root / "bin").readlink() == Path("usr/bin")
    (tmp_path / "host/bin").unlink()
    with pytest.raises(Unsupported, match="merged"):
        host.shown(usr)


def test_an_alias_is_told(tmp_path: Path) -> None:
    layout = make.write_layout(tmp_path / "layout", LAYERS)
    bases = tmp_path / "bases.toml"
    bases.write_text(f'[bases]\n"python:3.11-slim" = "oci:{layout}"\n')
    store = ImageStore(tmp_path / "store", bases=bases)
    image = anyio.run(store.get, "python:3.11-slim")
    assert (image.asked, image.name) == ("python:3.11-slim", f"oci:{layout}")
    assert anyio.run(store.get, f"oci:{layout}").asked == ""
    with pytest.raises(NotFound):
        anyio.run(store.get, "python:3.12-slim")


def test_a_held_image_outlives_its_name(tmp_path: Path) -> None:
    layout = make.write_layout(tmp_path / "layout", LAYERS)
    store = ImageStore(tmp_path / "store")
    first = anyio.run(store.get, f"oci:{layout}")
    anyio.run(store.hold, first.digest, "snapshot-1")
    make.write_layout(layout, [*LAYERS, layer(file("more"))])
    anyio.run(store.get, f"oci:{layout}")
    assert collect(tmp_path / "store", grace=-1) == ()
    anyio.run(store.release, first.digest, "snapshot-1")
    collect(tmp_path / "store", grace=-1)
    assert not first.path.exists()


def test_a_build_makes_room_for_itself(tmp_path: Path) -> None:
    names = [
        f"oci:{make.write_layout(tmp_path / each, [layer(file(each))])}" for each in ("one", "two", "three")
    ]
    root = tmp_path / "store"
    first, second = (get(root, name) for name in names[:2])
    for image in (first, second):
        os.utime(image.path.with_suffix(".used"), (0, 0))
    anyio.run(ImageStore(root).hold, second.digest, "template-1")
    third = anyio.run(ImageStore(root, budget=1).get, names[2])
    assert not first.path.exists()
    assert second.path.exists()  # held
    assert third.path.exists()  # asked for a moment ago


def test_room_that_cannot_be_made_fails_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreDamaged("odd", hint="none")

    monkeypatch.setattr("dsec.images.gc.collect", full)
    name = f"oci:{make.write_layout(tmp_path / 'one', [layer(file('one'))])}"
    assert anyio.run(ImageStore(tmp_path / "store", budget=1).get, name).path.exists()


@pytest.fixture(params=[small_registry, docker_registry])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    with request.param(tmp_path) as found:
        yield found


def test_an_image_from_a_registry(tmp_path: Path, registry: Registry) -> None:
    layout = make.write_layout(tmp_path / "layout", LAYERS, Env=["A=1"])
    registry.push(layout, "v1")
    store, name = ImageStore(tmp_path / "store"), f"docker://{registry.address}/team/example:v1"
    image = anyio.run(store.get, name)
    local = anyio.run(store.get, f"oci:{layout}")
    assert (image.digest, image.config) == (local.digest, local.config)
    # Its manifest pins it, in this store and in one that has never seen it; so does its tree where it is stored.
    manifest = image.sources[-1]
    assert anyio.run(store.get, f"{name}@{manifest}").digest == image.digest
    assert (
        get(tmp_path / "other", f"docker://{registry.address}/team/example@{manifest}").digest == image.digest
    )
    assert anyio.run(store.get, f"{name}@{image.digest}").digest == image.digest
    with pytest.raises(NotFound):
        anyio.run(store.get, f"{name}@sha256:{'0' * 64}")
    # A tag that moves is followed when asked to.
    registry.push(make.write_layout(tmp_path / "second", [*LAYERS, layer(file("more"))]), "v1")
    assert anyio.run(store.get, name) == image
    moved = anyio.run(store.refresh, name)
    assert moved.digest != image.digest
    assert anyio.run(store.get, f"{name}@{manifest}").digest == image.digest
    with pytest.raises(Conflict):
        anyio.run(store.get, f"oci:{layout}@{moved.digest[:-1]}0")


def test_what_a_registry_does_not_have_or_has_too_much_of(tmp_path: Path, registry: Registry) -> None:
    registry.push(make.write_layout(tmp_path / "layout", [layer(file("a", os.urandom(100_000)))]), "v1")
    with pytest.raises(NotFound, match="no image docker://"):
        get(tmp_path / "store", f"docker://{registry.address}/team/example:v2")
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(TooLarge, match="more than 50000 bytes"):
        fetch(f"{registry.address}/team/example:v1", "", work, max_bytes=50_000)


def test_a_registry_that_is_not_there(tmp_path: Path) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        name = f"docker://127.0.0.1:{closed.getsockname()[1]}/a:1"
        with pytest.raises(RuntimeUnavailable, match="cannot be fetched"):
            get(tmp_path / "store", name)


FAKE = """#!/bin/sh
echo "$@" >{place}/said
for word in "$@"; do
  case $word in
    */debian.tar) cp {place}/system.tar "$word" || exit 1;;
    broken|bookwrm) echo "E: The repository 'http://x $word Release' does not have a Release file." >&2; exit 25;;
    dark) echo "  Could not connect to x:80
E: The repository 'http://x $word Release' does not have a Release file." >&2; exit 25;;
    slow) sleep 61.25 & sleep 61.25;;
    lonely) echo "E: Could not resolve 'mirror.example'" >&2; exit 25;;
  esac
done
"""


@pytest.fixture
def mmdebstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that installs nothing and leaves what the real one would."""
    place = tmp_path / "fake"
    place.mkdir()
    program = place / "mmdebstrap"
    program.write_text(FAKE.format(place=place))
    program.chmod(0o755)
    now = int(time.time()) + 1
    (place / "system.tar").write_bytes(
        layer(
            file("./usr/bin/tool", b"1", mode=0o4755),
            file("./etc/hostname", b"builder.internal\n", when=now),
            file("./etc/apt/apt.conf.d/99mmdebstrap", b"proxy.internal", when=now),
            file("./etc/apt/sources.list", b"deb http://mirror.internal x main", when=now),
        )
    )
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return place


def test_debian_is_what_mmdebstrap_installed_less_the_machine(tmp_path: Path, mmdebstrap: Path) -> None:
    said: list[str] = []
    store = ImageStore(tmp_path / "store", progress=lambda step: said.append(step.what))
    image = anyio.run(store.get, "debian:trixie")
    words = (mmdebstrap / "said").read_text().split()
    assert "trixie" in words
    assert "--mode=unshare" in words
    assert said[0] == "installing Debian trixie"
    assert b"internal" not in image.path.read_bytes()
    assert b"deb.debian.org/debian-security trixie-security" in image.path.read_bytes()
    # It stays what it is until somebody asks for it anew; the moment is not part of it.
    said.clear()
    assert anyio.run(store.get, "debian:trixie") == image
    assert said == []
    time.sleep(1.1)
    assert anyio.run(store.refresh, "debian:trixie") == image
    assert said[-1] == "done"


def test_debian_that_cannot_be_installed_says_why(tmp_path: Path, mmdebstrap: Path) -> None:
    with pytest.raises(NotFound, match=r"no Debian suite 'broken'.*suites are"):
        get(tmp_path / "store", "debian:broken")
    with pytest.raises(NotFound, match=r"no Debian suite 'bookwrm'.*did you mean debian:bookworm\?"):
        get(tmp_path / "store", "debian:bookwrm")
    with pytest.raises(RuntimeUnavailable, match="Could not connect"):
        get(tmp_path / "store", "debian:dark")
    with pytest.raises(RuntimeUnavailable, match=r"Could not resolve 'mirror\.example'"):
        get(tmp_path / "store", "debian:lonely")
    assert os.listdir(tmp_path / "store/building") == os.listdir(tmp_path / "store/names") == []


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["scope", "task"])
async def test_a_build_that_nobody_waits_for_ends(tmp_path: Path, mmdebstrap: Path, how: str) -> None:
    store = ImageStore(tmp_path / "store")
    task = asyncio.create_task(store.get("debian:slow")) if how == "task" else None
    async with anyio.create_task_group() as group:
        if task is None:
            group.start_soon(store.get, "debian:slow")
        await anyio.to_thread.run_sync(until, lambda: len(sleepers()) == 2)
        group.cancel_scope.cancel()
    if task is not None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await anyio.to_thread.run_sync(
        until, lambda: not sleepers() and not os.listdir(tmp_path / "store/building")
    )
    assert os.listdir(tmp_path / "store/names") == []


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.images.tools._PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unsupported, match="not installed") as caught:
        get(tmp_path / "store", "debian:bookworm")
    assert caught.value.hint.startswith("apt-get install ")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not os.environ.get("DSEC_TEST_DEBIAN"), reason="downloads 60 MB twice: set DSEC_TEST_DEBIAN=1"
)
def test_debian_is_the_same_every_time(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    first = anyio.run(store.get, "debian:bookworm")
    assert anyio.run(store.refresh, "debian:bookworm").digest == first.digest
