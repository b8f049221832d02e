"""Wheels into a tree: where everything goes, that it is the same everywhere, and that a hostile wheel gets nowhere."""

from __future__ import annotations

import csv
import hashlib
import os
import random
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name, parse_wheel_filename

from dsec.errors import Conflict, StoreDamaged, TooLarge, Unsupported
from dsec.images.dependencies import install as installing
from dsec.images.dependencies.bounds import Bounds, Index
from dsec.images.dependencies.cache import WheelCache
from dsec.images.dependencies.install import WHEN, Installed, install, take_bytecode
from dsec.images.dependencies.lock import Lock, Locked
from dsec.images.dependencies.target import PythonTarget
from dsec.images.tree import tree_digest
from dsec.testing.wheels import make_wheel

TARGET = PythonTarget(
    interpreter="/usr/bin/python3.11",
    version="3.11.2",
    abi="cp311",
    libc="glibc",
    libc_version="2.36",
    machine="x86_64",
    packages="/usr/local/lib/python3.11/dist-packages",
    scripts="/usr/local/bin",
    data="/usr/local",
    headers="/usr/local/include/python3.11",
)
PACKAGES = "usr/local/lib/python3.11/dist-packages"
NOWHERE = Index(machine=False, none=True)


def locked(path: Path, *required_by: str) -> Locked:
    name, version, _, _ = parse_wheel_filename(path.name)
    return Locked(
        name=canonicalize_name(name),
        version=str(version),
        file=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size=path.stat().st_size,
        required_by=required_by or (name,),
    )


def put(cache: WheelCache, *wheels: Path) -> Lock:
    """A lock of wheels that are moved into the cache."""
    packages = sorted((locked(each) for each in wheels), key=lambda each: each.name)
    with cache.run():
        for each in wheels:
            cache.take(each, locked(each).sha256)
    requirements = tuple(sorted(each.required_by[0] for each in packages))
    return Lock(target=TARGET, requirements=requirements, packages=tuple(packages))


@pytest.fixture
def cache(tmp_path: Path) -> WheelCache:
    return WheelCache(tmp_path / "cache")


def refused(cache: WheelCache, tmp_path: Path, wheel: Path, bounds: Bounds | None = None) -> str:
    """Why it is; nothing of it may be left."""
    lock = put(cache, wheel)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((Unsupported, TooLarge)) as caught:
        install(lock, tmp_path / "tree", cache=cache, index=NOWHERE, bounds=bounds)
    assert wheel.name in caught.value.message
    assert caught.value.hint
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [tmp_path / "tree"]
    (tmp_path / "tree").rmdir()
    return caught.value.message


def full(directory: Path) -> list[Path]:
    """Two packages with something in every place."""
    data = "Some_Thing-2.0.data"
    files = {
        "some/__init__.py": b"",
        "some/tool": b"\x7fELF",
        "some/__pycache__/x.cpython-311.pyc": b"stale",
        f"{data}/scripts/run": b"#!python -E\nprint(1)\n",
        f"{data}/scripts/binary": b"\x7fELF",
        f"{data}/data/share/some/a,b.txt": b"text",
        f"{data}/headers/some.h": b"int x;",
        f"{data}/platlib/fast.so": b"\x7fELF",
    }
    points = "[console_scripts]\nsome = some.cli:main\nother = some.cli:Class.main [x]\n[gui_scripts]\nshow = some:show\n[x.y]\nz = a\n"
    return [
        make_wheel(
            directory, "Some_Thing", "2.0", files=files, entry_points=points, executable=["some/tool"]
        ),
        make_wheel(directory, "plain", requires=["some-thing"]),
    ]


