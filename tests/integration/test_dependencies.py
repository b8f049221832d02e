"""Wheels chosen and downloaded by a real pip: from a directory of hand-made ones, without any network; once from a real index."""

from __future__ import annotations

import http.server
import io
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import packaging.tags
import pytest

from dsec.errors import (
    BadRequest,
    DsecError,
    RuntimeUnavailable,
    StorageFull,
    StoreDamaged,
    TimedOut,
    TooLarge,
    Unsupported,
)
from dsec.images.dependencies.bounds import Bounds, Index
from dsec.images.dependencies.cache import WheelCache
from dsec.images.dependencies.install import bytecode_command, install, settle
from dsec.images.dependencies.lock import Lock
from dsec.images.dependencies.resolve import fetch, resolve
from dsec.images.dependencies.target import PythonTarget, read_target
from dsec.images.store import ImageStore
from dsec.images.tools import Stopped
from dsec.images.tree import tree_digest
from dsec.stores.mounts import mount_image
from dsec.testing.wheels import make_wheel

HOST = f"{sys.version_info.major}.{sys.version_info.minor}"
TARGET = PythonTarget(
    interpreter="/usr/bin/python3.9",
    version="3.9.2",
    abi="cp39",
    libc="musl",
    libc_version="1.2",
    machine="aarch64",
    packages="/usr/local/lib/python3.9/dist-packages",
    scripts="/usr/local/bin",
    data="/usr/local",
    headers="/usr/local/include/python3.9",
)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


@pytest.fixture
def index(wheels: Path) -> Index:
    return Index(machine=False, none=True, links=(str(wheels),))


@pytest.fixture
def cache(tmp_path: Path) -> WheelCache:
    return WheelCache(tmp_path / "cache")


def chosen(lock: Lock) -> list[str]:
    return [f"{each.name}=={each.version}" for each in lock.packages]


def only_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of pip but the test's own, and no proxy on the way."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def is_clean(cache: WheelCache) -> bool:
    """Nothing half-made is left."""
    return not any((cache.root / "work").iterdir()) and not list(cache.http.rglob("*.tmp"))


def test_markers_are_those_of_the_target(wheels: Path, index: Index, cache: WheelCache) -> None:
    """pip judges them by the Python that it runs in; the host's answers would be all the others here."""
    assert TARGET.python != HOST
    requires = [
        "old; python_version < '3.10'",
        "new; python_version >= '3.10'",
        "full; python_full_version < '3.9.3'",
        "arm; platform_machine == 'aarch64'",
        "intel; platform_machine == 'x86_64'",
        "windows; sys_platform == 'win32'",
        "more; extra == 'more' and python_version < '3.10'",
        "never; extra == 'never'",
    ]
    make_wheel(wheels, "top", requires=requires, extras=["more", "never"])
    for name in ("old", "new", "full", "arm", "intel", "windows", "more", "never", "mine", "other"):
        make_wheel(wheels, name)
    given = ["top[more]", "mine; python_version == '3.9'", "other; python_version != '3.9'"]
    lock = resolve(given, TARGET, cache=cache, index=index)
    assert chosen(lock) == [f"{name}==1.0" for name in ("arm", "full", "mine", "more", "old", "top")]
    assert {each.name: each.required_by for each in lock.packages} == {
        "arm": ('top 1.0: arm; platform_machine == "aarch64"',),
        "full": ('top 1.0: full; python_full_version < "3.9.3"',),
        "mine": ('mine; python_version == "3.9"',),
        "more": ('top 1.0: more; extra == "more" and python_version < "3.10"',),
        "old": ('top 1.0: old; python_version < "3.10"',),
        "top": ("top[more]",),
    }
    intel = replace(
        TARGET, version="3.12.0", abi="cp312", machine="x86_64", libc="glibc", libc_version="2.36"
    )
    assert chosen(resolve(["top"], intel, cache=cache, index=index)) == ["intel==1.0", "new==1.0", "top==1.0"]


