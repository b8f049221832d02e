"""Dependencies without a process: the image's Python, requirements, locks, who needs whom."""

from __future__ import annotations

import json
import random
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from dsec.errors import BadRequest, Conflict, Unsupported
from dsec.images.dependencies import pip_driver
from dsec.images.dependencies.graph import required_by
from dsec.images.dependencies.lock import Lock, Locked, parse_lock
from dsec.images.dependencies.pip import without_secrets
from dsec.images.dependencies.requirements import floating, parse
from dsec.images.dependencies.target import PythonTarget, read_target
from dsec.images.dependencies.wheel import Described

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
LOCKED = Locked(
    name="a-b", version="1.0", file="a_b-1.0-py3-none-any.whl", sha256="0" * 64, size=10, required_by=("a-b",)
)


def elf(loader: str, text: bytes = b"", machine: int = 62) -> bytes:
    """A program that names its loader and holds some text."""
    name = loader.encode() + b"\0"
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    )
    table = struct.pack("<IIQQQQQQ", 3, 4, 120, 0, 0, len(name), len(name), 1)
    return head + table + name + text


def put(tree: Path, path: str, content: bytes | str = b"") -> None:
    target = tree / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        target.symlink_to(content)
    else:
        target.write_bytes(content)


def debian(tree: Path) -> Path:
    put(tree, "usr/bin/python3.11", elf("/lib64/ld-linux-x86-64.so.2", b"\x003.11.2\x00 2.5.0\x00"))
    put(tree, "usr/bin/python3", "python3.11")
    put(tree, "usr/lib/python3.11/os.py")
    put(tree, "usr/lib/python3.11/site.py", b"'dist-packages'")
    put(
        tree,
        "usr/lib/python3.11/_sysconfigdata__x86_64-linux-gnu.py",
        b" 'SOABI': 'cpython-311-x86_64-linux-gnu',\n",
    )
    put(tree, "lib", "usr/lib")
    put(tree, "lib64", "usr/lib64")
    put(tree, "usr/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2")
    put(tree, "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", b"ld.so")
    put(tree, "usr/lib/x86_64-linux-gnu/libc.so.6", b"GNU C Library (Debian) stable release version 2.36.\n")
    return tree


def test_the_python_of_debian(tmp_path: Path) -> None:
    assert read_target(debian(tmp_path)) == TARGET


def test_a_python_of_musl_below_usr_local_with_a_shared_library(tmp_path: Path) -> None:
    put(tmp_path, "usr/local/bin/python3.13", elf("/lib/ld-musl-aarch64.so.1", machine=183))
    put(tmp_path, "usr/local/bin/python3", "/usr/local/bin/python3.13")
    put(tmp_path, "usr/local/lib/libpython3.13t.so.1.0", b"\x003.13.0rc1+\x00")
    put(tmp_path, "usr/local/lib/python3.13/os.py")
    put(tmp_path, "usr/local/lib/python3.13/site.py", b"site")
    put(tmp_path, "usr/local/lib/python3.13/lib-dynload/_json.cpython-313t-aarch64-linux-musl.so")
    put(tmp_path, "lib/ld-musl-aarch64.so.1", b"\x001.2.4\x00musl libc (aarch64)")
    found = read_target(tmp_path)
    assert (found.version, found.abi, found.libc, found.libc_version) == (
        "3.13.0rc1",
        "cp313t",
        "musl",
        "1.2",
    )
    assert found.interpreter == "/usr/local/bin/python3.13"
    assert found.packages == "/usr/local/lib/python3.13/site-packages"
    assert found.platforms == (
        "musllinux_1_2_aarch64",
        "musllinux_1_1_aarch64",
        "musllinux_1_0_aarch64",
        "linux_aarch64",
    )


def test_the_first_python_of_the_path_or_the_one_that_is_named(tmp_path: Path) -> None:
    debian(tmp_path)
    put(tmp_path, "usr/local/bin/python3.12", elf("/lib64/ld-linux-x86-64.so.2", b"\x003.12.1\x00"))
    put(tmp_path, "usr/local/bin/python3", "python3.12")
    put(tmp_path, "usr/local/lib/python3.12/os.py")
    assert read_target(tmp_path).version == "3.12.1"
    assert read_target(tmp_path, interpreter="/usr/bin/python3") == TARGET


