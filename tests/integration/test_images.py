"""The base image, built once for this module and looked at from inside a chroot on its detached mount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from dsec.errors import BadRequest, NotFound, StoreDamaged
from dsec.images.store import ImageStore
from dsec.images.tree import tree_digest
from dsec.ports.storage import Image
from dsec.stores.mounts import mount_image

pytestmark = [pytest.mark.needs_root]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def system(store: ImageStore) -> Image:
    return anyio.run(store.get, "system")


@pytest.fixture
def root(system: Image) -> Iterator[int]:
    mount = mount_image(system.path)
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)
    yield directory
    os.close(directory)
    os.close(mount)


def run(root: int, script: str) -> str:
    """What a shell inside says; its status must be 0."""
    enter = ["/usr/sbin/chroot", f"/proc/self/fd/{root}", "/bin/bash", "-c", script]
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    done = subprocess.run(
        enter, pass_fds=[root], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_programs_run(root: int) -> None:
    script = (
        "bash --version; awk 'BEGIN {print 6*7}'; git --exec-path; openssl version; tar --version; which ls;"
        "python3 -c 'import ssl, sqlite3, multiprocessing, json, ctypes, lzma, bz2, zlib, curses, readline;"
        "print(len(ssl.create_default_context().get_ca_certs()) > 50)'"
    )
    said = run(root, script)
    assert "GNU bash" in said
    assert "\n42\n" in said
    assert said.endswith("True\n")


def test_its_users_and_directories(root: int) -> None:
    said = run(
        root, "id -u user; stat -c '%n %a %u %g' /workspace /home/user /tmp /var/tmp /root /etc/shadow /"
    )
    assert said.splitlines() == [
        "1000",
        "/workspace 755 1000 1000",
        "/home/user 755 1000 1000",
        "/tmp 1777 0 0",
        "/var/tmp 1777 0 0",
        "/root 700 0 0",
        "/etc/shadow 600 0 0",
        "/ 755 0 0",
    ]


def test_nothing_of_the_host_but_its_packages(root: int) -> None:
    assert run(root, "find / -xdev -perm /6000") == ""
    assert run(root, "find /home /root /srv /opt /usr/local ! -type d") == ""
    assert run(root, "find / -xdev ! -type f ! -type d ! -type l") == ""
    assert run(root, "cat /etc/hostname /etc/resolv.conf") == "sandbox\n"
    assert run(root, "cut -d: -f1 /etc/passwd").split() == ["root", "user", "nobody"]


def test_byte_code_is_current(root: int) -> None:
    script = "python3 -v -c 'import json, ssl, decimal' 2>&1 | grep -c 'code object from .*[.]py$' || true"
    assert run(root, script) == "0\n"
    # Positive control: without byte code the same look finds sources.
    forced = (
        "python3 -X pycache_prefix=/nowhere -v -c 'import json' 2>&1 | grep -c 'code object from .*[.]py'"
    )
    assert int(run(root, forced)) > 0


def test_the_mount_is_read_only_and_shows_nowhere(root: int) -> None:
    with pytest.raises(OSError, match="Read-only"):
        os.mkdir("x", dir_fd=root)
    flags = os.fstatvfs(root).f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV
    assert "erofs" not in Path("/proc/self/mounts").read_text()


def test_the_image_holds_the_tree_that_its_digest_names(system: Image, root: int) -> None:
    assert tree_digest(Path(f"/proc/self/fd/{root}/usr/..")) == system.digest


@pytest.mark.anyio
async def test_a_second_store_gets_the_same_image_without_building(store: ImageStore, system: Image) -> None:
    said: list[str] = []
    again = ImageStore(store._root, progress=lambda step: said.append(step.what))
    assert await again.get("system") == system
    assert await again.list() == (system,)
    assert said == []


@pytest.mark.anyio
async def test_names_that_are_not(store: ImageStore, system: Image) -> None:
    with pytest.raises(NotFound):
        await store.get("other")
    with pytest.raises(BadRequest):
        await store.get("../names/system")


@pytest.mark.anyio
async def test_a_changed_file_is_found(tmp_path: Path, store: ImageStore, system: Image) -> None:
    copy = tmp_path / "copy"

    def prepare() -> Path:
        subprocess.run(["cp", "-a", "--reflink=auto", os.fspath(store._root), os.fspath(copy)], check=True)
        path = copy / "images" / system.path.name
        path.chmod(0o600)
        return path

    path = await to_thread.run_sync(prepare)
    damaged = ImageStore(copy)
    assert (await damaged.get("system")).digest == system.digest  # a whole copy is fine

    def damage() -> None:
        info = path.stat()
        with path.open("r+b") as file:
            file.seek(info.st_size // 2)
            byte = file.read(1)
            file.seek(info.st_size // 2)
            file.write(bytes([byte[0] ^ 1]))
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    await to_thread.run_sync(damage)
    with pytest.raises(StoreDamaged):
        await damaged.get("system")
    with pytest.raises(StoreDamaged):
        await damaged.verify("system")


BUILDER = """
import anyio, sys
from pathlib import Path
from dsec.images.store import ImageStore

said = []
image = anyio.run(ImageStore(Path(sys.argv[1]), progress=lambda step: said.append(step.what)).get, "system")
print(image.digest, len(said))
"""


@pytest.mark.slow
def test_two_at_once_build_once_and_every_build_is_the_same(tmp_path: Path, system: Image) -> None:
    target = tmp_path / "both"
    (target / "building" / "left-by-a-dead-builder").mkdir(parents=True)
    command = [sys.executable, "-c", BUILDER, os.fspath(target)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate()[0].split() for process in running)
    assert [process.returncode for process in running] == [0, 0]
    assert [digest for digest, _ in said] == [system.digest] * 2
    assert sorted(int(count) for _, count in said)[0] == 0
    assert sorted(int(count) for _, count in said)[1] > 0
    assert os.listdir(target / "building") == []