def test_everything_has_its_place(tmp_path: Path, cache: WheelCache) -> None:
    lock = put(cache, *full(tmp_path / "wheels"))
    tree = tmp_path / "tree"
    done = install(lock, tree, cache=cache, index=NOWHERE)
    found = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    info = f"{PACKAGES}/Some_Thing-2.0.dist-info"
    other = f"{PACKAGES}/plain-1.0.dist-info"
    assert found == {
        f"{PACKAGES}/some/__init__.py",
        f"{PACKAGES}/some/tool",
        f"{PACKAGES}/fast.so",
        f"{PACKAGES}/plain.py",
        *(
            f"{info}/{name}"
            for name in ("METADATA", "WHEEL", "RECORD", "INSTALLER", "REQUESTED", "entry_points.txt")
        ),
        *(f"{other}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "INSTALLER", "REQUESTED")),
        *(f"usr/local/bin/{name}" for name in ("run", "binary", "some", "other", "show")),
        "usr/local/share/some/a,b.txt",
        "usr/local/include/python3.11/Some_Thing/some.h",
    }
    assert done == Installed(files=len(found), bytes=sum((tree / path).stat().st_size for path in found))
    assert (tree / "usr/local/bin/run").read_bytes() == b"#!/usr/bin/python3.11\nprint(1)\n"
    assert (tree / "usr/local/bin/other").read_bytes().startswith(b"#!/usr/bin/python3.11\n")
    assert (tree / info / "INSTALLER").read_bytes() == b"dsec\n"
    programs = {path for path in found if (tree / path).stat().st_mode & 0o111}
    assert programs == {
        f"{PACKAGES}/some/tool",
        *(path for path in found if path.startswith("usr/local/bin/")),
    }
    rows = {row[0]: row for row in csv.reader((tree / info / "RECORD").read_text().splitlines())}
    assert {os.path.normpath(f"{PACKAGES}/{path}") for path in rows} == {
        path for path in found if "plain" not in path
    }
    assert rows["../../../share/some/a,b.txt"][2] == "4"


def test_only_what_was_asked_for_is_requested(tmp_path: Path, cache: WheelCache) -> None:
    wheel = make_wheel(tmp_path / "wheels", "plain")
    package = locked(wheel, "other 1.0: plain")
    put(cache, wheel)
    install(
        Lock(target=TARGET, requirements=("other",), packages=(package,)),
        tmp_path / "tree",
        cache=cache,
        index=NOWHERE,
    )
    assert not (tmp_path / "tree" / PACKAGES / "plain-1.0.dist-info/REQUESTED").exists()


def test_two_trees_of_one_lock_are_the_same(tmp_path: Path, cache: WheelCache) -> None:
    lock = put(cache, *full(tmp_path / "wheels"))
    previous = os.umask(0o077)
    try:
        install(lock, tmp_path / "one", cache=cache, index=NOWHERE)
        os.umask(0)
        install(lock, tmp_path / "two", cache=cache, index=NOWHERE)
    finally:
        os.umask(previous)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")
    for path in [tmp_path / "one", *(tmp_path / "one").rglob("*")]:
        info = path.lstat()
        assert info.st_mtime_ns == WHEN * 10**9
        assert stat.S_IMODE(info.st_mode) in ((0o755,) if path.is_dir() else (0o644, 0o755))
        assert (info.st_uid, info.st_gid) == ((0, 0) if os.geteuid() == 0 else (info.st_uid, info.st_gid))


def test_a_tree_with_something_in_it_is_left_alone(tmp_path: Path, cache: WheelCache) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/mine").touch()
    with pytest.raises(Conflict, match="not empty"):
        install(Lock(target=TARGET), tmp_path / "tree", cache=cache, index=NOWHERE)
    assert (tmp_path / "tree/mine").exists()


def link(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("../outside.py", "leaves its place"),
        ("a/../../outside.py", "leaves its place"),
        ("/etc/outside", "leaves its place"),
        ("a//b.py", "leaves its place"),
        ("./b.py", "leaves its place"),
        ("bad-1.0.data/scripts/../../../outside", "leaves its place"),
        ("bad-1.0.data/data//etc/outside", "leaves its place"),
        ("bad-1.0.data/elsewhere/x", "valid .data subdirectory"),
        ("bad-1.0.data/x", "valid .data subdirectory|cannot be installed"),
        ("a\\..\\b.py", "characters"),
        ("a\nb.py", "characters"),
        ("x" * 300, "too long a name"),
        ("a/" * 1200 + "b", "too long a name"),
        (link("link.py"), "neither a file"),
        ("second-1.0.dist-info/METADATA", "exactly one .dist-info"),
    ],
)
def test_an_entry_that_no_tool_would_make(
    tmp_path: Path, cache: WheelCache, entry: str | zipfile.ZipInfo, words: str
) -> None:
    wheel = make_wheel(tmp_path / "wheels", "bad", hostile=[(entry, b"../../../../etc/passwd")])
    message = refused(cache, tmp_path, wheel)
    assert any(word in message for word in words.split("|")), message