def test_links_of_the_image_stay_within_it(tmp_path: Path) -> None:
    """The host's own files are never read, whatever a link names."""
    put(tmp_path / "outside", "python3.11", elf("/lib64/ld-linux-x86-64.so.2", b"\x003.11.9\x00"))
    tree = tmp_path / "tree"
    put(tree, "usr/bin/python3", str(tmp_path / "outside/python3.11"))
    with pytest.raises(Unsupported, match="no Python"):
        read_target(tree)
    (tree / "usr/bin/python3").unlink()
    put(tree, "usr/bin/python3", "../../../outside/python3.11")
    with pytest.raises(Unsupported, match="no Python"):
        read_target(tree)
    (tree / "usr/bin/python3").unlink()
    put(tree, "usr/bin/python3", "python3")
    with pytest.raises(Unsupported, match="no Python"):
        read_target(tree)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (b"#!/bin/sh\nexec pyenv\n" + bytes(64), "no 64-bit"),
        (elf("/lib64/ld-linux-x86-64.so.2", machine=3), "machine 3"),
        (elf("/lib/ld-uClibc.so.0"), "neither glibc"),
        (elf("/lib64/ld-linux-x86-64.so.2", b"\x003.12.1\x00"), "no version of Python 3.11"),
        (b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", 62) + bytes(80), "statically"),
    ],
)
def test_what_is_no_python_that_wheels_are_for(tmp_path: Path, program: bytes, words: str) -> None:
    debian(tmp_path)
    (tmp_path / "usr/bin/python3.11").write_bytes(program)
    with pytest.raises(Unsupported, match=words):
        read_target(tmp_path)


def test_whatever_is_wrong_with_a_program_it_is_told(tmp_path: Path) -> None:
    """Bytes of it are changed at random, always the same ones."""
    program = debian(tmp_path) / "usr/bin/python3.11"
    whole = program.read_bytes()
    chance = random.Random(7)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 2, 8])):
            data[chance.randrange(len(data))] = chance.choice([0, 255, chance.randrange(256)])
        program.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
        with suppress(Unsupported):
            read_target(tmp_path)


def test_tags_say_what_the_libc_can_load() -> None:
    tags = {str(tag) for tag in TARGET.tags()}
    assert {"cp311-cp311-manylinux_2_36_x86_64", "cp37-abi3-manylinux2014_x86_64", "py3-none-any"} <= tags
    assert not any("2_37" in tag or "musl" in tag or "cp312" in tag for tag in tags)
    free = replace(TARGET, version="3.13.0", abi="cp313t")
    assert "cp37-abi3-manylinux2014_x86_64" not in {str(tag) for tag in free.tags()}
    assert TARGET.platforms.index("manylinux_2_17_x86_64") + 1 == TARGET.platforms.index(
        "manylinux2014_x86_64"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"interpreter": "/usr/../bin/python3"},
        {"packages": "usr"},
        {"version": "3"},
        {"libc": "bionic"},
        {"abi": "x"},
    ],
)
def test_a_target_is_checked(change: dict[str, str]) -> None:
    with pytest.raises(BadRequest):
        replace(TARGET, **change)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-r other.txt",
        "--index-url=http://x",
        "a b",
        "a>=",
        "a; python_version",
        "a\nb",
        "./a",
        "a" * 3000,
    ],
)
def test_a_requirement_that_is_none(text: str) -> None:
    with pytest.raises(BadRequest, match="requirement"):
        parse([text])


def test_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadRequest) as caught:
        parse(["a @ https://me:secret@host/a-1.0-py3-none-any.whl"])
    assert "secret" not in str(caught.value)
    assert "secret" not in str(caught.value.facts)


def test_requirements_have_one_order_and_one_form() -> None:
    assert list(map(str, parse(["b >= 1,<2", "a[y,x]==1", "b<2,>=1"]))) == ["a[x,y]==1", "b<2,>=1"]
    with pytest.raises(BadRequest, match="one str"):
        parse("redis")


