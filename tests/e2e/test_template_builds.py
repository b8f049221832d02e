"""What a build runs, it runs in a sandbox; what came of it is a layer: the same for everybody who builds the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from dsec import AsyncDsec, Dsec, Settings
from dsec.control.layering import MOST_LAYERS
from dsec.errors import BadRequest, BuildFailed, Conflict, NotFound, Unsupported
from dsec.images import gc
from dsec.model.built import Built
from dsec.testing.images import linked_store
from dsec.testing.wheels import make_wheel

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def store(image_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image store of our own, which has the base already."""
    return linked_store(image_store, tmp_path_factory.mktemp("linked") / "store")


@pytest.fixture
def dsec(store: Path, tmp_path: Path) -> Iterator[Dsec]:
    """An engine a test: it has every image that it used mounted for as long as it is open."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "greeter", "1.0", files={"greeter.py": b"WORD = 'from a wheel'\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        patch.setenv("PIP_NO_INDEX", "1")
        with Dsec(settings=Settings(images=store, pool=0, pool_bytes=1 << 30)) as opened:
            yield opened


def build(dsec: Dsec, name: str, runtime: str) -> Built:
    return dsec.templates.build(f"name: {name}\nversion: 1\nruntime: {runtime}\n".encode())


def alive(dsec: Dsec) -> set[str]:
    return {info.id for info in dsec.sandboxes.list()}


def test_set_up_runs_in_order_as_root_and_its_files_are_in_every_sandbox(dsec: Dsec) -> None:
    text = (
        "{dependencies: [greeter==1.0], env: {WHO: me}, setup: ["
        '"id -u > /etc/builder; mkdir -p /opt/app; echo $WHO > /opt/app/who", '
        "\"python3 -c 'import greeter; print(greeter.WORD)' >> /opt/app/who\", "
        '"rm /usr/bin/sort; ln -s /opt/app /srv/app; chown 1000:1000 /opt/app; echo left > /tmp/left; echo left > /var/tmp/left", '
        '"cd /workspace && echo data > data && (sleep 1000 &)"]}'
    )
    before = alive(dsec)
    built = build(dsec, "setup", text)
    assert alive(dsec) == before, "the build sandbox ended with the build"
    assert len(built.layers) == 2
    assert not {note.field for note in built.unenforced}
    script = "cat /etc/builder /srv/app/who /workspace/data; ls /tmp /var/tmp; stat -c %u /opt/app; command -v sort; ps -e | grep -c sleep"
    with dsec.sandboxes.create("setup") as one, dsec.sandboxes.create("setup") as two:
        assert one.exec(script).text == "0\nme\nfrom a wheel\ndata\n/tmp:\n\n/var/tmp:\n1000\n0\n"
        one.exec("echo mine > /workspace/data; rm -rf /opt/app", user="root")
        assert two.exec("cat /workspace/data /opt/app/who").text == "data\nme\nfrom a wheel\n"
    assert dsec.templates.check("setup") == ()


def test_the_same_steps_are_run_once(dsec: Dsec) -> None:
    """The step is not deterministic: were it run again, its layer would be another."""
    text = '{setup: ["cat /proc/sys/kernel/random/uuid > /etc/made"]}'
    one, two = build(dsec, "once", text), build(dsec, "other", text)
    assert one.layers == two.layers
    assert build(dsec, "once", text.replace("/etc/made", "/etc/made2")).layers != one.layers
    assert build(dsec, "once", text[:-1] + ", env: {A: b}}").layers != one.layers


def test_the_time_of_a_build_does_not_show(store: Path, dsec: Dsec, tmp_path: Path) -> None:
    """Another store, another day: the same digest."""
    text = '{setup: ["mkdir /opt/x; echo $SOURCE_DATE_EPOCH > /opt/x/y; touch /etc/passwd"]}'
    other = linked_store(store, tmp_path / "store")
    one = build(dsec, "when", text)
    for path in (other / "images").glob(f"{one.layers[0].removeprefix('sha256:')}*"):
        path.unlink()
    with Dsec(settings=Settings(images=other, pool=0, pool_bytes=1 << 29)) as elsewhere:
        assert build(elsewhere, "when", text).digest == one.digest


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        (
            '{setup: ["true", "echo out; echo because >&2; exit 3"]}',
            r"runtime.setup\[1\]: exit code 3.*\n.*because",
        ),
        ('{setup: ["kill -9 $$"]}', r"runtime.setup\[0\]: signal 9"),
        ("{packages: [hello]}", r"runtime.packages: (it could not be started|exit code).*apt-get"),
    ],
)
def test_a_step_that_fails_leaves_nothing(dsec: Dsec, store: Path, runtime: str, words: str) -> None:
    before, names = alive(dsec), sorted(path.name for path in (store / "names").iterdir())
    with pytest.raises(BuildFailed, match=f"(?s){words}") as caught:
        build(dsec, "broken", runtime)
    assert "no network" in caught.value.hint
    assert alive(dsec) == before
    assert sorted(path.name for path in (store / "names").iterdir()) == names
    assert not list((store / "building").iterdir())
    with pytest.raises(NotFound):
        dsec.templates.get("broken")


def test_a_build_has_no_network_and_sees_nothing_of_the_host(dsec: Dsec, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    text = f'{{setup: ["! cat {tmp_path}/secret", "ls /sys/class/net > /etc/nets || true; cat /proc/net/dev | wc -l > /etc/devices"]}}'
    build(dsec, "alone", text)
    with dsec.sandboxes.create("alone") as sandbox:
        assert sandbox.exec("cat /etc/devices").text == "3\n"  # two lines of heading, and lo


def test_a_working_directory_may_be_made_by_the_set_up(dsec: Dsec) -> None:
    build(dsec, "place", '{workdir: /app, setup: ["mkdir /app; echo hi > /app/f"]}')
    with dsec.sandboxes.create("place") as sandbox:
        assert sandbox.exec("pwd; cat f").text == "/app\nhi\n"
    with pytest.raises(BadRequest, match=r"runtime\.workdir"):
        build(dsec, "place", '{workdir: /app, setup: ["true"]}')


def test_dependencies_bring_their_byte_code(dsec: Dsec) -> None:
    assert build(dsec, "compiled", "{dependencies: [greeter]}").packages == ("greeter==1.0",)
    script = "import greeter, os; print(os.path.exists(greeter.__cached__), greeter.WORD)"
    with dsec.sandboxes.create("compiled") as sandbox:
        assert sandbox.exec(["python3", "-c", script]).text == "True from a wheel\n"
        told = sandbox.exec(["python3", "-v", "-c", "import greeter"]).stderr.decode()
        assert "matches" in told
        assert "greeter" in told.split("code object from '")[-1] or "__pycache__/greeter" in told


def test_a_snapshot_becomes_a_template(dsec: Dsec) -> None:
    build(dsec, "origin", '{env: {A: b}, setup: ["echo one > /etc/one"]}')
    with dsec.sandboxes.create("origin") as sandbox:
        sandbox.exec(
            "echo two > /etc/two; rm /etc/one; mkdir /opt/d; mkfifo /opt/d/pipe; echo token > /tmp/token",
            user="root",
        )
        snapshot = sandbox.snapshot()
        sandbox.exec("echo later > /etc/later", user="root")
    built = dsec.templates.promote(snapshot, "grown", tag="v1")
    assert dsec.templates.promote(snapshot, "grown", tag="v1").digest == built.digest
    assert built.origin == snapshot.id
    dsec.snapshots.remove(snapshot.id)
    with dsec.sandboxes.create("grown:v1") as run:
        assert (
            run.exec("cat /etc/two; ls /etc/one /etc/later /tmp/token; test -p /opt/d/pipe && echo $A").text
            == "two\nb\n"
        )
        assert run.info.spec.template == built.reference
    with dsec.sandboxes.create() as plain:
        plain.files.write("/workspace/x", b"y")
        taken = plain.snapshot()
    dsec.templates.promote(taken, "plain")
    with dsec.sandboxes.create("plain") as run:
        assert run.files.read("/workspace/x") == b"y"
    with pytest.raises(BadRequest):
        dsec.templates.promote(taken, "No Name")
    dsec.snapshots.remove(taken.id)
    with pytest.raises(NotFound):
        dsec.templates.promote(taken, "plain")


def test_templates_of_templates_stay_flat(dsec: Dsec) -> None:
    """Each generation changes, removes and replaces what the one before it left."""
    name, built = "base", None
    for generation in range(MOST_LAYERS + 2):
        with dsec.sandboxes.create(name) as sandbox:
            sandbox.exec(
                f"cd /workspace; echo {generation} > last; echo {generation} > f{generation}; rm -f f{generation - 2};"
                f" rm -rf d; mkdir d; echo {generation} > d/{generation}"
            )
            snapshot = sandbox.snapshot()
        built = dsec.templates.promote(snapshot, "chain")
        name = "chain"
        dsec.snapshots.remove(snapshot.id)
    assert built is not None
    assert len(built.layers) == 2, "thirty became one, and one came after"
    last = MOST_LAYERS + 1
    with dsec.sandboxes.create("chain") as sandbox:
        said = sandbox.exec("cd /workspace; cat last; ls; ls d").text.split()
        assert said == [str(last), "d", *sorted((f"f{last - 1}", f"f{last}")), "last", str(last)]


def test_what_a_durable_engine_needs_is_not_collected(store: Path, tmp_path: Path) -> None:
    """A template is removed, the store is collected to nothing; what was made of it still goes back and is copied after a restart."""
    settings = Settings(images=store, pool=0, pool_bytes=1 << 29)
    home = tmp_path / "home"
    with Dsec(home, settings=settings) as engine:
        built = build(engine, "mortal", '{setup: ["echo made > /etc/made"]}')
        sandbox = engine.sandboxes.create("mortal")
        snapshot = sandbox.snapshot()
        engine.templates.remove("mortal")
    layer = store / "images" / f"{built.layers[0].removeprefix('sha256:')}.erofs"
    gc.collect(store, budget=0, grace=0)
    assert layer.exists()
    with Dsec(home, settings=settings) as engine:
        again = engine.sandboxes.get(sandbox.id)
        again.rollback(snapshot)
        assert again.exec("cat /etc/made").text == "made\n"
        again.destroy()
    gc.collect(store, budget=0, grace=0)
    assert layer.exists(), "the snapshot needs it"
    with Dsec(home, settings=settings) as engine:
        with engine.sandboxes.create(snapshot) as copy:
            assert copy.exec("cat /etc/made").text == "made\n"
        engine.snapshots.remove(snapshot.id)
    with Dsec(home, settings=settings):
        pass
    gc.collect(store, budget=0, grace=0)
    assert not layer.exists()
    with (
        Dsec(settings=settings) as engine,
        engine.sandboxes.create() as back,
    ):  # the base is built again for the others
        assert back.exec("true").ok


def test_a_snapshot_is_never_put_over_another_base(store: Path, tmp_path: Path) -> None:
    """The name `system` may mean another image tomorrow; what was taken over yesterday's stays over yesterday's."""
    with Dsec(settings=Settings(images=store, pool=0, pool_bytes=1 << 29)) as engine:
        build(engine, "layered", '{setup: ["echo x > /etc/x"]}')
        with engine.sandboxes.create() as plain, engine.sandboxes.create("layered") as layered:
            assert plain.info.spec.base_digest.startswith("sha256:")
            snapshot = plain.snapshot()
            with pytest.raises(Conflict):
                layered.rollback(snapshot)


def test_a_level_without_images_is_not_given_a_template_that_needs_one(dsec: Dsec) -> None:
    for runtime in (
        "{level: process, dependencies: [greeter==1.0]}",
        "{level: process, base: 'debian:bookworm'}",
        "{level: process, setup: ['true']}",
    ):
        with pytest.raises(BadRequest, match="level 'process'"):
            build(dsec, "lowered", runtime)
    with pytest.raises(BadRequest, match=r"runtime\.user"):
        build(dsec, "nobody", "{user: bob}")
    build(dsec, "needs", "{dependencies: [greeter==1.0]}")
    with pytest.raises(Unsupported, match="level 'process'"):
        dsec.sandboxes.create("needs", level="process")
    build(dsec, "plain", "{level: process, env: {A: b}}")
    with dsec.sandboxes.create("plain") as sandbox:
        assert sandbox.exec("echo $A").text == "b\n"


def document(name: str, command: str) -> bytes:
    return f"name: {name}\nversion: 1\nruntime: {{setup: ['{command}']}}\n".encode()


@pytest.mark.anyio
@pytest.mark.parametrize("commands", [1, 6], ids=["the same", "different ones"])
async def test_more_builds_at_once_than_there_are_threads(store: Path, commands: int) -> None:
    """Each needs threads for its own work, again and again: nobody may hold one while he waits for another's build."""
    limiter = to_thread.current_default_thread_limiter()
    before = limiter.total_tokens
    async with AsyncDsec(settings=Settings(images=store, pool=0, pool_bytes=1 << 30)) as engine:
        limiter.total_tokens = 2
        try:
            builds = [
                engine.templates.build(document(f"many{number}", f"echo {number % commands} > /etc/many"))
                for number in range(6)
            ]
            with anyio.fail_after(120):
                built, _ = await asyncio.gather(asyncio.gather(*builds), engine.templates.list())
        finally:
            limiter.total_tokens = before
    assert len({each.layers for each in built}) == commands


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_build_that_nobody_waits_for_ends_with_its_sandbox(store: Path, how: str) -> None:
    async with AsyncDsec(settings=Settings(images=store, pool=0, pool_bytes=1 << 29)) as engine:
        text = document("left", f"sleep 600; echo {how} > /etc/left")

        async def watch(*, there: bool = True) -> None:
            with anyio.fail_after(20):
                while bool(await engine.sandboxes.list()) is not there:  # noqa: ASYNC110 - seen from outside only
                    await asyncio.sleep(0.01)

        async with anyio.create_task_group() as group:
            if how == "scope":
                group.start_soon(engine.templates.build, text)
                await watch()
                group.cancel_scope.cancel()
        if how == "task":
            task = asyncio.create_task(engine.templates.build(text))
            await watch()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await watch(there=False)  # one that was being made is undone in a moment
        assert await to_thread.run_sync(os.listdir, store / "building") == []
        quick = await engine.templates.build(document("left", "true"))
        assert quick.layers