def test_wheels_are_those_of_the_target(wheels: Path, index: Index, cache: WheelCache) -> None:
    for tag in (
        "py3-none-any",
        "cp39-cp39-musllinux_1_1_aarch64",
        "cp39-cp39-musllinux_1_3_aarch64",
        "cp39-cp39-manylinux_2_17_aarch64",
        "cp39-cp39-musllinux_1_1_x86_64",
        f"cp{HOST.replace('.', '')}-cp{HOST.replace('.', '')}-musllinux_1_1_aarch64",
    ):
        make_wheel(wheels, "fast", tag=tag)
    (one,) = resolve(["fast"], TARGET, cache=cache, index=index).packages
    assert one.file == "fast-1.0-cp39-cp39-musllinux_1_1_aarch64.whl"


def test_the_python_a_version_asks_for_is_the_target(wheels: Path, index: Index, cache: WheelCache) -> None:
    make_wheel(wheels, "a", "1.0", metadata="Requires-Python: >=3.8")
    make_wheel(wheels, "a", "2.0", metadata="Requires-Python: >=3.10")
    assert chosen(resolve(["a"], TARGET, cache=cache, index=index)) == ["a==1.0"]


def test_the_same_inputs_give_the_same_bytes(
    wheels: Path, index: Index, cache: WheelCache, tmp_path: Path
) -> None:
    make_wheel(wheels, "a", requires=["b>=1"])
    make_wheel(wheels, "b")
    make_wheel(wheels, "b", "2.0")
    one = resolve(["a >= 1", "b"], TARGET, cache=cache, index=index)
    other = WheelCache(tmp_path / "other")
    two = resolve(["b", "a>=1", "b"], TARGET, cache=other, index=index)
    assert one.text == two.text
    assert chosen(one) == ["a==1.0", "b==2.0"]
    assert str(tmp_path) not in one.text
    install(one, tmp_path / "one", cache=cache, index=index)
    install(two, tmp_path / "two", cache=other, index=index)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")
    assert is_clean(cache)


def test_a_lock_is_enough_for_another_machine(
    wheels: Path, index: Index, cache: WheelCache, tmp_path: Path
) -> None:
    make_wheel(wheels, "a", requires=["b"])
    make_wheel(wheels, "b")
    lock = resolve(["a"], TARGET, cache=cache, index=index)
    make_wheel(wheels, "b", "2.0")  # newer ones do not matter any more
    other = WheelCache(tmp_path / "other")
    install(lock, tmp_path / "one", cache=other, index=index)
    assert all(other.has(each) for each in lock.packages)
    for path in wheels.iterdir():
        path.unlink()
    install(lock, tmp_path / "two", cache=other, index=index)  # nothing is asked for again


def test_nothing_is_required(cache: WheelCache, index: Index, tmp_path: Path) -> None:
    lock = resolve(["a; python_version > '3.9'"], TARGET, cache=cache, index=index)
    assert lock.packages == ()
    assert lock.requirements == ('a; python_version > "3.9"',)
    assert install(lock, tmp_path / "tree", cache=cache, index=index).files == 0


def make_sdist(wheels: Path, name: str, proof: Path) -> None:
    """A source package whose building leaves a proof."""
    script = f"open({str(proof)!r}, 'w')\nfrom setuptools import setup\nsetup(name={name!r}, version='1.0')\n"
    with tarfile.open(wheels / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for path, text in (
            ("setup.py", script),
            ("PKG-INFO", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"),
        ):
            entry = tarfile.TarInfo(f"{name}-1.0/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def test_a_package_with_source_only_is_refused_by_name(
    wheels: Path, index: Index, cache: WheelCache, tmp_path: Path
) -> None:
    make_sdist(wheels, "built", tmp_path / "proof")
    make_wheel(wheels, "top", requires=["built>=1"])
    with pytest.raises(Unsupported, match=r"built>=1.*only source") as caught:
        resolve(["top"], TARGET, cache=cache, index=index)
    assert "wheel" in caught.value.hint
    with pytest.raises(BadRequest, match=r"'built==99.0': no such version; the newest of built is 1\.0"):
        resolve(["built==99.0"], TARGET, cache=cache, index=index)
    assert not (tmp_path / "proof").exists()


def test_code_behind_a_url_is_not_run(wheels: Path, index: Index, cache: WheelCache, tmp_path: Path) -> None:
    """``--only-binary`` does not hold for what a package names by its URL."""
    proof = tmp_path / "proof"
    make_sdist(tmp_path, "evil", proof)
    url = (tmp_path / "evil-1.0.tar.gz").as_uri()
    make_wheel(wheels, "top", requires=[f"evil @ {url}"])
    with pytest.raises(Unsupported, match="run code"):
        resolve(["top"], TARGET, cache=cache, index=index)
    assert not proof.exists()
    environment = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull}
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-index",
        "--no-build-isolation",
        "--only-binary",
        ":all:",
    ]
    command += ["--dest", str(tmp_path / "x"), "--find-links", str(wheels), "top"]
    subprocess.run(command, env=environment, capture_output=True, check=False)
    assert proof.exists(), "the control: pip by itself runs it"


