"""OCI layouts and archives become trees, and hostile ones harm nothing outside of theirs."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from dsec.errors import BadRequest, Conflict, NotFound, TooLarge, Unsupported
from dsec.images.oci import read_image
from dsec.images.store import ImageStore
from dsec.images.tree import tree_digest
from dsec.images.unpack import LayerFile, Unpacked, unpack
from dsec.ports.storage import Image, ImageConfig
from dsec.testing import images as make
from dsec.testing.images import Entry, directory, file, hardlink, layer, symlink

pytestmark = [pytest.mark.needs_root]

HONEST = (
    layer(
        directory("etc"),
        file("etc/motd", b"hello\n"),
        directory("data", mode=0o750, uid=33, gid=33),
        file("data/a", b"a" * 1000, uid=33, when=make.WHEN - 5),
        symlink("data/link", "a"),
        hardlink("data/hard", "data/a"),
    ),
    layer(file("opt/tool", b"#!/bin/sh\n", mode=0o755)),
)


def unpacked(tmp_path: Path, *layers: bytes, **bounds: int) -> tuple[Path, Unpacked]:
    """The tree of these layers."""
    tree = tmp_path / "tree"
    tree.mkdir()
    files = []
    for number, data in enumerate(layers):
        path = tmp_path / f"layer-{number}"
        path.write_bytes(data)
        packing = "gzip" if data.startswith(b"\x1f\x8b") else ""
        files.append(LayerFile(path=path, compression=packing))
    return tree, unpack(tree, files, **bounds)


def get(store: Path, name: str, **more: Path) -> Image:
    return anyio.run(ImageStore(store, **more).get, name)


def test_a_tree_is_what_its_layers_say(tmp_path: Path) -> None:
    tree, report = unpacked(tmp_path, *HONEST)
    assert (tree / "etc/motd").read_bytes() == b"hello\n"
    info = (tree / "data/a").stat()
    assert (info.st_uid, info.st_mtime, info.st_nlink) == (33, make.WHEN - 5, 2)
    assert stat.S_IMODE((tree / "data").stat().st_mode) == 0o750
    assert (tree / "data").stat().st_mtime == make.WHEN
    assert os.readlink(tree / "data/link") == "a"
    assert stat.S_IMODE((tree / "opt/tool").stat().st_mode) == 0o755
    assert report.entries == 7
    assert not any(report.dropped.values())


def test_a_tree_is_what_the_engine_expects(tmp_path: Path) -> None:
    foreign = layer(
        directory("etc"),
        file(
            "etc/passwd",
            b"root:x:0:0::/root:/bin/ash\nnode:x:1000:1000::/home/node:/bin/sh\nuser:x:7:7::/:/x\n",
        ),
        file("etc/shadow", b"root:$6$secret:19999:0:::::\n"),
        file("etc/machine-id", b"0123456789abcdef\n"),
        file("etc/resolv.conf", b"nameserver 10.1.2.3\n"),
        file("dev/console", b"left over"),
        symlink("workspace", "/etc"),
        symlink("tmp", "../../tmp"),
    )
    tree, _ = unpacked(tmp_path, foreign)
    assert (tree / "etc/machine-id").read_bytes() == (tree / "etc/resolv.conf").read_bytes() == b""
    passwd = (tree / "etc/passwd").read_text().splitlines()
    assert passwd[:3] == [
        "root:x:0:0::/root:/bin/ash",
        "user:x:1000:1000:user:/home/user:/bin/sh",
        "node:x:1000:1000::/home/node:/bin/sh",
    ]
    assert "secret" not in (tree / "etc/shadow").read_text()
    assert sorted(os.listdir(tree / "dev")) == ["shm"]
    for name in ("workspace", "home/user"):
        info = (tree / name).lstat()
        assert (stat.S_ISDIR(info.st_mode), info.st_uid) == (True, 1000)
    assert stat.S_IMODE((tree / "tmp").lstat().st_mode) == 0o1777


def test_whiteouts_take_away_what_lies_below_and_nothing_else(tmp_path: Path) -> None:
    below = layer(
        file("a/x", b"1"),
        file("a/y", b"1"),
        file("b/old", b"1"),
        file("b/deep/old", b"1"),
        file("c/z/f", b"1"),
        file("d", b"1"),
    )
    above = layer(
        file("a/.wh.x"),
        file("b/new-before", b"2"),
        file("b/deep/new", b"2"),
        file("b/.wh..wh..opq"),
        file("b/new-after", b"2"),
        file(".wh.c"),
        file("d/now-a-directory", b"2"),
        file("a/.wh..wh.plnk"),
        file("nowhere/.wh.nothing"),
    )
    tree, _ = unpacked(tmp_path, below, above)
    assert sorted(os.listdir(tree / "a")) == ["y"]
    assert sorted(os.listdir(tree / "b")) == ["deep", "new-after", "new-before"]
    assert sorted(os.listdir(tree / "b/deep")) == ["new"]
    assert not (tree / "c").exists()
    assert (tree / "d/now-a-directory").read_bytes() == b"2"


def test_links_of_lower_layers_are_followed_inside(tmp_path: Path) -> None:
    tree, _ = unpacked(
        tmp_path, layer(directory("usr/lib"), symlink("lib", "/usr/lib")), layer(file("lib/a", b"1"))
    )
    assert (tree / "usr/lib/a").read_bytes() == b"1"
    assert os.readlink(tree / "lib") == "/usr/lib"


def test_privileges_and_devices_are_left_out_and_told(tmp_path: Path) -> None:
    capability = {"SCHILY.xattr.security.capability": "x"}
    tree, report = unpacked(
        tmp_path,
        layer(
            file("bin/su", b"1", mode=0o6755),
            file("bin/ping", b"1", pax=capability),
            file("redirected", b"1", pax={"SCHILY.xattr.trusted.overlay.redirect": "/etc"}),
            file("big", b"1", uid=200_000),
            Entry(name="sda", kind=tarfile.BLKTYPE),
            Entry(name="null", kind=tarfile.CHRTYPE),
            Entry(name="fifo", kind=tarfile.FIFOTYPE),
        ),
    )
    assert stat.S_IMODE((tree / "bin/su").stat().st_mode) == 0o755
    assert [os.listxattr(tree / name) for name in ("bin/ping", "redirected")] == [[], []]
    assert (tree / "big").stat().st_uid == 65_534
    assert not any((tree / name).exists() for name in ("sda", "null", "fifo"))
    assert report.dropped == {"special": 3, "setuid": 1, "xattrs": 2, "capabilities": 1, "owners": 1}
    assert report.skipped == ("'sda'", "'null'", "'fifo'")


def escapes(outside: str) -> dict[str, Sequence[Entry]]:
    """Archives whose entries aim at a directory of the host."""
    up = "../" * 12 + outside.lstrip("/")
    return {
        "absolute": [file(f"{outside}/new", b"x")],
        "dots": [file(f"{up}/new", b"x")],
        "symlink": [symlink("way", outside), file("way/new", b"x")],
        "relative symlink": [symlink("way", up), file("way/new", b"x")],
        "overwrite through a symlink": [symlink("way", f"{outside}/kept"), file("way", b"x")],
        "symlink swapped for a directory": [directory("way"), symlink("way", outside), file("way/new", b"x")],
        "hard link": [hardlink("way", f"{outside}/kept"), file("way", b"x")],
        "hard link by dots": [hardlink("way", f"{up}/kept"), file("way", b"x")],
        "mode of a target": [
            symlink("way", outside),
            directory("way/", mode=0o777),
            directory("way/.", mode=0o777),
        ],
        "whiteout": [symlink("way", outside), file("way/.wh.kept")],
        "whiteout of dots": [file(f"{outside}/.wh..", b""), file("a/.wh...")],
        "opaque": [symlink("way", outside), file("way/.wh..wh..opq")],
        "etc": [symlink("etc", outside)],
    }


@pytest.mark.parametrize("how", escapes("/x"))
def test_nothing_outside_of_the_tree_is_touched(tmp_path: Path, how: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    before = tree_digest(outside)
    with suppress(BadRequest):
        unpacked(tmp_path, layer(*escapes(str(outside))[how]))
    assert tree_digest(outside) == before
    assert (outside / "kept").stat().st_nlink == 1


NAIVE = "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='fully_trusted')"


@pytest.mark.parametrize("how", ["absolute", "dots", "symlink", "relative symlink", "hard link"])
def test_the_same_archives_escape_where_nothing_stops_them(tmp_path: Path, how: str) -> None:
    """Positive control."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    before = tree_digest(outside)
    (tmp_path / "archive").write_bytes(layer(*escapes(str(outside))[how]))
    (tmp_path / "tree").mkdir()
    subprocess.run(
        [sys.executable, "-c", NAIVE, tmp_path / "archive", tmp_path / "tree"],
        check=False,
        capture_output=True,
    )
    linked = (tmp_path / "tree/way").exists() and (outside / "kept").stat().st_nlink > 1
    assert tree_digest(outside) != before or linked


