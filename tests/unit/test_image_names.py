"""Names of bases, the alias table, sources of apt, and what the collector takes away."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dsec.errors import BadRequest, NotFound
from dsec.images.bases import read_table, resolve
from dsec.images.debian import Source, public_sources, sources
from dsec.images.gc import collect
from dsec.images.names import BaseName, host_of, parse, untagged
from dsec.images.shelf import Shelf

PIN = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("text", "kind", "rest"),
    [
        ("system", "system", "system"),
        ("host", "host", "host"),
        ("debian:bookworm", "debian", "bookworm"),
        ("oci:/some/where:v1", "oci", "/some/where:v1"),
        ("docker://registry.example/a/b-c:1.0", "docker", "registry.example/a/b-c:1.0"),
        ("docker://127.0.0.1:5000/a", "docker", "127.0.0.1:5000/a"),
        ("docker://[::1]:5000/a", "docker", "[::1]:5000/a"),
        ("python:3.11-slim", "alias", "python:3.11-slim"),
        ("debian:12.1_odd", "alias", "debian:12.1_odd"),
    ],
)
def test_names(text: str, kind: str, rest: str) -> None:
    assert parse(text) == BaseName(kind=kind, rest=rest)
    if kind == "host":
        with pytest.raises(BadRequest, match="cannot be pinned"):
            parse(f"{text}@{PIN}")
    else:
        assert parse(f"{text}@{PIN}") == BaseName(kind=kind, rest=rest, pin=PIN)
    assert parse(text).name == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-x",
        "../names/system",
        "a/../b",
        "oci:relative",
        "oci:",
        "docker://--help",
        "docker://host",
        "docker://host/UPPER",
        "docker://host/a:tag:tag",
        "docker://host/a b",
        "docker://user:password@host/a",
        "system@sha256:short",
        "system@v1",
        "a\nb",
        "x" * 2000,
    ],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(text)
    assert caught.value.hint


def test_keys_are_file_names_and_differ() -> None:
    texts = (
        "system",
        "debian:bookworm",
        "debian:trixie",
        "docker://h/a",
        f"docker://h/a@{PIN}",
        "oci:/a",
        "oci:/b",
    )
    keys = {parse(text).key for text in texts}
    assert len(keys) == len(texts)
    assert parse("system").key == parse(f"system@{PIN}").key == "system"
    assert not any("/" in key or key.startswith(".") for key in keys)


def test_parts_of_remote_names() -> None:
    assert (host_of("[::1]:5000/a/b:1"), untagged("[::1]:5000/a/b:1")) == ("::1", "[::1]:5000/a/b")
    assert (host_of("h.example/a"), untagged("h.example:5/a:1")) == ("h.example", "h.example:5/a")


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "bases.toml"
    path.write_text(text)
    return path


def test_an_alias_stands_for_a_base_and_a_pin_goes_with_it(tmp_path: Path) -> None:
    path = table(tmp_path, '[bases]\n"python:3.11-slim" = "debian:bookworm"\npinned = "system@' + PIN + '"\n')
    assert resolve(parse("python:3.11-slim"), path) == parse("debian:bookworm")
    assert resolve(parse(f"python:3.11-slim@{PIN}"), path) == parse(f"debian:bookworm@{PIN}")
    assert resolve(parse("pinned"), path).pin == PIN
    with pytest.raises(BadRequest, match="is pinned to"):
        resolve(parse(f"pinned@sha256:{'b' * 64}"), path)
    with pytest.raises(NotFound, match=r"aliases in .*: pinned, python") as caught:
        resolve(parse("python:3.12"), path)
    assert caught.value.hint


def test_the_line_of_an_alias_that_is_missing_is_told(tmp_path: Path) -> None:
    for text in ("", '[bases]\nmine = "system"\n'):
        path = table(tmp_path, text)
        with pytest.raises(NotFound) as caught:
            resolve(parse("python:3.11-slim"), path)
        lines = [line.strip() for line in caught.value.hint.splitlines()[1:-1]]
        assert str(path) in caught.value.hint
        path.write_text("\n".join([text, *lines]))
        assert resolve(parse("python:3.11-slim"), path) == parse("debian:bookworm"), "the advice works"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("sytem", "system"),
        ("debain:bookworm", "debian:bookworm"),
        ("Debian:Trixie", "debian:trixie"),
        ("debian:12", "debian:SUITE"),
        ("dockr:x", "docker://HOST"),
        ("minee", "mine"),
    ],
)
def test_what_is_nearly_a_base_is_no_alias(tmp_path: Path, typo: str, meant: str) -> None:
    path = table(tmp_path, '[bases]\nmine = "system"\n')
    with pytest.raises(NotFound) as caught:
        resolve(parse(typo), path)
    assert f"did you mean {meant}" in caught.value.hint
    path.write_text(f'[bases]\nmine = "system"\nother = "{typo}"\n')
    with pytest.raises(BadRequest, match="is none"):
        read_table(path)
    path.write_text('[bases]\nmine = "system"\nother = "mine"\n')
    with pytest.raises(BadRequest, match="not another alias"):
        read_table(path)


def test_without_a_table_there_are_no_aliases(tmp_path: Path) -> None:
    assert read_table(tmp_path / "none.toml") == {}
    assert resolve(parse("system"), tmp_path / "none.toml") == parse("system")


@pytest.mark.parametrize(
    "text",
    [
        "[bases",
        "[other]\n",
        "bases = 3\n",
        "[bases]\na = 3\n",
        '[bases]\na = "b"\n',
        '[bases]\nsystem = "debian:bookworm"\n',
        '[bases]\na = "docker://nothing"\n',
        '[bases]\n"a@' + PIN + '" = "system"\n',
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadRequest):
        read_table(table(tmp_path, text))


def apt(tmp_path: Path) -> tuple[Path, Path]:
    """A machine with bookworm from mirrors of its own, and things of other makers."""
    root = tmp_path / "apt"
    (root / "sources.list.d").mkdir(parents=True)
    (root / "sources.list").write_text(
        "# deb http://comment bookworm main\n"
        "deb [arch=amd64 signed-by=/k] http://me:secret@mirror.example/debian/ bookworm main contrib\n"
        "deb-src http://mirror.example/debian bookworm main\n"
        "deb cdrom:[x] bookworm main\n"
        "deb https://other.example stable main\n"
    )
    (root / "sources.list.d/a.sources").write_text(
        "Types: deb deb-src\nURIs: http://mirror.example/debian\nSuites: bookworm\n bookworm-updates\nComponents: main\n\n"
        "Types: deb\n# odd\nURIs: http://security.example/\nSuites: bookworm-security\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://disabled.example\nSuites: bookworm\n"
    )
    release = tmp_path / "os-release"
    release.write_text('ID=debian\nVERSION_CODENAME="bookworm"\n')
    return root, release


def test_sources_of_the_machine_without_its_credentials(tmp_path: Path) -> None:
    root, release = apt(tmp_path)
    found = sources("trixie", root, release)
    assert found == (
        Source("http://mirror.example/debian", "trixie"),
        Source("http://mirror.example/debian", "trixie-updates"),
        Source("http://security.example", "trixie-security"),
    )
    assert sources("sid", root, release) == (Source("http://mirror.example/debian", "sid"),)


def test_a_machine_that_is_no_debian_has_the_public_sources(tmp_path: Path) -> None:
    root, release = apt(tmp_path)
    release.write_text("ID=ubuntu\nVERSION_CODENAME=bookworm\n")
    found = sources("bookworm", root, release)
    assert "".join(f"deb {each.uri} {each.suite} main\n" for each in found) == public_sources("bookworm")
    assert sources("bookworm", root, tmp_path / "nowhere") == found


def stored(root: Path, name: str, letter: str, *, size: int, age: float) -> str:
    """A stand-in of an image; its digest."""
    shelf = Shelf(root)
    shelf.prepare()
    digest = letter * 64
    for suffix in ("erofs", "json", "checked", "used"):
        path = root / "images" / f"{digest}.{suffix}"
        path.write_bytes(bytes(size) if suffix == "erofs" else b"{}")
        os.utime(path, (time.time() - age, time.time() - age))
    if name:
        (root / "names" / name).write_text(json.dumps({"digest": f"sha256:{digest}"}))
    return f"sha256:{digest}"


def images(root: Path) -> str:
    return "".join(sorted({path.name[0] for path in (root / "images").iterdir()}))


def test_what_no_name_stands_for_goes_after_a_while_unless_it_is_held(tmp_path: Path) -> None:
    stored(tmp_path, "named", "a", size=1, age=9999)
    stored(tmp_path, "", "b", size=1, age=9999)
    stored(tmp_path, "", "c", size=1, age=10)
    held = stored(tmp_path, "", "d", size=1, age=9999)
    Shelf(tmp_path).hold(held, "snapshot-1")
    removed = collect(tmp_path)
    assert {path.name[0] for path in removed} == {"b"}
    assert images(tmp_path) == "acd"
    Shelf(tmp_path).release(held, "snapshot-1")
    Shelf(tmp_path).release(held, "snapshot-1")
    collect(tmp_path)
    assert images(tmp_path) == "ac"


def test_over_budget_the_longest_unused_go_first_and_what_is_held_stays(tmp_path: Path) -> None:
    held = stored(tmp_path, "one", "a", size=1000, age=50_000)
    Shelf(tmp_path).hold(held, "engine-1")
    stored(tmp_path, "two", "b", size=1000, age=40_000)
    stored(tmp_path, "three", "c", size=1000, age=30_000)
    stored(tmp_path, "four", "d", size=1000, age=10)
    assert collect(tmp_path, budget=4000) == ()
    collect(tmp_path, budget=3000)
    assert images(tmp_path) == "acd"
    assert not (tmp_path / "names/two").exists()
    collect(tmp_path, budget=0)
    assert images(tmp_path) == "ad"  # one is held, one was asked for a moment ago


def test_only_what_is_stored_can_be_held(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.prepare()
    with pytest.raises(NotFound):
        shelf.hold(PIN, "a")
    assert list((tmp_path / "held").iterdir()) == []
    for digest, owner in (("../x", "a"), (PIN, "../a"), (PIN, "")):
        with pytest.raises(BadRequest):
            shelf.hold(digest, owner)
