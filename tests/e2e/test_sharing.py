"""Templates and snapshots as files: the same on another engine with another store, and nothing at all of one that was changed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from dsec import AsyncDsec, Dsec, Settings
from dsec.client.sync import Sandbox
from dsec.control import sharing
from dsec.control.template_store import digest_of
from dsec.errors import BadRequest, Conflict, NotFound, TooLarge
from dsec.images.bundle import MAGIC, SUM_BYTES, Bundle, head
from dsec.images.carrier import Carrier
from dsec.images.gc import collect
from dsec.images.layer_copy import copy_layer
from dsec.images.tools import Check
from dsec.model.built import Built
from dsec.ports.storage import Image
from dsec.stores.layers import BtrfsLayers
from dsec.testing.bundles import forged, manifest_of
from dsec.testing.images import linked_store

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(180)]
DOCUMENT = b"""
version: "1"
name: agent
runtime:
  env: {GREETING: hello}
  workdir: /tmp
resources: {pids: 99}
"""
CHANGES = r"""
set -e
cd /workspace; mkdir -p tree/deep; printf one > tree/file; ln tree/file tree/hard; ln -s file tree/link; chmod 4750 tree/file
printf '\377' > "tree/deep/odd$(printf '\377')"; truncate -s 1M tree/sparse; mkfifo tree/pipe; chown 1000:7 tree/link -h
python3 -c "import os, socket; os.setxattr('tree/file', 'user.a', b'\0b'); socket.socket(socket.AF_UNIX).bind('tree/socket')"
rm -f /etc/hosts; printf changed > /etc/hostname; rm -rf /var/log; mkdir /var/log; touch -d 2001-02-03T04:05:06.789Z tree/deep
rm -rf /srv; printf x > /srv; printf t > /tmp/t; printf h > /home/user/h
"""
FINGERPRINT = (
    r"cd /; { find workspace etc var tmp home root srv -printf '%p %y %m %U %G %s %T@ %n %l\n' | sort;"
    r" find workspace etc var tmp home root srv -type f -print0 | sort -z | xargs -0 sha256sum;"
    r""" python3 -c 'import os; print(os.getxattr("/workspace/tree/file", "user.a"))'; }"""
)


def settings(store: Path, home: Path | None = None) -> Settings:
    return Settings(images=store, home=home, pool=0, pool_bytes=1 << 30)


@pytest.fixture(scope="module")
def one(image_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_store(image_store, tmp_path_factory.mktemp("one") / "store")


@pytest.fixture(scope="module")
def built(one: Path) -> Built:
    with Dsec(settings=settings(one)) as dsec:
        dsec.templates.build(DOCUMENT)
        with dsec.sandboxes.create("agent") as sandbox:
            assert sandbox.exec(CHANGES, user="root").ok
            return dsec.templates.promote(sandbox.snapshot(), "agent", tag="grown")


@pytest.fixture(scope="module")
def agent(one: Path, built: Built) -> Path:
    """The template, exported."""
    file = one.with_name("agent.dsec")
    with Dsec(settings=settings(one)) as dsec:
        dsec.templates.export(built.reference, file)
    return file


def fingerprint(sandbox: Sandbox) -> str:
    done = sandbox.exec(FINGERPRINT, user="root", timeout=60)
    assert done.ok, done.stderr
    return done.text


def files(store: Path) -> set[str]:
    """What a store holds, but for locks and the times of last use."""
    found = (path.relative_to(store) for path in store.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] not in ("lock", "locks") and path.suffix != ".used"}


def test_a_template_runs_the_same_where_it_was_imported(
    one: Path, built: Built, agent: Path, tmp_path: Path
) -> None:
    again, two = tmp_path / "again.dsec", tmp_path / "two"
    with Dsec(settings=settings(one)) as dsec, dsec.sandboxes.create("agent:grown") as sandbox:
        wanted = fingerprint(sandbox)
    with Dsec(settings=settings(two)) as dsec:
        found = dsec.templates.import_(agent, tag="from-one")
        assert (found.digest, found.layers, found.template) == (built.digest, built.layers, built.template)
        assert [(each.tag, each.digest) for each in dsec.templates.list()] == [("from-one", built.digest)]
        with dsec.sandboxes.create("agent:from-one") as sandbox:
            assert fingerprint(sandbox) == wanted
            assert sandbox.exec("echo $GREETING; pwd").text == "hello\n/tmp\n"
        dsec.templates.export("agent:from-one", again)
        assert agent.read_bytes() == again.read_bytes(), "there and back"
        assert agent.stat().st_mode & 0o777 == 0o600
        before = files(two)
        assert dsec.templates.import_(agent, tag="from-one").digest == built.digest
        assert files(two) == before
    collect(two, budget=0, grace=0)
    assert len(list((two / "images").glob("*.erofs"))) == 2, "what a template stands on is kept"
    with Dsec(settings=settings(two)) as dsec:
        dsec.templates.remove("agent:from-one")
    collect(two, budget=0, grace=0)
    assert not list((two / "images").iterdir())
    assert not list((two / "building").iterdir())


def lies(built: Built) -> Iterator[tuple[str, dict[str, object]]]:
    """Facts of a template that are not true."""
    zero = f"sha256:{'0' * 64}"
    yield "another digest", {"digest": zero}
    yield "another layer", {"layers": [zero]}
    yield "layers that are no list", {"layers": "abc"}
    yield "no layers, its digest as it was", {"layers": []}
    yield "another lock", {"lock": zero}
    yield "no template", {"template": {"name": "agent"}}
    yield "a name that is none", {"template": {"name": "../../etc", "version": "1"}}
    yield "a layer twice", {"layers": [built.layers[0], built.layers[0]]}
    yield "the base as a layer", {"layers": [built.base_digest]}
    yield "words as a lock", {"lock": "\ud800"}
    yield "words as packages", {"packages": ["one", "\x1b[31m=="]}
    yield "a path as digest", {"base_digest": "sha256:../../../etc/passwd"}


def test_lies_about_a_template_are_refused_and_leave_nothing(
    built: Built, agent: Path, image_store: Path, tmp_path: Path
) -> None:
    lie, two = tmp_path / "lie.dsec", linked_store(image_store, tmp_path / "two")
    before = files(two)
    data = agent.read_bytes()
    with Dsec(settings=settings(two)) as dsec:
        with pytest.raises(NotFound):
            dsec.templates.import_(tmp_path / "nosuch")
        for what, facts in lies(built):
            lie.write_bytes(forged(data, facts))
            with pytest.raises(BadRequest):
                dsec.templates.import_(lie)
            assert dsec.templates.list() == (), what
        lie.write_bytes(forged(data, {"layers": [f"sha256:{number:064x}" for number in range(5000)]}))
        with pytest.raises(TooLarge):
            dsec.templates.import_(lie)
        lie.write_bytes(data[:-1000])
        with pytest.raises(BadRequest):
            dsec.templates.import_(lie)
        with pytest.raises(BadRequest, match="agent:"):
            dsec.templates.import_(agent, tag="../x")
        assert files(two) == before, "nothing was let in"
        mine = dsec.templates.build(b"name: agent\nversion: mine\n")
        with pytest.raises(Conflict, match="agent:latest"):
            dsec.templates.import_(agent)
        assert dsec.templates.get("agent").digest == mine.digest
        dsec.templates.remove("agent")
        # Positive control, made by the same hand. What no digest covers, and what nobody knows yet, says nothing here.
        lie.write_bytes(forged(data, {"base": "docker://trusted.example/x", "unenforced": [], "later": 1}))
        found = dsec.templates.import_(lie)
        assert found.digest == built.digest
        assert found.base == built.template.runtime.base
        assert {note.field for note in found.unenforced} == {note.field for note in built.unenforced}


def test_a_snapshot_goes_to_another_engine(one: Path, built: Built, tmp_path: Path) -> None:
    file, two, home = tmp_path / "work.dsec", tmp_path / "two", tmp_path / "home"
    with Dsec(settings=settings(one)) as dsec:
        with dsec.sandboxes.create("agent:grown", env={"B": "c"}, labels={"mine": "yes"}) as sandbox:
            assert sandbox.exec(
                "rm -rf tree/deep; echo more > more; rm /etc/hostname", user="root", cwd="/workspace"
            ).ok
            snapshot = sandbox.snapshot()
            wanted = fingerprint(sandbox)
        dsec.snapshots.export(snapshot, file)
        back = dsec.snapshots.import_(file)
        assert back.id != snapshot.id
        with dsec.sandboxes.create(back) as again:
            assert fingerprint(again) == wanted
    with Dsec(home=home, settings=settings(two)) as dsec:
        taken = dsec.snapshots.import_(file)
        assert [each.id for each in dsec.snapshots.list()] == [taken.id]
        assert taken.spec.layers == snapshot.spec.layers
        assert dict(taken.spec.labels) == {"mine": "yes"}
        with dsec.sandboxes.create(taken) as again:
            assert fingerprint(again) == wanted
            assert again.exec("echo $GREETING $B").text == "hello c\n"
            assert again.exec("touch /workspace/new && rm -rf /workspace/tree", user="root").ok
    collect(two, budget=0, grace=0)  # what a snapshot stands on is held for the engine that has it
    with Dsec(home=home, settings=settings(two)) as dsec:
        (kept,) = dsec.snapshots.list()
        assert kept == taken
        with dsec.sandboxes.create(kept) as again:
            assert fingerprint(again) == wanted
        dsec.snapshots.remove(kept.id)
    assert not list((two / "building").iterdir())


def test_what_is_no_snapshot_leaves_none(one: Path, built: Built, tmp_path: Path) -> None:
    file, lie = tmp_path / "work.dsec", tmp_path / "lie.dsec"
    with Dsec(settings=settings(one)) as dsec:
        with dsec.sandboxes.create("agent") as sandbox:
            sandbox.exec("echo x > y")
            dsec.snapshots.export(sandbox.snapshot(), file)
        data, count = file.read_bytes(), len(dsec.snapshots.list())
        spec = manifest_of(data)["about"]["spec"]
        zero = f"sha256:{'0' * 64}"
        for wrong in (
            {"kind": "memory"},
            {"changes": zero},
            {"changes": "/etc"},
            {"spec": {}},
            {"spec": "{}"},
            {"spec": {**spec, "labels": {"a": 7}}},
            {"spec": {**spec, "env": {"a": 7}}},
            {"spec": {**spec, "limits": []}},
            {"spec": {**spec, "base_digest": ""}},
            {"spec": {**spec, "layers": [zero]}},
            {"spec": {**spec, "user": "x" * 10_000}},
            {"spec": {**spec, "limits": {"pids": -1}}},
            {"spec": {**spec, "level": "none"}},
            {"spec": {**spec, "level": "process"}},
            {"spec": {**spec, "user": "nosuch"}},
        ):
            lie.write_bytes(forged(data, wrong))
            with pytest.raises(BadRequest):
                dsec.snapshots.import_(lie)
        with pytest.raises(BadRequest, match="template"):
            dsec.templates.import_(file)
        lie.write_text("name: agent\n")
        with pytest.raises(BadRequest, match="no exported snapshot") as caught:
            dsec.snapshots.import_(lie)
        assert "harm" not in caught.value.hint
        assert len(dsec.snapshots.list()) == count
        lie.write_bytes(
            forged(
                data,
                {
                    "more": "that a newer release says",
                    "spec": {
                        **spec,
                        "volumes": [["/etc", "/mnt", False]],
                        "labels": {"dsec.fork-of": "x"},
                        "limits": {**spec["limits"], "more": 1},
                        "ttl": 1,
                    },
                },
            )
        )
        taken = dsec.snapshots.import_(lie)
        assert (taken.spec.volumes, dict(taken.spec.labels), taken.spec.ttl) == ((), {}, 0)


def test_whoever_imports_may_go(
    one: Path, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What he brought goes with him: no snapshot is ever of half of it."""
    file, begun, go, done = tmp_path / "work.dsec", threading.Event(), threading.Event(), threading.Event()

    def slow(source: Path, tree: Path, *, check: Check) -> None:
        begun.set()
        try:
            go.wait(60)
            copy_layer(source, tree, check=check)
        finally:
            done.set()

    async def work() -> None:
        async with AsyncDsec(settings=settings(one)) as dsec:
            async with await dsec.sandboxes.create("agent:grown") as sandbox:
                await dsec.snapshots.export(await sandbox.snapshot(), file)
            count = len(await dsec.snapshots.list())
            monkeypatch.setattr(sharing, "copy_layer", slow)
            importing = asyncio.create_task(dsec.snapshots.import_(file))
            await asyncio.to_thread(begun.wait, 60)
            importing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await importing
            go.set()
            await asyncio.to_thread(done.wait, 60)
            await dsec.snapshots.import_(file)
            assert len(await dsec.snapshots.list()) == count + 1
        assert not await asyncio.to_thread(os.listdir, one / "building")

    asyncio.run(work())