def test_modules_are_not_taken_from_the_tree(tmp_path: Path) -> None:
    """What the child would import after it entered the tree is a stranger's."""
    evil = b"raise SystemExit('imported')\n"
    versions = [f"usr/lib/python3.{minor}" for minor in range(9, 16)]
    places = [*versions, *(path.lstrip("/") for path in sys.path if path)]
    names = ("stringprep.py", "encodings/idna.py", "encodings/utf_16.py", "glob.py", "pwd.py", "zoneinfo.py")
    tree, _ = unpacked(
        tmp_path, layer(*(file(f"{place}/{name}", evil) for place in places for name in names))
    )
    assert (tree / versions[0] / "glob.py").read_bytes() == evil


@pytest.mark.parametrize(
    "data",
    [
        b"not a tar archive" * 100,
        layer(file("a", b"x" * 5000))[:3000],
        gzip.compress(layer(file("a", b"x" * 5000)))[:60],
        gzip.compress(layer(file("a", os.urandom(5000))))[:2000] + b"\xff" * 3000,
        b"\x1f\x8b\xff" + bytes(500),
        layer(file("a", b"x"), file("b", b"x")).replace(b"ustar", b"xstar"),
        layer(file("a/../../b", b"x")),
        layer(file("a\udcff", b"x"), file("n" * 300, b"x")),
        layer(hardlink("a", "missing")),
        layer(file("a", b"", pax={"mtime": "nan"})),
    ],
)
def test_malformed_layers_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BadRequest, match="cannot be unpacked") as caught:
        unpacked(tmp_path, data)
    assert caught.value.hint