def test_a_layer_that_changes_nothing_more_is_not_stacked_twice(dsec: Dsec) -> None:
    """Grown from an unchanged sandbox, and from one that made the same change again."""
    build(dsec, "same", '{setup: ["true"]}')
    name = "same"
    for change in ("true", "true", "cp /etc/passwd /workspace/x", "cp /etc/passwd /workspace/x"):
        with dsec.sandboxes.create(name) as sandbox:
            sandbox.exec(f"cd /workspace && {change} && touch -d @0 . x", user="root")
            snapshot = sandbox.snapshot()
        built = dsec.templates.promote(snapshot, "again")
        dsec.snapshots.remove(snapshot.id)
        assert len(set(built.layers)) == len(built.layers)
        name = "again"
        with dsec.sandboxes.create(name) as sandbox:
            assert sandbox.exec("true").ok


def test_a_build_has_no_session_of_its_own(dsec: Dsec, tmp_path: Path, store: Path) -> None:
    build(dsec, "session", '{setup: ["env | sort > /etc/environment-of-build"]}')
    with dsec.sandboxes.create("session") as sandbox:
        said = sandbox.exec("grep ^SESSION_ID= /etc/environment-of-build; echo $SESSION_ID").text.split()
        assert said[0] == "SESSION_ID=build"
        assert said[1] != "build"


def test_the_same_set_up_for_another_working_directory_is_checked_again(dsec: Dsec) -> None:
    build(dsec, "place", '{workdir: /a, setup: ["mkdir /a"]}')
    with pytest.raises(BadRequest, match=r"runtime\.workdir"):
        build(dsec, "place", '{workdir: /b, setup: ["mkdir /a"]}')


def test_a_tag_that_is_none_is_refused_before_anything_is_built(dsec: Dsec, store: Path) -> None:
    before = sorted(path.name for path in (store / "images").iterdir())
    with pytest.raises(BadRequest, match="bad tag"):
        dsec.templates.build(
            b"name: tagged\nversion: 1\nruntime: {setup: ['echo unique > /etc/unique']}\n", tag="bad tag!"
        )
    assert sorted(path.name for path in (store / "images").iterdir()) == before