@pytest.mark.parametrize(
    "points",
    [
        "[console_scripts]\n../../../etc/cron.d/x = a:b\n",
        "[console_scripts]\n/etc/x = a:b\n",
        "[console_scripts]\nx = no colon\n",
        "[console_scripts]\nx = a\n",
        "no section",
        "[console_scripts]\nx = a:b\nx = a:b\n",
    ],
)
def test_an_entry_point_that_is_none(tmp_path: Path, cache: WheelCache, points: str) -> None:
    refused(cache, tmp_path, make_wheel(tmp_path / "wheels", "bad", entry_points=points))


@pytest.mark.parametrize(
    "record",
    [
        {"bad.py": "bad.py,sha256=AAAA,16"},
        {"bad.py": "bad.py,sha256=AAAA,"},
        {"bad.py": ""},
        {"bad.py": "bad.py,,"},
        {"bad.py": "bad.py,what,3"},
        {"bad.py": "bad.py"},
    ],
)
def test_a_record_that_is_not_that_of_the_files(
    tmp_path: Path, cache: WheelCache, record: dict[str, str]
) -> None:
    refused(cache, tmp_path, make_wheel(tmp_path / "wheels", "bad", record=record))


def test_bombs(tmp_path: Path, cache: WheelCache) -> None:
    bomb = make_wheel(tmp_path / "wheels", "bomb", files={"zeros": bytes(64 * 2**20)})
    assert "unpacks to" in refused(cache, tmp_path, bomb)
    many = make_wheel(tmp_path / "wheels", "many", files={f"f{n}": b"" for n in range(50)})
    assert "files" in refused(cache, tmp_path, many, Bounds(entries=40))
    large = make_wheel(tmp_path / "wheels", "large", files={"a": os.urandom(1000)})
    assert "unpacks to" in refused(cache, tmp_path, large, Bounds(unpacked_bytes=900))


def test_bounds_are_those_of_all_wheels_together(tmp_path: Path, cache: WheelCache) -> None:
    lock = put(
        cache, *(make_wheel(tmp_path / "wheels", name, files={name: bytes(5000)}) for name in ("a", "b"))
    )
    for bounds in (
        Bounds(unpacked_bytes=9000),
        Bounds(entries=9),
        Bounds(wheels=1),
        Bounds(download_bytes=lock.size - 1),
    ):
        with pytest.raises(TooLarge):
            install(lock, tmp_path / "tree", cache=cache, index=NOWHERE, bounds=bounds)
        assert not (tmp_path / "tree").exists() or not any((tmp_path / "tree").iterdir())