def sparse(size: int) -> bytes:
    return layer(
        file(
            "a",
            b"",
            pax={
                "GNU.sparse.major": "0",
                "GNU.sparse.minor": "1",
                "GNU.sparse.size": str(size),
                "GNU.sparse.map": "0,0",
            },
        )
    )


def long_header(size: int) -> bytes:
    member = tarfile.TarInfo("././@PaxHeader")
    member.type, member.size = tarfile.XHDTYPE, size
    return member.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("case", ["zeros", "sparse", "header", "bytes", "entries", "deep"])
def test_bombs_are_refused(tmp_path: Path, case: str) -> None:
    bounds = {"bytes": {"max_bytes": 4096}, "entries": {"max_entries": 3}}.get(case, {})
    data = {
        "zeros": lambda: gzip.compress(bytes(300 * 2**20), 1),
        "sparse": lambda: sparse(2**40),
        "header": lambda: gzip.compress(long_header(2**31) + bytes(2**20)),
        "bytes": lambda: layer(file("a", bytes(5000))),
        "entries": lambda: layer(*(file(str(number)) for number in range(4))),
        "deep": lambda: layer(file("a/" * 1400 + "b")),
    }[case]()
    with pytest.raises(TooLarge) as caught:
        unpacked(tmp_path, data, **bounds)
    assert caught.value.hint