def test_a_wheel_behind_a_url_is_refused(
    wheels: Path, index: Index, cache: WheelCache, tmp_path: Path
) -> None:
    url = make_wheel(tmp_path / "elsewhere", "a").as_uri()
    make_wheel(wheels, "top", requires=[f"a @ {url}"])
    with pytest.raises(Unsupported, match="'a' from a URL"):
        resolve(["top"], TARGET, cache=cache, index=index)


def test_requirements_that_contradict_one_another(wheels: Path, index: Index, cache: WheelCache) -> None:
    make_wheel(wheels, "a", requires=["c<2"])
    make_wheel(wheels, "b", requires=["c>=2"])
    make_wheel(wheels, "c", "1.0")
    make_wheel(wheels, "c", "2.0")
    for requirements, words in (
        (["a", "b"], "a 1.0 needs c<2, but b 1.0 needs c>=2"),
        (["a", "c>=2"], "c>=2 is required, but a 1.0 needs c<2"),
        (["c<2", "c>=2"], "c<2 is required, but c>=2 is required"),
    ):
        with pytest.raises(BadRequest) as caught:
            resolve(requirements, TARGET, cache=cache, index=index)
        assert caught.value.message == f"the requirements contradict one another: {words}"


@pytest.mark.parametrize(
    ("requirement", "error", "words"),
    [
        ("a>=2", BadRequest, r"'a>=2'.*no such version; the newest of a is 1\.10 \(.*: 1\.5, 1\.10\)"),
        (
            "mixed==99.0",
            BadRequest,
            r"'mixed==99.0'.*no such version; the newest of mixed is 2.0 \(.*: 1\.0\)",
        ),
        ("mixed==2.0", Unsupported, r"'mixed==2.0'.*no wheel for CPython 3.9.*; versions with a wheel: 1\.0"),
        ("young>2", BadRequest, r"'young>2'.*no such version; the newest of young is 1.0 \(none has a wheel"),
        ("nowhere", BadRequest, "'nowhere'.*no package of that name"),
        ("windows", Unsupported, "'windows'.*no wheel for CPython 3.9 .cp39. with musl 1.2 on aarch64"),
        ("young", Unsupported, "'young'.*no wheel for CPython 3.9"),
    ],
)
def test_what_there_is_not(
    wheels: Path, index: Index, cache: WheelCache, requirement: str, error: type[DsecError], words: str
) -> None:
    make_wheel(wheels, "a", "1.10")
    make_wheel(wheels, "a", "1.5")
    make_wheel(wheels, "mixed", "1.0")
    make_wheel(wheels, "mixed", "2.0", tag="cp312-cp312-musllinux_1_1_aarch64")
    make_wheel(wheels, "windows", tag="cp39-cp39-win_amd64")
    make_wheel(wheels, "young", tag="cp312-cp312-musllinux_1_1_aarch64")
    with pytest.raises(error, match=words):
        resolve([requirement], TARGET, cache=cache, index=index)
    assert is_clean(cache)


