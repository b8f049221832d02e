"""Copies and unions of what real overlays wrote: mounted again as lower layers, they show the very same files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from dsec.errors import TooLarge, Unsupported
from dsec.images.attended import threaded
from dsec.images.attributes import OPAQUE
from dsec.images.layer_copy import copy_layer, merge_layers
from dsec.images.layer_store import LayerStore
from dsec.images.limits import LATEST
from dsec.images.system import make_erofs, require_builder
from dsec.images.tree import has_attributes, tree_digest
from dsec.stores.mounts import mount_detached, mount_image

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(300)]
ENTRY = "00000000-0000-0000-0000-000000000001"
NAMES = ("a", "b", "c d", "e\nf", "ü", "\udcff")
# rwx for the owner, r-- for 1000, r-x for the group, r-- for others; mask r-x
ACCESS_LIST = struct.pack(
    "<I" + "HHI" * 5, 2, 1, 7, 2**32 - 1, 2, 4, 1000, 4, 5, 2**32 - 1, 16, 5, 2**32 - 1, 32, 4, 2**32 - 1
)
View = dict[str, tuple[object, ...]]


@contextmanager
def overlay(lowers: Sequence[Path], upper: Path | None = None) -> Iterator[Path]:
    """Topmost first. Mounted as the spawner does, but for ids."""
    opened = [os.open(path, os.O_PATH) for path in lowers]  # an option of a mount is a short text
    short = (f"/proc/self/fd/{descriptor}" for descriptor in opened)
    options: dict[str, str | None] = {"lowerdir": ":".join(short), "uuid": "off"}
    if upper is not None:
        work = upper.with_name(f"{upper.name}.work")
        work.mkdir(exist_ok=True)
        options |= {"upperdir": str(upper), "workdir": str(work)}
    try:
        descriptor = mount_detached("overlay", "test", options, 0)
    finally:
        for each in opened:
            os.close(each)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextmanager
def image(tree: Path) -> Iterator[Path]:
    """That tree as an EROFS image, mounted."""
    file = tree.with_name(f"{tree.name}.erofs")
    make_erofs(require_builder(), tree, file, ENTRY, attributes=has_attributes(tree))
    descriptor = mount_image(file)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
        file.unlink()


def view(root: Path, *, links: bool = True) -> View:
    """Everything that can be seen; ``links``: also which names are one file."""
    seen: View = {}
    groups: dict[tuple[int, int], str] = {}
    pending = [""]
    while pending:
        relative = pending.pop()
        path = os.path.join(root, relative) if relative else f"{root}/."
        info = os.lstat(path)
        kind = stat.S_IFMT(info.st_mode)
        content: object = b""
        if kind == stat.S_IFDIR:
            names = sorted(os.listdir(path))
            content = tuple(names)
            pending.extend(os.path.join(relative, name) for name in names)
        elif kind == stat.S_IFREG:
            content = Path(path).read_bytes()
        elif kind == stat.S_IFLNK:
            content = os.readlink(path)
        own = {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in os.listxattr(path, follow_symlinks=False)
        }
        first = groups.setdefault((info.st_dev, info.st_ino), relative) if links else ""
        seen[relative] = (
            *(kind, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns),
            *(content, tuple(sorted(own.items())), first if kind != stat.S_IFDIR else ""),
        )
    return seen


def fill_base(tree: Path, chance: random.Random) -> None:
    """Three levels of everything."""
    tree.mkdir()
    for path in places(tree):
        if chance.random() < 0.6 and path.parent.is_dir() and not path.parent.is_symlink():
            make(path, chance)


def places(root: Path) -> list[Path]:
    """Where a thing may be: few enough that operations meet one another."""
    one = [root / name for name in NAMES[:4]]
    two = [path / name for path in one for name in NAMES[3:]]
    three = [path / name for path in two[:6] for name in NAMES[:2]]
    return [*one, *two, *three]


def make(path: Path, chance: random.Random) -> None:
    """Something new at a place where nothing is."""
    if os.path.lexists(path):
        return
    kind = chance.choice(("file", "file", "directory", "directory", "symlink", "fifo", "socket", "sparse"))
    if kind == "file":
        path.write_bytes(chance.randbytes(chance.choice((0, 10, 5000))))
    elif kind == "sparse":
        path.write_bytes(b"begin")
        os.truncate(path, 300_000)
    elif kind == "directory":
        path.mkdir()
    elif kind == "symlink":
        path.symlink_to(chance.choice(("a", "/etc/passwd", "../..", "nowhere")))
        return
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def replace(path: Path, chance: random.Random) -> None:
    remove(path)
    make(path, chance)


def set_time(path: Path, chance: random.Random) -> None:
    when = chance.choice((0, 10**18 + 1, 2 * 10**18 + 999_999_999))
    os.utime(path, ns=(when, when), follow_symlinks=False)


def set_owner(path: Path, chance: random.Random) -> None:
    os.chown(path, chance.choice((0, 1000, 65535)), chance.choice((0, 1000)), follow_symlinks=False)


def set_mode(path: Path, chance: random.Random) -> None:
    os.chmod(path, chance.choice((0o600, 0o755, 0o4755, 0o1777, 0)))


def mark(path: Path, chance: random.Random) -> None:
    name = chance.choice(("user.one", "user.overlay.opaque"))
    os.setxattr(path, name, chance.randbytes(9), follow_symlinks=False)


def rename(path: Path, chance: random.Random) -> None:
    path.rename(elsewhere(path, chance))


def link(path: Path, chance: random.Random) -> None:
    os.link(path, elsewhere(path, chance), follow_symlinks=False)


def elsewhere(path: Path, chance: random.Random) -> Path:
    return chance.choice(places(Path(*path.parts[:5])))  # of the same overlay: /proc/self/fd/N


STEPS: Sequence[Callable[[Path, random.Random], None]] = (
    *(make, make, replace, rename, rename, link),
    *(lambda path, _: remove(path), set_time, set_owner, set_mode, mark),
)


def step(root: Path, chance: random.Random) -> None:
    """One thing that a program may do; what the kernel refuses is not done."""
    path = chance.choice(places(root))
    # There may be nothing, or too much; EXDEV: rename(2) of a directory of a lower layer.
    with suppress(OSError):
        chance.choice(STEPS)(path, chance)


def run(chance: random.Random, lowers: Sequence[Path], upper: Path, steps: int) -> View:
    """Random work in an overlay, and what it shows at the end, mounted anew."""
    upper.mkdir()
    with overlay(lowers, upper) as root:
        for _ in range(steps):
            step(root, chance)
    with overlay((upper, *lowers)) as root:
        return view(root)


@pytest.mark.parametrize("seed", range(30))
def test_a_copy_lies_over_the_same_layers_and_shows_the_same(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    base, upper, copy = tmp_path / "base", tmp_path / "upper", tmp_path / "copy"
    fill_base(base, chance)
    wanted = run(chance, (base,), upper, 90)
    copy.mkdir()
    copy_layer(upper, copy)
    with overlay((copy, base)) as root:
        assert view(root) == wanted
    with image(copy) as mounted:
        assert view(mounted) == view(copy)
        with overlay((mounted, base)) as root:
            assert view(root) == wanted


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_of_copies_is_merged_to_one_layer(tmp_path: Path, seed: int) -> None:
    chance = random.Random(1000 + seed)
    base, merged = tmp_path / "base", tmp_path / "merged"
    fill_base(base, chance)
    layers: list[Path] = []
    wanted: View = {}
    for number in range(4):
        upper, copy = tmp_path / f"upper{number}", tmp_path / f"copy{number}"
        wanted = run(chance, (*reversed(layers), base), upper, 60)
        copy.mkdir()
        copy_layer(upper, copy)
        layers.append(copy)
    with overlay((*reversed(layers), base)) as root:
        assert view(root) == wanted
    merged.mkdir()
    merge_layers(layers, merged, below=[base])
    with overlay((merged, base)) as root:
        # A name of a file of several names that an upper layer replaced: the others are one file still.
        assert view(root) == wanted
    with image(merged) as mounted, overlay((mounted, base)) as root:
        assert view(root) == wanted
    assert_compact(merged, base)


def assert_compact(tree: Path, below: Path) -> None:
    """Nothing is hidden that is not there, or twice."""
    for path in tree.rglob("*"):
        hidden = below / path.relative_to(tree)
        if stat.S_ISCHR(path.lstat().st_mode) or (not path.is_symlink() and OPAQUE in os.listxattr(path)):
            assert os.path.lexists(hidden)


def test_merging_parts_of_a_chain_changes_nothing(tmp_path: Path) -> None:
    chance = random.Random(7)
    base = tmp_path / "base"
    fill_base(base, chance)
    layers: list[Path] = []
    wanted: View = {}
    for number in range(6):
        upper, copy = tmp_path / f"upper{number}", tmp_path / f"copy{number}"
        wanted = run(chance, (*reversed(layers), base), upper, 60)
        copy.mkdir()
        copy_layer(upper, copy)
        layers.append(copy)
    for cut in range(1, 6):
        low, high = tmp_path / f"low{cut}", tmp_path / f"high{cut}"
        low.mkdir()
        high.mkdir()
        merge_layers(layers[:cut], low, below=[base])
        merge_layers(layers[cut:], high, below=[base, low])
        with overlay((high, low, base)) as root:
            assert view(root) == wanted
        both = tmp_path / f"both{cut}"
        both.mkdir()
        merge_layers([low, high], both, below=[base])
        with overlay((both, base)) as root:
            assert view(root) == wanted


def test_a_copy_without_its_markers_would_show_more(tmp_path: Path) -> None:
    """Positive control: the comparison sees what a copy that ignores overlays gets wrong."""
    base, upper, copy = tmp_path / "base", tmp_path / "upper", tmp_path / "copy"
    for name in ("kept/old", "gone"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(b"")
    upper.mkdir()
    with overlay((base,), upper) as root:
        (root / "gone").unlink()
        shutil.rmtree(root / "kept")
        (root / "kept").mkdir()
    with overlay((upper, base)) as root:
        wanted = view(root)
    copy.mkdir()
    (copy / "kept").mkdir()
    with overlay((copy, base)) as root:
        assert {"gone", "kept/old"} <= view(root).keys() - wanted.keys()


def tree_of(*paths: str, under: Path) -> Path:
    """Files at those paths; a path that ends in "/" is a directory."""
    for path in paths:
        place = under / path
        (place if path.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            place.write_bytes(path.encode())
    return under


def merged_of(base: Path, top: Path, *works: Callable[[Path], None]) -> tuple[Path, View]:
    """The union of copies of what each did in an overlay over those before, and what is seen in the end."""
    layers: list[Path] = []
    wanted: View = {}
    for number, work in enumerate(works):
        upper, copy = top / f"u{number}", top / f"c{number}"
        upper.mkdir()
        copy.mkdir()
        with overlay((*reversed(layers), base), upper) as root:
            work(root)
        with overlay((upper, *reversed(layers), base)) as root:
            wanted = view(root)
        copy_layer(upper, copy)
        layers.append(copy)
    merged = top / "merged"
    merged.mkdir()
    merge_layers(layers, merged, below=[base])
    with overlay((merged, base)) as root:
        assert view(root) == wanted
    return merged, wanted


def test_what_is_made_and_taken_away_again_leaves_nothing(tmp_path: Path) -> None:
    def begin(root: Path) -> None:
        tree_of("new/deep/file", "new/kept", under=root)

    def end(root: Path) -> None:
        (root / "new/deep/file").unlink()

    merged, wanted = merged_of(tree_of("old", under=tmp_path / "base"), tmp_path, begin, end)
    assert "new/deep/file" not in wanted
    assert not os.path.lexists(merged / "new/deep/file"), "nothing lies below: there is nothing to hide"


def test_a_directory_in_the_place_of_a_file_that_was_one_before(tmp_path: Path) -> None:
    def to_file(root: Path) -> None:
        shutil.rmtree(root / "place")
        (root / "place").write_bytes(b"file")

    def to_directory(root: Path) -> None:
        (root / "place").unlink()
        tree_of("place/new", under=root)

    def again(root: Path) -> None:
        tree_of("place/later", under=root)

    base = tree_of("place/old", under=tmp_path / "base")
    merged, wanted = merged_of(base, tmp_path, to_file, to_directory, again)
    assert {"place/new", "place/later"} == {path for path in wanted if path.startswith("place/")}
    assert os.getxattr(merged / "place", OPAQUE) == b"y"


def test_latest_dates_and_only_those(tmp_path: Path) -> None:
    source, copy = tree_of("early", "late", "folder/", under=tmp_path / "source"), tmp_path / "copy"
    for name, when in (("early", 5), ("late", 2 * 10**18), ("folder", 2 * 10**18)):
        os.utime(source / name, ns=(when, when))
    (source / "link").symlink_to("late")
    copy.mkdir()
    copy_layer(source, copy, latest=10**18)
    seen = {path.name: path.lstat().st_mtime_ns for path in (*copy.iterdir(), copy)}
    assert seen == {"early": 5, **dict.fromkeys(("late", "folder", "link", "copy"), 10**18)}
    for odd, kept in ((-1, 0), (2**34 * 10**9, LATEST)):
        os.utime(source / "early", ns=(odd, odd))
        again = tmp_path / f"again{odd}"
        again.mkdir()
        copy_layer(source, again)
        assert (again / "early").stat().st_mtime_ns == kept


def test_two_copies_at_different_times_are_one_layer(tmp_path: Path) -> None:
    """As long as what was done is the same: so that setting up twice gives one image."""
    digests = set()
    for number in range(2):
        upper, copy = tmp_path / f"u{number}", tmp_path / f"c{number}"
        upper.mkdir()
        copy.mkdir()
        with overlay((tree_of("gone", "seen/file", under=tmp_path / "base"),), upper) as root:
            (root / "gone").unlink()
            (root / "seen/file").write_bytes(b"new")
            shutil.rmtree(root / "seen")
            tree_of("seen/other", under=root)
        copy_layer(upper, copy, latest=10**18)
        digests.add(tree_digest(copy))
    assert len(digests) == 1


def test_holes_stay_holes_and_count(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    with (source / "sparse").open("wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"middle")
    copy_layer(source, copy)
    assert (copy / "sparse").read_bytes() == (source / "sparse").read_bytes()
    assert (copy / "sparse").stat().st_blocks * 512 < 1 << 20
    (tmp_path / "more").mkdir()
    with pytest.raises(TooLarge):
        copy_layer(source, tmp_path / "more", max_bytes=(64 << 20) - 1)


def test_what_is_too_much_is_refused(tmp_path: Path) -> None:
    source = tree_of(*(f"f{number}" for number in range(10)), under=tmp_path / "source")
    with pytest.raises(TooLarge, match="entries"):
        copy_layer(source, tree_of("few/", under=tmp_path) / "few", max_entries=9)
    with pytest.raises(TooLarge, match="entries"):
        merge_layers([source, source], tree_of("two/", under=tmp_path) / "two", below=[], max_entries=19)
    deep = tree_of("d/" * 201, under=tmp_path / "deep")
    with pytest.raises(TooLarge, match="deep"):
        copy_layer(deep, tree_of("d/", under=tmp_path) / "d")
    long = tmp_path / "long"
    long.mkdir()
    at = os.open(long, os.O_RDONLY)
    for _ in range(20):  # a path longer than the kernel takes
        os.mkdir("n" * 250, dir_fd=at)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(TooLarge, match="path"):
        copy_layer(long, tree_of("l/", under=tmp_path) / "l")
    subprocess.run(["rm", "-rf", str(long)], check=True)  # pytest's own removal goes by paths


def test_attributes_are_kept_dropped_or_refused(tmp_path: Path) -> None:
    source, copy = tree_of("file", "d/", under=tmp_path / "source"), tmp_path / "copy"
    os.setxattr(source / "file", "user.mine", b"\0\xff")
    os.setxattr(source / "file", "security.capability", bytes.fromhex("0100000200040000" + "00" * 12))
    os.setxattr(source / "d", "trusted.overlay.origin", b"handle")
    os.setxattr(source / "d", "system.posix_acl_access", ACCESS_LIST)
    os.setxattr(source / "d", "system.posix_acl_default", ACCESS_LIST)
    copy.mkdir()
    copy_layer(source, copy)
    assert os.listxattr(copy / "file") == ["user.mine"]
    assert os.getxattr(copy / "file", "user.mine") == b"\0\xff"
    assert sorted(os.listxattr(copy / "d")) == ["system.posix_acl_access", "system.posix_acl_default"]
    assert os.getxattr(copy / "d", "system.posix_acl_access") == ACCESS_LIST
    assert (copy / "d").stat().st_mode == (source / "d").stat().st_mode
    for name in ("trusted.overlay.redirect", "trusted.overlay.metacopy", "trusted.other"):
        os.setxattr(source / "d", name, b"/file")
        with pytest.raises(Unsupported, match=name):
            copy_layer(source, tree_of(f"{name}/", under=tmp_path) / name)
        os.removexattr(source / "d", name)
    os.setxattr(source / "d", OPAQUE, b"x")
    with pytest.raises(Unsupported):
        copy_layer(source, tree_of("x/", under=tmp_path) / "x")


def test_devices_and_strange_owners_are_refused(tmp_path: Path) -> None:
    for number, device in enumerate((os.makedev(1, 3), os.makedev(0, 1))):
        source = tree_of(f"{number}/s/", f"{number}/t/", under=tmp_path) / str(number)
        os.mknod(source / "s/null", stat.S_IFCHR | 0o666, device)
        with pytest.raises(Unsupported, match="device"):
            copy_layer(source / "s", source / "t")
        with pytest.raises(OSError, match="device"):
            tree_digest(source / "s")
    source = tree_of("o/s/file", "o/t/", under=tmp_path) / "o"
    os.chown(source / "s/file", 65536, 0)
    with pytest.raises(Unsupported, match="65536"):
        copy_layer(source / "s", source / "t")


def test_links_lead_nowhere(tmp_path: Path) -> None:
    secret = tree_of("secret/file", under=tmp_path) / "secret"
    source, copy = tree_of("d/", under=tmp_path / "source"), tmp_path / "copy"
    (source / "dir").symlink_to(secret)
    (source / "d/file").symlink_to(secret / "file")
    copy.mkdir()
    copy_layer(source, copy)
    assert (copy / "dir").readlink() == secret
    assert (copy / "d/file").readlink() == secret / "file"
    assert sorted(os.listdir(copy)) == ["d", "dir"]


def test_more_names_than_a_file_may_have_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, copy = tree_of("a", under=tmp_path / "source"), tmp_path / "copy"
    for name in ("b", "c", "d", "e"):
        os.link(source / "a", source / name)
    copy.mkdir()
    link = os.link

    def limited(old: str, new: str, **where: Any) -> None:
        if os.stat(old, dir_fd=where["src_dir_fd"]).st_nlink == 2:
            raise OSError(errno.EMLINK, "too many")
        link(old, new, **where)

    monkeypatch.setattr(os, "link", limited)
    copy_layer(source, copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == dict.fromkeys("abcde", b"a")
    assert sorted(path.stat().st_nlink for path in copy.iterdir()) == [1, 2, 2, 2, 2]


def test_nobody_wants_it_any_more(tmp_path: Path) -> None:
    source = tree_of(*(f"f{number}" for number in range(50)), under=tmp_path / "source")
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        copy_layer(source, tree_of("c/", under=tmp_path) / "c", check=check)


def test_the_digest_tells_whiteouts_fifos_and_sockets_apart(tmp_path: Path) -> None:
    digests = set()
    for kind in ("whiteout", "fifo", "socket", "file", "opaque", "directory"):
        tree = tree_of(f"{kind}/", under=tmp_path) / kind
        place = tree / "entry"
        if kind in ("opaque", "directory"):
            place.mkdir()
            if kind == "opaque":
                os.setxattr(place, OPAQUE, b"y")
        else:
            modes = {
                "whiteout": stat.S_IFCHR,
                "fifo": stat.S_IFIFO,
                "socket": stat.S_IFSOCK,
                "file": stat.S_IFREG,
            }
            os.mknod(place, modes[kind], os.makedev(0, 0))
        for path in (place, tree):
            path.chmod(0o755)
            os.utime(path, (0, 0))
        digests.add(tree_digest(tree))
    assert len(digests) == 6


def test_the_store_keeps_both_kinds_of_layers(tmp_path: Path) -> None:
    base = tree_of("gone", "kept", "hidden/old", under=tmp_path / "base")
    upper, copy = tmp_path / "upper", tmp_path / "again"
    upper.mkdir()
    with overlay((base,), upper) as root:
        (root / "gone").unlink()
        shutil.rmtree(root / "hidden")
        tree_of("hidden/new", under=root)
        os.setxattr(root / "kept", "user.a", b"b")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(root / "socket"))
    with overlay((upper, base)) as root:
        wanted = view(root)
    store = LayerStore(tmp_path / "store")
    copied = anyio.run(store.keep, "copied", threaded(lambda tree, _: copy_layer(upper, tree)))
    descriptor = mount_image(copied.path)
    try:
        mounted = Path(f"/proc/self/fd/{descriptor}")
        merged = anyio.run(
            store.keep, "merged", threaded(lambda tree, _: merge_layers([mounted], tree, below=[base]))
        )
        with overlay((mounted, base)) as root:
            assert view(root) == wanted
    finally:
        os.close(descriptor)
    assert merged.digest == copied.digest
    copy.mkdir()
    copy_layer(upper, copy)
    assert tree_digest(copy) == copied.digest
    assert not list((tmp_path / "store/building").iterdir())


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A file system that has a place for many attributes."""
    place = tmp_path / "memory"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "test", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(("count", "size"), [(300, 4), (1500, 10), (3, 16_000)])
def test_many_attributes_of_many_files(memory: Path, count: int, size: int) -> None:
    """Alike on all of them: an image in which more than 255 of a file were shared could not be read."""
    source, copy = tree_of(*(f"f{number}" for number in range(4)), under=memory / "source"), memory / "copy"
    for path in source.iterdir():
        for number in range(count):
            os.setxattr(path, f"user.a{number}", (b"%d" % number).ljust(size, b"v"))
    copy.mkdir()
    copy_layer(source, copy)
    with image(copy) as mounted:
        assert view(mounted) == view(source)
    for number in range(count, count + 8):
        os.setxattr(source / "f0", f"user.a{number}", bytes(10_000))
    with pytest.raises(TooLarge, match="attributes"):
        copy_layer(source, tree_of("more/", under=memory) / "more")
