"""The pure parts of the image store: package closures, where files go, digests of trees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.errors import Unsupported
from dsec.images.packages import Package, closure, fingerprint, parse_depends, parse_packages
from dsec.images.system import place
from dsec.images.tree import file_digest, tree_digest

WHEN = 1_700_000_000_123_456_789


def package(name: str, *depends: str, version: str = "1", provides: tuple[str, ...] = ()) -> Package:
    return Package(name, name, version, parse_depends(", ".join(depends)), provides)


def world(*packages: Package) -> dict[str, Package]:
    return {each.name: each for each in packages}


def test_depends_lose_versions_and_architectures() -> None:
    text = "libc6 (>= 2.36), python3:any | python3-minimal, , perl (= 5) [amd64]"
    assert parse_depends(text) == (("libc6",), ("python3", "python3-minimal"), ("perl",))


def test_packages_that_are_not_installed_do_not_count() -> None:
    listing = (
        "libc6:amd64\tlibc6\t2.36\tinstalled\t, libgcc-s1\tlibc6-compat\n"
        "libc6:i386\tlibc6\t2.36\tinstalled\t, \t\n"
        "gone\tgone\t1\tconfig-files\t, \t\n"
    )
    found = parse_packages(listing)
    assert list(found) == ["libc6"]
    assert found["libc6"].key == "libc6:amd64"
    assert found["libc6"].depends == (("libgcc-s1",),)
    assert found["libc6"].provides == ("libc6-compat",)


def test_the_closure_follows_alternatives_provides_and_cycles() -> None:
    installed = world(
        package("app", "missing | second", "virtual", "debconf"),
        package("second", "app"),
        package("provider", provides=("virtual",)),
        package("stranger"),
    )
    assert [each.name for each in closure(installed, ["app"])] == ["app", "provider", "second"]


def test_every_missing_package_is_named() -> None:
    with pytest.raises(Unsupported) as caught:
        closure(world(package("a", "b", "c | d")), ["a", "e"])
    assert caught.value.facts["missing"] == ["b", "c | d", "e"]
    assert caught.value.hint == "apt-get install b c e"


def test_the_fingerprint_changes_with_a_version_and_with_the_recipe() -> None:
    one, two = package("a"), package("a", version="2")
    assert len({fingerprint([one], "1"), fingerprint([two], "1"), fingerprint([one], "2")}) == 3
    assert fingerprint([one], "1") == fingerprint([package("a")], "1")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/bin/ls", "/usr/bin/ls"),
        ("/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/x86_64-linux-gnu/libc.so.6"),
        ("/lib64/ld-linux-x86-64.so.2", "/usr/lib64/ld-linux-x86-64.so.2"),
        ("/usr/bin/python3", "/usr/bin/python3"),
        ("/etc/passwd", None),
        ("/home/me/.ssh/id", None),
        ("/var/lib/dpkg/status", None),
        ("/usr/local/bin/mine", None),
        ("/usr/local", None),
        ("/usr/share/doc/bash/README", None),
        ("/usr/share/docs", "/usr/share/docs"),
        ("/usr", None),
        ("/.", None),
    ],
)
def test_where_a_package_file_goes(path: str, expected: str | None) -> None:
    assert place(path) == expected


def fill(root: Path) -> None:
    (root / "sub").mkdir(parents=True)
    (root / "sub/file").write_bytes(b"content")
    (root / "link").symlink_to("sub/file")
    (root / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"")
    for path in [*root.rglob("*"), root]:
        os.utime(path, ns=(WHEN, WHEN), follow_symlinks=False)


def keep_times(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        os.utime(path, ns=(WHEN, WHEN), follow_symlinks=False)


def test_equal_trees_have_equal_digests(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    fill(tmp_path / "b")
    assert tree_digest(tmp_path / "a") == tree_digest(tmp_path / "b")
    assert tree_digest(tmp_path / "a").startswith("sha256:")


def content(root: Path) -> None:
    (root / "sub/file").write_bytes(b"c0ntent")


def target(root: Path) -> None:
    (root / "link").unlink()
    (root / "link").symlink_to("sub/other")


def renamed(root: Path) -> None:
    (root / "sub/file").rename(root / "sub/fil")


def moved(root: Path) -> None:
    (root / "sub/file").rename(root / "file")


@pytest.mark.parametrize(
    "change",
    [
        content,
        target,
        renamed,
        moved,
        lambda root: (root / "sub/file").chmod(0o600),
        lambda root: (root / "sub").chmod(0o700),
        lambda root: (root / "empty").mkdir(),
        lambda root: os.setxattr(root / "sub/file", "user.note", b"x"),
    ],
)
def test_every_change_changes_the_digest(tmp_path: Path, change: Callable[[Path], object]) -> None:
    fill(tmp_path / "a")
    before = tree_digest(tmp_path / "a")
    try:
        change(tmp_path / "a")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    keep_times(tmp_path / "a")
    assert tree_digest(tmp_path / "a") != before


def test_a_time_changes_the_digest(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    before = tree_digest(tmp_path / "a")
    os.utime(tmp_path / "a/link", ns=(WHEN, WHEN + 1), follow_symlinks=False)
    assert tree_digest(tmp_path / "a") != before


def test_a_fifo_is_no_file(tmp_path: Path) -> None:
    digests = set()
    for make in (os.mkfifo, Path.touch):
        place = tmp_path / make.__name__
        place.mkdir()
        make(place / "entry")
        for path in (place / "entry", place):
            path.chmod(0o700)
            os.utime(path, ns=(WHEN, WHEN))
        digests.add(tree_digest(place))
    assert len(digests) == 2


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a").startswith("sha256:ba7816bf8f01cfea414140de5dae2223")