# Imports FILE into the engine at HOME with the store IMAGES, and stops for good in the middle of what ARGV[4] names.
VICTIM = """
import sys, time
from dsec import Dsec, Settings
from dsec.control import sharing
from dsec.images import layer_store

what, home, images, file = sys.argv[1:]

def hang(*_, **__):
    print("there", flush=True)
    time.sleep(600)

original = sharing.copy_layer
if what == "snapshot":
    sharing.copy_layer = lambda *given, **named: (original(*given, **named), hang())
else:
    layer_store.make_erofs = hang
from pathlib import Path
with Dsec(home=home, settings=Settings(images=Path(images), pool=0, pool_bytes=1 << 30)) as dsec:
    getattr(dsec, what + "s").import_(file)
"""


def killed(what: str, home: Path, images: Path, file: Path) -> None:
    argv = [sys.executable, "-c", VICTIM, what, str(home), str(images), str(file)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.kill()


def test_an_engine_that_is_killed_while_it_imports(
    one: Path, agent: Path, image_store: Path, tmp_path: Path
) -> None:
    work, home = tmp_path / "work.dsec", tmp_path / "home"
    two = linked_store(image_store, tmp_path / "two")
    before = files(two)
    with Dsec(settings=settings(one)) as dsec, dsec.sandboxes.create("agent:grown") as sandbox:
        dsec.snapshots.export(sandbox.snapshot(), work)
    killed("template", home, two, agent)
    assert len(list((two / "building").iterdir())) > 0, "it was killed in the middle"
    with Dsec(home=home, settings=settings(two)) as dsec:
        assert dsec.templates.list() == ()
        assert {each for each in files(two) if not each.startswith("building")} == before
        dsec.templates.import_(agent)
        assert not list((two / "building").iterdir())
    killed("snapshot", home, two, work)
    assert len(in_pool(home)) == 1, "it was killed in the middle"
    with Dsec(home=home, settings=settings(two)) as dsec:
        assert dsec.snapshots.list() == ()
        taken = dsec.snapshots.import_(work)
        assert not list((two / "building").iterdir())
    assert in_pool(home) == (taken.id,)


def in_pool(home: Path) -> tuple[str, ...]:
    async def read() -> tuple[str, ...]:
        layers = await BtrfsLayers.open(home, durable=True)
        try:
            return await layers.snapshots.list()
        finally:
            await layers.close()

    return anyio.run(read)


def test_what_shows_this_machine_is_not_let_in(
    built: Built, agent: Path, image_store: Path, tmp_path: Path
) -> None:
    """A file that calls the base `system` and names the digest that `host` has here."""
    lie, two = tmp_path / "lie.dsec", linked_store(image_store, tmp_path / "two")
    data = agent.read_bytes()
    with Dsec(settings=settings(two)) as dsec:
        host = dsec.images.get("host")
        said = digest_of(built.blueprint, host.digest, built.layers, built.lock)
        other = renamed(
            forged(data, {"base_digest": host.digest, "digest": said}), built.base_digest, host.digest
        )
        lie.write_bytes(other)
        before = files(two)
        with pytest.raises(BadRequest, match="programs of this machine"):
            dsec.templates.import_(lie)
        assert files(two) == before
        assert dsec.templates.list() == ()


def renamed(bundle: bytes, tree: str, digest: str) -> bytes:
    """One of its trees is said to be another."""
    manifest = manifest_of(bundle)
    begin = len(MAGIC) + 8 + int.from_bytes(bundle[len(MAGIC) : len(MAGIC) + 8], "big")
    trees = [
        (digest if each["digest"] == tree else each["digest"], each["size"]) for each in manifest["trees"]
    ]
    whole = head(manifest["kind"], manifest["about"], trees) + bundle[begin:-SUM_BYTES]
    return whole + hashlib.sha256(whole).digest()


def test_one_who_goes_takes_nothing_of_another_who_imports_the_same(
    agent: Path, built: Built, image_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = linked_store(image_store, tmp_path / "two")
    first, original = asyncio.Event(), Carrier.images

    async def slow(carrier: Carrier, bundle: Bundle, digests: Sequence[str]) -> tuple[Image, ...]:
        found = await original(carrier, bundle, digests)
        if first.is_set():
            await asyncio.Event().wait()
        first.set()
        return found

    async def work() -> None:
        monkeypatch.setattr(Carrier, "images", slow)
        async with AsyncDsec(settings=settings(two)) as dsec:
            importing = [asyncio.create_task(dsec.templates.import_(agent)) for _ in range(2)]
            (done,), (other,) = await asyncio.wait(importing, return_when=asyncio.FIRST_COMPLETED)
            assert done.result().digest == built.digest
            other.cancel()
            with pytest.raises(asyncio.CancelledError):
                await other
            with pytest.raises(Conflict, match="template-"):
                await dsec.images.remove(built.base_digest)
            await asyncio.to_thread(collect, two, budget=0, grace=0)
            async with await dsec.sandboxes.create("agent") as sandbox:
                assert (await sandbox.exec("cat /workspace/tree/file", user="root")).text == "one"

    asyncio.run(work())


def test_room_is_made_after_layers_and_imports(agent: Path, image_store: Path, tmp_path: Path) -> None:
    """What nobody has asked for in an hour goes, when more is kept than there may be."""
    two = linked_store(image_store, tmp_path / "two")
    small = replace(settings(two), images_bytes=2**20)

    def old_one() -> Path:
        path = two / "images" / f"{'e' * 64}.erofs"
        path.write_bytes(bytes(2**20))
        os.utime(path, (1, 1))
        return path

    document = b"version: '1'\nname: layered\nruntime: {setup: ['echo x > /etc/x']}\n"
    with Dsec(settings=small) as dsec:
        for make in (
            lambda: dsec.templates.import_(agent),
            lambda: dsec.templates.build(document),
        ):
            path = old_one()
            make()
            assert not path.exists()
        with dsec.sandboxes.create("layered") as sandbox:
            snapshot = sandbox.snapshot()
        dsec.snapshots.export(snapshot, tmp_path / "work.dsec")
        path = old_one()
        dsec.snapshots.import_(tmp_path / "work.dsec")
        assert not path.exists()


def test_what_came_in_stays_for_as_long_as_a_private_engine_does(
    one: Path, built: Built, image_store: Path, tmp_path: Path
) -> None:
    file, two = tmp_path / "work.dsec", linked_store(image_store, tmp_path / "two")
    with Dsec(settings=settings(one)) as dsec, dsec.sandboxes.create("agent:grown") as sandbox:
        dsec.snapshots.export(sandbox.snapshot(), file)
    with Dsec(settings=settings(two)) as dsec:
        taken = dsec.snapshots.import_(file)
        collect(two, budget=0, grace=0)
        with dsec.sandboxes.create(taken) as again:
            assert again.exec("cat /workspace/tree/file", user="root").text == "one"
    collect(two, budget=0, grace=0)
    assert not [*(two / "images").iterdir(), *(two / "held").iterdir()]


def test_what_was_promoted_goes_with_its_template(image_store: Path, tmp_path: Path) -> None:
    two = linked_store(image_store, tmp_path / "two")
    with Dsec(settings=settings(two)) as dsec:
        with dsec.sandboxes.create() as sandbox:
            assert sandbox.exec("echo secret > /workspace/kept").ok
            promoted = dsec.templates.promote(sandbox.snapshot(), "kept")
        layer = two / "images" / f"{promoted.layers[0].removeprefix('sha256:')}.erofs"
        collect(two, grace=0)
        assert layer.exists()
        dsec.templates.remove("kept")
        collect(two, grace=0)
        assert not layer.exists()
        assert not list((two / "made").iterdir())
        assert [each.names for each in dsec.images.list()] == [("system",)]