def doubled(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("bad.py", b"other")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def lying_size(path: Path) -> None:
    """The central directory says that a file is shorter than it is."""
    data = path.read_bytes()
    at = data.index(b"PK\1\2") + 24
    path.write_bytes(data[:at] + (3).to_bytes(4, "little") + data[at + 4 :])


def huge_directory(path: Path) -> None:
    data = path.read_bytes()
    at = data.rindex(b"PK\5\6") + 12
    path.write_bytes(data[:at] + (2**31).to_bytes(4, "little") + data[at + 4 :])


def encrypted(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(b"PK\1\2") + 8
    path.write_bytes(data[:at] + b"\1\0" + data[at + 2 :])


def unknown_compression(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(b"PK\1\2") + 10
    path.write_bytes(data[:at] + b"\x63\0" + data[at + 2 :])


def text(path: Path) -> None:
    path.write_bytes(b"<html>not found</html>")


@pytest.mark.parametrize(
    "damage",
    [doubled, cut, lying_size, huge_directory, encrypted, unknown_compression, text],
    ids=lambda each: each.__name__,
)
def test_an_archive_that_is_broken(tmp_path: Path, cache: WheelCache, damage: Callable[[Path], None]) -> None:
    wheel = make_wheel(tmp_path / "wheels", "bad")
    damage(wheel)
    refused(cache, tmp_path, wheel)


def test_whatever_is_wrong_with_a_wheel_it_is_told_and_nothing_is_left(
    tmp_path: Path, cache: WheelCache
) -> None:
    """Bytes of its structure and its content are changed at random, always the same ones."""
    whole = full(tmp_path / "wheels")[0].read_bytes()
    chance = random.Random(7)
    outcomes = set()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 2, 8])):
            at = whole.rfind(b"PK", 0, chance.randrange(4, len(whole)))
            at = (at if chance.random() < 0.7 else chance.randrange(len(whole))) + chance.randrange(60)
            data[min(at, len(data) - 1)] = chance.randrange(256)
        wheel = tmp_path / "wheels/Some_Thing-2.0-py3-none-any.whl"
        wheel.write_bytes(data)
        lock = put(cache, wheel)
        try:
            install(lock, tmp_path / "tree", cache=cache, index=NOWHERE)
        except (Unsupported, TooLarge) as exc:
            outcomes.add(type(exc))
            assert not any((tmp_path / "tree").iterdir())
        else:
            shutil.rmtree(tmp_path / "tree")
    assert Unsupported in outcomes


def test_of_one_path_in_two_packages_the_last_is_there_and_it_is_told(
    tmp_path: Path, cache: WheelCache
) -> None:
    lock = put(
        cache,
        make_wheel(tmp_path / "wheels", "a", files={"tests/x.py": b"a", "same.py": b"same"}),
        make_wheel(tmp_path / "wheels", "b", files={"tests/x.py": b"bb", "same.py": b"same"}),
    )
    done = install(lock, tmp_path / "tree", cache=cache, index=NOWHERE)
    assert done.clashes == ((f"/{PACKAGES}/tests/x.py", "a", "b"),)
    assert (tmp_path / "tree" / PACKAGES / "tests/x.py").read_bytes() == b"bb"
    files = [path for path in (tmp_path / "tree").rglob("*") if path.is_file()]
    assert (done.files, done.bytes) == (len(files), sum(path.stat().st_size for path in files))


def test_a_file_where_another_package_has_a_directory(tmp_path: Path, cache: WheelCache) -> None:
    wheels = tmp_path / "wheels"
    for first, second in ((b"x", b"x/y"), (b"x/y", b"x")):
        one = make_wheel(wheels, "a", files={first.decode(): b""})
        two = make_wheel(wheels, "b", files={second.decode(): b""})
        with pytest.raises(Unsupported, match="directory"):
            install(put(cache, one, two), tmp_path / "tree", cache=cache, index=NOWHERE)
        assert not any((tmp_path / "tree").iterdir())


def test_a_wheel_that_was_changed_in_the_cache_is_never_used(tmp_path: Path, cache: WheelCache) -> None:
    lock = put(cache, make_wheel(tmp_path / "wheels", "plain"))
    (stored,) = (tmp_path / "cache/wheels").iterdir()
    stored.write_bytes(stored.read_bytes().replace(b"plain", b"pla1n"))
    assert cache.open(lock.packages[0]) is None
    assert not stored.exists()


