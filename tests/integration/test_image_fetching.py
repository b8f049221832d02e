"""Fetching from registries: what is cut off goes on, what is torn is fetched again, what must be signed is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

from dsec.errors import BadRequest, Denied, Unsupported
from dsec.images.blobs import BlobCache
from dsec.images.gc import collect
from dsec.images.store import ImageStore
from dsec.images.tree import file_digest
from dsec.model.images import Step
from dsec.ports.storage import Image
from dsec.testing import images as make
from dsec.testing.images import directory, file, layer
from dsec.testing.registries import Registry, SmallRegistry, docker_registry, small_registry

pytestmark = [pytest.mark.needs_root]

BUILDER = """
import anyio, sys
from pathlib import Path
from dsec.images.store import ImageStore
anyio.run(ImageStore(Path(sys.argv[1]), bases=Path(sys.argv[1] + ".toml")).get, sys.argv[2])
"""
BIG = 40_000_000


@pytest.fixture(params=[small_registry, docker_registry])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    with request.param(tmp_path) as found:
        yield found


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def layout_of(path: Path, size: int = 1000) -> tuple[Path, list[str]]:
    """A small layer and another one; the digests of both."""
    layers = [layer(directory("etc"), file("etc/motd", b"hello\n")), layer(file("big", os.urandom(size)))]
    layout = make.write_layout(path, layers)
    index = json.loads((layout / "index.json").read_text())
    manifest = json.loads(blob(layout, index["manifests"][0]["digest"]).read_text())
    return layout, [each["digest"] for each in manifest["layers"]]


def blob(root: Path, digest: str) -> Path:
    directory = root / "blobs/sha256" if (root / "blobs/sha256").exists() else root / "sha256"
    return directory / digest.removeprefix("sha256:")


def get(store: Path, name: str, **more: object) -> Image:
    return anyio.run(ImageStore(store, bases=store.with_suffix(".toml"), **more).get, name)  # type: ignore[arg-type]


def test_a_fetch_that_was_killed_goes_on(tmp_path: Path, registry: Registry) -> None:
    layout, (small, big) = layout_of(tmp_path / "layout", BIG)
    registry.push(layout, "v1")
    if isinstance(registry, SmallRegistry):
        registry.stalled = big
    store, name = tmp_path / "store", f"docker://{registry.address}/team/example:v1"
    kept = store / "blobs/sha256"
    before = registry.asked()
    with subprocess.Popen([sys.executable, "-c", BUILDER, os.fspath(store), name]) as process:
        until(lambda: (kept / small[7:]).exists() and registry.asked()[big] > before[big])
        process.kill()
    assert not (kept / big[7:]).exists()  # control: it was in the middle
    if isinstance(registry, SmallRegistry):
        registry.going.set()
    image = get(store, name)
    assert image.digest == get(tmp_path / "other-store", f"oci:{layout}").digest
    asked = registry.asked() - before
    assert (asked[small], asked[big]) == (1, 2)
    assert list(kept.iterdir()) == []  # it is stored: its blobs are not needed any more
    assert os.listdir(store / "building") == []


def test_a_torn_blob_is_fetched_again(tmp_path: Path, registry: Registry) -> None:
    layout, (small, big) = layout_of(tmp_path / "layout")
    registry.push(layout, "v1")
    before = registry.asked()
    store, name = tmp_path / "store", f"docker://{registry.address}/team/example:v1"
    kept = store / "blobs/sha256"
    kept.mkdir(parents=True)
    shutil.copy(blob(layout, small), kept / small[7:])
    (kept / big[7:]).write_bytes(blob(layout, big).read_bytes()[:-1] + b"x")
    assert get(store, name).digest == get(tmp_path / "other-store", f"oci:{layout}").digest
    asked = registry.asked() - before
    assert (asked[small], asked[big]) == (0, 1)


@pytest.mark.parametrize("what", ["link", "directory", "fifo"])
def test_what_is_no_blob_is_none(tmp_path: Path, what: str) -> None:
    cache, digest = BlobCache(tmp_path), "sha256:" + "a" * 64
    with cache.fetching():
        path = blob(tmp_path, digest)
        match what:
            case "link":
                path.symlink_to("/etc/passwd")
            case "directory":
                path.mkdir()
            case _:
                os.mkfifo(path)
        cache.settle([digest])
    assert not os.path.lexists(path)


def test_blobs_are_bounded_and_go(tmp_path: Path) -> None:
    store = tmp_path / "store"
    cache = BlobCache(store / "blobs")
    now = time.time()
    with cache.fetching():
        for age, name in enumerate("abcd"):
            path = store / "blobs/sha256" / (name * 64)
            path.write_bytes(b"x" * 1000)
            os.utime(path, (now - age * 100, now - age * 100))
        assert cache.prune(keep_bytes=0) == ()  # somebody fetches
        cache.drop(["sha256:" + "a" * 64])
    assert cache.size(["sha256:" + each * 64 for each in "abcd"]) == 4000
    assert [path.name[0] for path in cache.prune(keep_bytes=3000)] == ["d"]
    assert [path.name[0] for path in cache.prune(keep_seconds=150)] == ["c"]
    cache.drop(["sha256:" + "a" * 64])
    (old,) = (store / "blobs/sha256").iterdir()
    os.utime(old, (0, 0))
    assert collect(store) == (old,)


def test_bytes_are_told_while_they_arrive(tmp_path: Path) -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    steps: list[Step] = []
    with small_registry(tmp_path) as registry:
        layout, _ = layout_of(tmp_path / "layout", 100_000)
        registry.push(layout, "v1")
        get(tmp_path / "store", f"docker://{registry.address}/team/example:v1", progress=steps.append)
    told = [step for step in steps if step.unit == "bytes"]
    assert told[-1].done == told[-1].total > 100_000
    assert steps[-1].over


COSIGN = """#!/bin/sh
echo "$@" >>{place}/said
for name in "$@"; do :; done
digest=${{name##*@}}
[ -e {place}/refuse ] && {{ echo "no matching signatures" >&2; exit 1; }}
[ -e {place}/other ] && digest=sha256:{zeros}
echo '[{{"critical": {{"image": {{"docker-manifest-digest": "'$digest'"}}}}}}]'
"""


@pytest.fixture
def cosign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in, which says yes unless there is a file ``refuse`` beside it, or ``other``: then it speaks of another image."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "cosign").write_text(COSIGN.format(place=place, zeros="0" * 64))
    (place / "cosign").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return place


@pytest.fixture
def signed(tmp_path: Path) -> Iterator[tuple[Path, str, Registry]]:
    """A store whose table asks for signatures, and an image."""
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed")
    with small_registry(tmp_path) as registry:
        layout, _ = layout_of(tmp_path / "layout")
        registry.push(layout, "v1")
        store = tmp_path / "store"
        store.with_suffix(".toml").write_text('[verify]\n"*" = {key = "/etc/team.pub"}\n')
        yield store, f"docker://{registry.address}/team/example:v1", registry


def test_the_digest_that_is_fetched_is_the_one_that_was_verified(
    cosign: Path, signed: tuple[Path, str, Registry]
) -> None:
    store, name, registry = signed
    image = get(store, name)
    said = (cosign / "said").read_text().split()
    manifest = image.sources[-1]
    assert said[0] == "verify"
    assert "--key=/etc/team.pub" in said
    assert said[-1] == f"{registry.address}/team/example@{manifest}"
    assert registry.asked()
    (cosign / "said").unlink()
    assert get(store, name) == image  # stored, and verified under this rule
    assert not (cosign / "said").exists()


@pytest.mark.parametrize("how", ["refuse", "other"])
def test_what_is_not_signed_is_not_fetched(
    cosign: Path, signed: tuple[Path, str, Registry], how: str
) -> None:
    store, name, registry = signed
    (cosign / how).touch()
    with pytest.raises(Denied, match="is not signed") as caught:
        get(store, name)
    assert caught.value.hint
    assert not registry.asked()
    assert os.listdir(store / "names") == os.listdir(store / "images") == os.listdir(store / "building") == []
    (cosign / how).unlink()
    assert get(store, name).digest  # control


def test_a_rule_is_kept_by_what_was_stored_before_it(
    cosign: Path, signed: tuple[Path, str, Registry]
) -> None:
    store, name, _ = signed
    table = store.with_suffix(".toml")
    rules = table.read_text()
    table.unlink()
    assert get(store, name).digest
    assert not (cosign / "said").exists()
    table.write_text(rules)
    (cosign / "refuse").touch()
    with pytest.raises(Denied):
        get(store, name)


def test_without_cosign_nothing_that_must_be_signed_is_fetched(
    signed: tuple[Path, str, Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, name, registry = signed
    monkeypatch.setattr("dsec.images.signatures.find_tool", lambda _: None)
    with pytest.raises(Unsupported, match="cosign") as caught:
        get(store, name)
    assert "install cosign" in caught.value.hint
    assert not registry.asked()


def test_a_wrong_table_fetches_nothing(signed: tuple[Path, str, Registry]) -> None:
    store, name, registry = signed
    store.with_suffix(".toml").write_text('[verify]\n"*" = {keys = "x"}\n')
    with pytest.raises(BadRequest, match="verify"):
        get(store, name)
    assert not registry.asked()


def test_the_digest_of_a_stored_blob_is_that_of_its_bytes(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path)
    with cache.fetching():
        (tmp_path / "x").write_bytes(b"content")
        digest = file_digest(tmp_path / "x")
        (tmp_path / "x").rename(blob(tmp_path, digest))
        cache.settle([digest])
        assert cache.size([digest]) == 7
        assert cache.link(digest, tmp_path / "link")
        assert not cache.link("sha256:" + "b" * 64, tmp_path / "none")
    cache.drop([digest])
    assert (tmp_path / "link").read_bytes() == b"content"