SECTION = {"Env": ["A=1"], "WorkingDir": "/data", "User": "33", "Entrypoint": ["/opt/tool"], "Cmd": ["run"]}


def forms(tmp_path: Path) -> list[Path]:
    """One image in every form there is."""
    layout = make.write_layout(tmp_path / "gzip", HONEST, **SECTION)
    return [
        layout,
        make.write_layout(tmp_path / "zstd", HONEST, packing="zstd", **SECTION),
        make.write_layout(tmp_path / "plain", HONEST, packing="", tag="v1", **SECTION),
        make.write_archive(tmp_path / "layout.tar", layout),
        make.write_archive(tmp_path / "layout.tar.gz", layout),
        make.write_saved(tmp_path / "saved.tar", HONEST, **SECTION),
    ]


def test_one_image_in_every_form_is_one_tree(tmp_path: Path) -> None:
    found = [get(tmp_path / "store", f"oci:{path}") for path in forms(tmp_path)]
    assert len({image.digest for image in found}) == 1
    expected = ImageConfig(
        env=("A=1",), working_dir="/data", user="33", entrypoint=("/opt/tool",), cmd=("run",)
    )
    assert {image.config for image in found} == {expected}
    assert len({image.path for image in found}) == 1
    assert found[0].sources != found[1].sources
    again = get(tmp_path / "other", f"oci:{tmp_path}/gzip")
    assert (again.digest, again.sources) == (found[0].digest, found[0].sources)
    assert get(tmp_path / "store", f"oci:{tmp_path}/plain:v1").digest == again.digest


def test_what_is_stored_is_not_built_again_until_its_path_changes(tmp_path: Path) -> None:
    said: list[str] = []
    layout = make.write_layout(tmp_path / "layout", HONEST)
    store = ImageStore(tmp_path / "store", progress=lambda step: said.append(step.what))
    first = anyio.run(store.get, f"oci:{layout}")
    assert said[-1] == "done"
    said.clear()
    assert anyio.run(store.get, f"oci:{layout}") == first
    assert anyio.run(store.verify, f"oci:{layout}") == first
    assert said == []
    make.write_layout(layout, [*HONEST, layer(file("new", b"x"))])
    second = anyio.run(store.get, f"oci:{layout}")
    assert second.digest != first.digest
    # A pin still finds the one before, and another content is refused.
    assert anyio.run(store.get, f"oci:{layout}@{first.digest}").digest == first.digest
    assert anyio.run(store.get, f"oci:{layout}@{second.sources[0]}") == second
    with pytest.raises(Conflict, match="not sha256:0000"):
        anyio.run(store.get, f"oci:{layout}@sha256:{'0' * 64}")


def test_a_changed_blob_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(
        sorted(os.listdir(make.write_layout(tmp_path / "model", HONEST) / "blobs/sha256"))
    ):
        layout = make.write_layout(tmp_path / str(number), HONEST)
        path = layout / "blobs/sha256" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(BadRequest, match=r"blob sha256:.* is sha256:"):
            get(tmp_path / "store", f"oci:{layout}")
    assert os.listdir(tmp_path / "store/images") == os.listdir(tmp_path / "store/building") == []


def test_a_layer_that_is_not_the_one_of_the_config_is_refused(tmp_path: Path) -> None:
    saved = make.write_saved(tmp_path / "saved.tar", HONEST)
    data = saved.read_bytes()
    assert data.count(b"hello\n") == 1
    saved.write_bytes(data.replace(b"hello\n", b"hellO\n"))
    with pytest.raises(BadRequest, match="when decompressed, not sha256:"):
        get(tmp_path / "store", f"oci:{saved}")