def test_a_wheel_that_lies_about_itself(wheels: Path, index: Index, cache: WheelCache) -> None:
    make_wheel(wheels, "a").rename(wheels / "b-1.0-py3-none-any.whl")
    with pytest.raises(DsecError) as caught:
        resolve(["b"], TARGET, cache=cache, index=index)
    assert "b" in caught.value.message
    assert caught.value.code in ("unsupported", "runtime_unavailable", "bad_request")


def test_a_replaced_file_is_not_taken(wheels: Path, index: Index, cache: WheelCache, tmp_path: Path) -> None:
    make_wheel(wheels, "a")
    lock = resolve(["a"], TARGET, cache=cache, index=index)
    make_wheel(wheels, "a", files={"a.py": b"import os  # something else\n"})
    with pytest.raises(StoreDamaged, match="another digest") as caught:
        fetch(lock, cache=WheelCache(tmp_path / "other"), index=index)
    assert lock.packages[0].sha256 in caught.value.message
    assert not (tmp_path / "other/wheels").is_dir() or not any((tmp_path / "other/wheels").iterdir())


def test_a_damaged_wheel_is_fetched_again(
    wheels: Path, index: Index, cache: WheelCache, tmp_path: Path
) -> None:
    make_wheel(wheels, "a")
    lock = resolve(["a"], TARGET, cache=cache, index=index)
    (stored,) = (cache.root / "wheels").iterdir()
    stored.write_bytes(b"damaged")
    install(lock, tmp_path / "tree", cache=cache, index=index)
    assert cache.has(lock.packages[0])


def test_bounds(wheels: Path, index: Index, cache: WheelCache) -> None:
    make_wheel(wheels, "a", requires=["b"])
    make_wheel(wheels, "b", files={"b": os.urandom(200_000)})
    with pytest.raises(TimedOut, match=r"more than 0\.05 s"):
        resolve(["a"], TARGET, cache=cache, index=index, bounds=Bounds(seconds=0.05))
    with pytest.raises(TooLarge, match="2 wheels"):
        resolve(["a"], TARGET, cache=cache, index=index, bounds=Bounds(wheels=1))
    with pytest.raises(DsecError) as caught:
        resolve(["a"], TARGET, cache=cache, index=index, bounds=Bounds(download_bytes=100_000))
    assert caught.value.code == "too_large"
    assert is_clean(cache)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.needs_root
def test_a_full_disk(wheels: Path, index: Index, cache: WheelCache, small: Path) -> None:
    make_wheel(wheels, "a", files={"a": os.urandom(700_000), "b": os.urandom(700_000)})
    with pytest.raises(StorageFull):
        resolve(["a"], TARGET, cache=WheelCache(small / "cache"), index=index)
    assert is_clean(WheelCache(small / "cache"))
    lock = resolve(["a"], TARGET, cache=cache, index=index)
    with pytest.raises(StorageFull):
        install(lock, small / "tree", cache=cache, index=index)
    assert not any((small / "tree").iterdir())


def test_relative_places_are_those_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, wheels: Path, cache: WheelCache, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "here/links", "b")
    monkeypatch.chdir(tmp_path / "here")
    relative = Index(machine=False, none=True, links=("./links",))
    assert chosen(resolve(["b"], TARGET, cache=cache, index=relative)) == ["b==1.0"]
    only_this_machine(monkeypatch)
    monkeypatch.setenv("PIP_FIND_LINKS", f"./links {wheels}")
    assert chosen(resolve(["b"], TARGET, cache=cache, index=Index(none=True))) == ["b==1.0"]