def test_a_wheel_that_vanishes_while_it_is_used(
    tmp_path: Path, cache: WheelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = put(cache, make_wheel(tmp_path / "wheels", "plain"))
    monkeypatch.setattr(
        installing,
        "fetch",
        lambda *_, **__: [path.unlink() for path in (tmp_path / "cache/wheels").iterdir()],
    )
    with pytest.raises(StoreDamaged, match="try again"):
        install(lock, tmp_path / "tree", cache=cache, index=NOWHERE)


def test_what_killed_runs_left_is_removed_by_the_next(tmp_path: Path, cache: WheelCache) -> None:
    put(cache, make_wheel(tmp_path / "wheels", "plain"))
    left = tmp_path / "cache/work/0123/found/half.whl"
    left.parent.mkdir(parents=True)
    left.touch()
    half = tmp_path / "cache/http/ab/half.tmp"
    half.parent.mkdir(parents=True)
    half.touch()
    with cache.run() as work:
        assert not left.exists()
        assert not half.exists()
        with cache.run() as other:  # does not take the first one's for something left
            assert work.is_dir()
            assert other != work
        assert cache.prune(0) == 0
    assert not any((tmp_path / "cache/work").iterdir())
    assert cache.prune(10**9) == 0
    assert cache.prune(0) > 0
    assert not any((tmp_path / "cache/wheels").iterdir())


def byte_code(made: Path, *, packages: str = PACKAGES) -> Path:
    """What a compiler leaves of a package, below ``made``."""
    cache = made / packages / "pkg/__pycache__"
    cache.mkdir(parents=True)
    (cache / "a.cpython-311.pyc").write_bytes(b"code")
    (cache / "notes.txt").write_bytes(b"no code")
    (made / packages / "pkg/b.pyc").write_bytes(b"beside")
    return cache


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A tree with one package."""
    tree = tmp_path / "tree"
    (tree / PACKAGES / "pkg").mkdir(parents=True)
    for name in ("a", "pipe", "fifo", "link"):
        (tree / PACKAGES / f"pkg/{name}.py").write_text("")
    return tree


def taken(tree: Path) -> list[str]:
    return sorted(str(path.relative_to(tree / PACKAGES)) for path in tree.rglob("*.pyc") if path.is_file())


def test_byte_code_is_taken_for_directories_that_are_there(tmp_path: Path, installed: Path) -> None:
    made = tmp_path / "made"
    cache = byte_code(made)
    (made / PACKAGES / "stranger/__pycache__").mkdir(parents=True)
    (made / PACKAGES / "stranger/__pycache__/x.pyc").write_bytes(b"code")
    (cache / "unknown.cpython-311.pyc").write_bytes(b"of no source")
    assert take_bytecode(made, installed, TARGET) == 1
    assert taken(installed) == ["pkg/__pycache__/a.cpython-311.pyc"]
    assert (installed / PACKAGES / "pkg/__pycache__/a.cpython-311.pyc").read_bytes() == b"code"
    assert (cache / "a.cpython-311.pyc").exists(), "nothing is moved"


@pytest.mark.parametrize("linked", ["usr", "usr/local/lib/python3.11", PACKAGES, f"{PACKAGES}/pkg"])
def test_a_link_to_the_host_among_byte_code_is_not_followed(
    tmp_path: Path, installed: Path, linked: str
) -> None:
    """What the compiler's sandbox wrote is a stranger's, every directory on the way to the packages included."""
    host, made = tmp_path / "host", tmp_path / "made"
    cache = byte_code(host)
    (made / linked).parent.mkdir(parents=True, exist_ok=True)
    (made / linked).symlink_to(host / linked)
    assert os.path.exists(made / PACKAGES / "pkg/__pycache__/a.cpython-311.pyc"), "who follows finds it"
    assert take_bytecode(made, installed, TARGET) == 0
    assert taken(installed) == []
    assert (cache / "a.cpython-311.pyc").exists()


def test_what_is_no_file_among_byte_code_is_left(tmp_path: Path, installed: Path) -> None:
    made, secret = tmp_path / "made", tmp_path / "secret.pyc"
    secret.write_bytes(b"secret")
    cache = byte_code(made)
    (cache / "pipe.pyc").mkdir()
    os.mkfifo(cache / "fifo.pyc")
    (cache / "link.pyc").symlink_to(secret)
    assert take_bytecode(made, installed, TARGET) == 1
    assert taken(installed) == ["pkg/__pycache__/a.cpython-311.pyc"]


def test_byte_code_does_not_leave_the_tree_that_it_is_for(tmp_path: Path, installed: Path) -> None:
    made, host = tmp_path / "made", tmp_path / "host"
    byte_code(made)
    host.mkdir()
    (installed / PACKAGES / "pkg/__pycache__").symlink_to(host)
    assert take_bytecode(made, installed, TARGET) == 0
    assert list(host.iterdir()) == []