def rewritten(layout: Path, **changes: object) -> Path:
    index = json.loads((layout / "index.json").read_text())
    index["manifests"][0] |= changes
    (layout / "index.json").write_text(json.dumps(index))
    return layout


def test_indexes_that_lie(tmp_path: Path) -> None:
    layout = make.write_layout(tmp_path / "layout", HONEST)
    for changes in ({"size": 5}, {"digest": "sha256:../../etc/passwd"}, {"digest": f"sha256:{'0' * 64}"}):
        with pytest.raises(BadRequest):
            read_image(rewritten(make.write_layout(layout, HONEST), **changes), tmp_path)
    other = {"os": "linux", "architecture": "s390x"}
    with pytest.raises(Unsupported, match="has nothing for linux/"):
        read_image(rewritten(make.write_layout(layout, HONEST), platform=other), tmp_path)
    with pytest.raises(NotFound, match="tag 'v2'"):
        read_image(make.write_layout(layout, HONEST, tag="v1"), tmp_path, tag="v2")
    with pytest.raises(NotFound):
        read_image(tmp_path / "nothing", tmp_path)
    (layout / "index.json").write_text("[" * 100_000)
    with pytest.raises(BadRequest):
        read_image(layout, tmp_path)


def test_names_in_an_archive_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    outer = layer(
        file("../../escaped", b"x"), file(f"{tmp_path}/absolute", b"x"), symlink("index.json", "/etc/passwd")
    )
    (tmp_path / "archive.tar").write_bytes(outer)
    with pytest.raises(BadRequest, match=r"has no 'index\.json'"):
        read_image(tmp_path / "archive.tar", tmp_path / "parts")
    assert sorted(os.listdir(tmp_path)) == ["archive.tar", "parts"]
    assert sorted(os.listdir(tmp_path / "parts")) == ["0", "1"]
    for number, damaged in enumerate(
        (b"\x1f\x8b\xff" + bytes(500), gzip.compress(outer)[:200] + b"\xff" * 500, outer[:700])
    ):
        (tmp_path / f"parts-{number}").mkdir()
        (tmp_path / "archive.tar").write_bytes(damaged)
        with pytest.raises((BadRequest, TooLarge)):
            read_image(tmp_path / "archive.tar", tmp_path / f"parts-{number}")


def debian(secret: bytes, built: int) -> bytes:
    """What mmdebstrap would leave, with all that must not stay."""
    names = (
        "etc/apt/auth.conf.d/a",
        "etc/apt/apt.conf.d/99mmdebstrap",
        "etc/hostname",
        "etc/resolv.conf",
        "var/log/a/b",
    )
    return layer(
        file("usr/bin/tool", b"1"),
        directory("etc", when=built),
        *(file(name, secret, when=built) for name in names),
        file("etc/shadow", b"root:*:%d:0:::::\n" % (len(secret)), when=built),
        file("etc/apt/sources.list", b"deb http://user:secret@mirror.internal x main\n", when=built),
        file("var/lib/dpkg/status", b"Package: tool\n", when=built),
    )


def test_a_debian_system_names_neither_machine_nor_moment(tmp_path: Path) -> None:
    digests = set()
    for number in (1, 2):
        place = tmp_path / str(number)
        (place / "tree").mkdir(parents=True)
        (place / "layer").write_bytes(debian(b"secret" * number, make.WHEN + 1000 * number))
        after = (make.WHEN + 500 * number) * 10**9
        unpack(
            place / "tree",
            [LayerFile(path=place / "layer")],
            made_after=after,
            apt_sources="deb http://example x main\n",
        )
        digests.add(tree_digest(place / "tree"))
    assert len(digests) == 1
    grep = subprocess.run(["grep", "-r", "secret", tmp_path / "1/tree"], capture_output=True, check=False)
    assert grep.returncode == 1
    assert (tmp_path / "1/tree/var/log/a").is_dir()