class Slow(http.server.SimpleHTTPRequestHandler):
    """A directory as an index page; of one file it sends half and waits."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if "stuck" not in self.path or not self.server.holding:  # type: ignore[attr-defined]
            return super().do_GET()
        data = Path(self.translate_path(self.path)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.server.half.set()  # type: ignore[attr-defined]
        self.server.over.wait(30)  # type: ignore[attr-defined]
        return None

    def send_header(self, keyword: str, value: str) -> None:
        super().send_header(keyword, value)
        if keyword == "Content-Length" and self.path.endswith(".whl"):
            super().send_header("Cache-Control", "max-age=3600")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(wheels: Path) -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Slow, directory=str(wheels)))
    server.asked, server.holding = [], True  # type: ignore[attr-defined]
    server.half, server.over = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.over.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


CHILD = """
import sys
from pathlib import Path
from dsec.images.dependencies.bounds import Index
from dsec.images.dependencies.cache import WheelCache
from dsec.images.dependencies.resolve import resolve
from dsec.images.dependencies.target import PythonTarget
target = PythonTarget(**eval(sys.argv[3]))
resolve(["a", "stuck"], target, cache=WheelCache(Path(sys.argv[1])), index=Index(none=True, links=(sys.argv[2],)))
"""


def test_killed_in_the_middle_of_a_download(
    monkeypatch: pytest.MonkeyPatch, wheels: Path, cache: WheelCache, server: http.server.ThreadingHTTPServer
) -> None:
    """Nothing half is ever taken, pip dies too, and what had come whole does not come again."""
    only_this_machine(monkeypatch)
    monkeypatch.setenv(
        "PIP_TRUSTED_HOST", "127.0.0.1"
    )  # what comes by plain HTTP is kept by pip only when it is trusted
    make_wheel(wheels, "a", files={"a": os.urandom(50_000)})
    make_wheel(wheels, "stuck", files={"b": os.urandom(200_000)})
    link = f"http://127.0.0.1:{server.server_port}/"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(cache.root), link, repr(TARGET.facts())])
    assert server.half.wait(60)  # type: ignore[attr-defined]
    (work,) = (cache.root / "work").iterdir()
    child.send_signal(signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 10
    while any(str(work) in line for line in running()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(str(work) in line for line in running())
    assert not any((cache.root / "wheels").iterdir())
    server.holding = False  # type: ignore[attr-defined]
    server.over.set()  # type: ignore[attr-defined]
    lock = resolve(["a", "stuck"], TARGET, cache=cache, index=Index(none=True, links=(link,)))
    assert chosen(lock) == ["a==1.0", "stuck==1.0"]
    assert is_clean(cache)
    asked = server.asked  # type: ignore[attr-defined]
    assert (asked.count("/a-1.0-py3-none-any.whl"), asked.count("/stuck-1.0-py3-none-any.whl")) == (1, 2)


def test_a_download_that_nobody_waits_for_ends(
    monkeypatch: pytest.MonkeyPatch, wheels: Path, cache: WheelCache, server: http.server.ThreadingHTTPServer
) -> None:
    only_this_machine(monkeypatch)
    monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1")
    make_wheel(wheels, "stuck", files={"b": os.urandom(200_000)})
    index = Index(none=True, links=(f"http://127.0.0.1:{server.server_port}/",))

    def check() -> None:
        if server.half.is_set():  # type: ignore[attr-defined]
            raise Stopped

    with pytest.raises(Stopped):
        resolve(["stuck"], TARGET, cache=cache, index=index, check=check)
    assert not any(str(cache.root / "work") in line for line in running())
    assert is_clean(cache)


def running() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def test_an_index_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, wheels: Path, cache: WheelCache
) -> None:
    """Also when another place has the package: tomorrow's answer would be another one. No password is told."""
    make_wheel(wheels, "a")
    only_this_machine(monkeypatch)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:9/simple")
    for links in ((), (str(wheels),)):
        with pytest.raises(RuntimeUnavailable) as caught:
            resolve(["a"], TARGET, cache=cache, index=Index(links=links))
        assert caught.value.retryable
        assert "secret" not in f"{caught.value}{caught.value.facts}"
        assert len(str(caught.value)) < 3000


def test_the_index_of_this_machine_and_its_password_are_used_and_not_locked(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cache: WheelCache,
    server: http.server.ThreadingHTTPServer,
    wheels: Path,
) -> None:
    make_wheel(wheels / "simple/a", "a")
    configuration = tmp_path / "pip.conf"
    configuration.write_text(
        f"[global]\nindex-url = http://me:secret@127.0.0.1:{server.server_port}/simple\nno-deps = true\npre = true\n"
    )
    only_this_machine(monkeypatch)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    lock = resolve(["a"], TARGET, cache=cache)
    assert chosen(lock) == ["a==1.0"]
    assert "/simple/a/" in server.asked  # type: ignore[attr-defined]
    assert not any(word in lock.text for word in ("secret", "127.0.0.1", "http"))