def test_what_floats() -> None:
    given = ["a==1.0", "b", "c>=1", "d==1.*", "e===1", "f==1; python_version<'3.9'"]
    assert floating(given) == ("b", "c>=1", "d==1.*")
    with pytest.raises(BadRequest, match=r"b, c>=1, d==1\.\*") as caught:
        floating(given, strict=True)
    assert caught.value.facts["floating"] == ["b", "c>=1", "d==1.*"]
    assert floating(["a==1"], strict=True) == ()


def test_a_lock_has_one_text() -> None:
    lock = Lock(target=TARGET, requirements=("a-b",), packages=(LOCKED,))
    assert parse_lock(lock.text) == lock
    assert parse_lock(lock.text).text == lock.text
    assert lock.digest.startswith("sha256:")
    other = replace(lock, target=replace(TARGET, libc_version="2.28"))
    assert other.digest != lock.digest


def test_a_lock_for_another_python_is_told_from_this_one() -> None:
    lock = Lock(target=TARGET)
    lock.check_target(replace(TARGET))
    with pytest.raises(Conflict, match=r"version 3\.11\.9 instead of 3\.11\.2"):
        lock.check_target(replace(TARGET, version="3.11.9"))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"more": 1},
        {"packages": [{}]},
        {"packages": {}},
        {"requirements": ["b", "a"]},
        {"requirements": [1]},
        {"target": {}},
    ],
)
def test_a_lock_that_is_none(change: dict[str, object]) -> None:
    value = json.loads(Lock(target=TARGET).text)
    with pytest.raises(BadRequest):
        parse_lock(json.dumps(value | change))
    with pytest.raises(BadRequest):
        parse_lock("{")


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../a_b-1.0-py3-none-any.whl"},
        {"file": "a_c-1.0-py3-none-any.whl"},
        {"file": "a_b-1.1-py3-none-any.whl"},
        {"file": "a_b-1.0.tar.gz"},
        {"sha256": "F" * 64},
        {"size": 0},
    ],
)
def test_a_locked_package_is_checked(change: dict[str, str]) -> None:
    with pytest.raises(BadRequest):
        replace(LOCKED, **change)


def described(name: str, *requires: str, version: str = "1.0") -> Described:
    return Described(name=name, version=version, requires=tuple(map(Requirement, requires)))


def world(*packages: Described) -> dict[str, Described]:
    return {each.name: each for each in packages}


def test_who_needs_whom() -> None:
    packages = world(
        described("a", "b>=1", "c; extra == 'more'", "d; python_version < '3.11'"),
        described("b", "a"),
        described("c"),
    )
    assert required_by([Requirement("A[more]")], packages, TARGET.markers) == {
        "a": ("A[more]", "b 1.0: a"),
        "b": ("a 1.0: b>=1",),
        "c": ('a 1.0: c; extra == "more"',),
    }


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (world(described("a", "b; python_version < '3.12'")), "left it out"),
        (world(described("a"), described("b")), "which nothing needs"),
        (world(described("a", "b>=2"), described("b")), "chose version 1.0"),
    ],
)
def test_an_answer_for_another_python_is_refused(packages: dict[str, Described], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        required_by([Requirement("a")], packages, TARGET.markers)


def test_a_pip_whose_markers_stay_those_of_the_host_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a later pip does inside, it is never believed."""

    class Marker:
        def __init__(self, text: str) -> None: ...

        def evaluate(self, environment: dict[str, str]) -> bool:
            return True

    monkeypatch.setattr("importlib.import_module", lambda _: SimpleNamespace(Marker=Marker))
    assert not pip_driver.stand_in(TARGET.markers)
    monkeypatch.setattr(Marker, "evaluate", lambda *_: False)
    assert not pip_driver.stand_in(TARGET.markers)


def test_passwords_of_indexes_are_not_told() -> None:
    assert (
        without_secrets("at https://me:secret@host/simple, http://token@x")
        == "at https://host/simple, http://x"
    )