def test_this_python_is_read_as_it_says_itself() -> None:
    found = read_target(Path("/"), interpreter=sys.executable)
    assert found.version == platform.python_version()
    assert f"cpython-{found.abi.removeprefix('cp')}" in str(sysconfig.get_config_var("SOABI"))
    assert found.machine == platform.machine()
    if found.libc == "glibc":
        assert found.libc_version == os.confstr("CS_GNU_LIBC_VERSION").split()[1]  # type: ignore[union-attr]
    assert next(iter(packaging.tags.sys_tags())) in found.tags()


def test_byte_code_is_the_same_each_time(
    wheels: Path, index: Index, cache: WheelCache, tmp_path: Path
) -> None:
    """Made by the Python that is to take it: here this one, on a tree that lies where the image has it."""
    tree = tmp_path / "tree"
    mine = replace(
        TARGET, interpreter=str(Path(sys.executable).resolve()), packages=str(tree) + TARGET.packages
    )
    make_wheel(
        wheels, "a", files={"a.py": b"import os\nWORDS = {'a', 'b'}\n", "b/c.py": b"def f(): return 'x'\n"}
    )
    lock = resolve(["a"], TARGET, cache=cache, index=index)
    digests = set()
    for _ in range(2):
        install(lock, tree, cache=cache, index=index)
        subprocess.run(bytecode_command(mine), check=True)
        settle(tree)
        (made,) = tree.rglob("a.cpython-*.pyc")
        assert made.read_bytes()[4:8] == b"\1\0\0\0", "unchecked: its source's time does not matter"
        digests.add(tree_digest(tree))
        shutil.rmtree(tree)
    assert len(digests) == 1


@pytest.mark.needs_root
@pytest.mark.slow
def test_the_base_image_finds_what_lies_over_it(
    wheels: Path, index: Index, cache: WheelCache, tmp_path: Path
) -> None:
    """Its Python is read from its tree as it is mounted; then that Python imports the package, and a script of it runs."""
    mount = mount_image(anyio.run(ImageStore(tmp_path / "images").get, "system").path)
    try:
        base = Path(f"/proc/{os.getpid()}/fd/{mount}")
        target = read_target(base)
        make_wheel(
            wheels,
            "hello",
            files={"hello.py": b"def main(): print('hello', __file__)"},
            entry_points="[console_scripts]\nhello = hello:main\n",
        )
        lock = resolve(["hello"], target, cache=cache, index=index)
        install(lock, tmp_path / "layer", cache=cache, index=index)
        merged = tmp_path / "merged"
        merged.mkdir()
        layers = f"lowerdir={tmp_path / 'layer'}:{base}"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", str(merged)], check=True)
        try:
            command = [
                "chroot",
                str(merged),
                "/bin/sh",
                "-c",
                "hello; python3 -c 'import hello; print(hello.__spec__.cached)'",
            ]
            said = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=True,
                env={"PATH": "/usr/local/bin:/usr/bin:/usr/sbin"},
            )
        finally:
            subprocess.run(["umount", str(merged)], check=True)
    finally:
        os.close(mount)
    assert said.stdout.startswith(f"hello {target.packages}/hello.py\n{target.packages}/__pycache__/")


def test_a_real_package_from_the_index_of_this_machine(cache: WheelCache, tmp_path: Path) -> None:
    glibc = replace(TARGET, libc="glibc", libc_version="2.31", machine="x86_64")
    try:
        lock = resolve(["six>=1.16"], glibc, cache=cache, bounds=Bounds(seconds=60))
    except (RuntimeUnavailable, TimedOut) as exc:
        pytest.skip(f"no package index answers: {exc.message[:200]}")
    assert [each.name for each in lock.packages] == ["six"]
    install(lock, tmp_path / "tree", cache=cache)
    assert (tmp_path / "tree/usr/local/lib/python3.9/dist-packages/six.py").is_file()
