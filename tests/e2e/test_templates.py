"""Templates from a document to a sandbox that runs: the same every time, and what a tag means is never half of something."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsec import Dsec, Limits, Settings
from dsec.client.sync import Sandbox, Sandboxes
from dsec.errors import BadRequest, Conflict, NotFound, StoreDamaged
from dsec.model.built import Built
from dsec.testing.images import linked_store
from dsec.testing.wheels import make_wheel

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]
DOCUMENT = """
version: "1"
name: agent
runtime:
  dependencies: [greeter==1.0, other>=1]
  env: {GREETING: hello}
  workdir: /tmp
resources: {profile: chat, pids: 99}
strategy: {timezone: Asia/Shanghai, max_steps: 7}
"""


@pytest.fixture(scope="module")
def store(image_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image store of our own, which has the base already."""
    return linked_store(image_store, tmp_path_factory.mktemp("linked") / "store")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    make_wheel(directory, "greeter", "1.0", files={"greeter.py": b"WORD = 'from a wheel'\n"})
    make_wheel(directory, "other", "1.0", files={"other.py": b"VERSION = 1\n"})
    return directory


@pytest.fixture(scope="module")
def dsec(store: Path, wheels: Path) -> Iterator[Dsec]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        patch.setenv("PIP_NO_INDEX", "1")
        with Dsec(settings=Settings(images=store, pool=0, pool_bytes=1 << 30)) as opened:
            build(opened)
            for name in ("base", "agent"):  # what an engine opens once, images among it, it opens now
                with opened.sandboxes.create(name) as sandbox:
                    sandbox.exec("true")
            yield opened


def build(
    dsec: Dsec,
    text: str = DOCUMENT,
    *,
    tag: str = "latest",
    strict: bool = False,
    update: bool = False,
) -> Built:
    return dsec.templates.build(text.encode(), tag=tag, strict=strict, update=update)


def test_a_template_is_built_once_and_run_many_times(dsec: Dsec) -> None:
    built = build(dsec)
    again = build(dsec)
    assert replace(again, built_at=0) == replace(built, built_at=0)
    assert len(built.layers) == 1
    assert built.lock
    assert [note.line for note in built.floating] == [5]
    assert "strategy.max_steps" in {note.field for note in built.unenforced}
    seen = set()
    for _ in range(3):
        with dsec.sandboxes.create("agent") as sandbox:
            done = sandbox.exec(
                "pwd; echo $GREETING; date +%Z; python3 -c 'import greeter, other; print(greeter.WORD, other.VERSION)'; touch here"
            )
            seen.add(done.text)
            spec = sandbox.info.spec
            assert spec.template == built.reference
            assert (spec.limits.pids, spec.limits.cpu_millis) == (99, 500)
            assert sandbox.files.exists("here")
    assert seen == {"/tmp\nhello\nCST\nfrom a wheel 1\n"}


def test_what_is_given_goes_before_what_the_template_says(dsec: Dsec) -> None:
    build(dsec)
    with dsec.sandboxes.create(
        "agent:latest", env={"GREETING": "you", "B": "c"}, limits=Limits(pids=50)
    ) as sandbox:
        assert sandbox.exec("echo $GREETING $B; date +%Z").text == "you c\nCST\n"
        assert sandbox.info.spec.limits.pids == 50
        snapshot = sandbox.snapshot()
        with dsec.sandboxes.create(snapshot) as again:
            assert (
                again.exec("python3 -c 'import greeter; print(greeter.WORD)'; echo $B").text
                == "from a wheel\nc\n"
            )
        with dsec.sandboxes.create() as plain, pytest.raises(Conflict):
            plain.rollback(snapshot)
        (child,) = sandbox.fork()
        with child:
            assert child.exec("python3 -c 'import greeter'").ok
        dsec.snapshots.remove(snapshot.id)


def test_two_runs_begin_alike_and_a_check_would_see_it(dsec: Dsec, monkeypatch: pytest.MonkeyPatch) -> None:
    build(dsec)
    assert dsec.templates.check("agent") == ()
    create, made = Sandboxes.create, []

    def leaky(self: Sandboxes, template: str) -> Sandbox:
        sandbox = create(self, template)
        made.append(sandbox)
        sandbox.exec(f"echo {len(made)} > /tmp/left; touch -d @{len(made)} /tmp /workspace", user="root")
        return sandbox

    monkeypatch.setattr(Sandboxes, "create", leaky)  # positive control
    assert {each.what for each in dsec.templates.check("agent")} == {"/tmp", "/tmp/left", "/workspace"}


def test_tags_history_and_rollback(dsec: Dsec) -> None:
    one = build(dsec, tag="moving")
    two = build(dsec, DOCUMENT.replace("hello", "goodbye"), tag="moving")
    assert one.digest != two.digest
    assert one.layers == two.layers, "the same dependencies are the same layer"
    assert dsec.templates.get("agent:moving").digest == two.digest
    assert dsec.templates.get(one.reference).digest == one.digest
    assert dsec.templates.rollback("agent:moving").digest == one.digest
    dsec.templates.tag(two.reference, "stable")
    assert {each.tag: each.digest for each in dsec.templates.list()}["stable"] == two.digest
    assert [each.digest for each in dsec.templates.history("agent") if each.tag == "moving"] == [
        one.digest,
        two.digest,
        one.digest,
    ]
    with pytest.raises(NotFound):
        dsec.sandboxes.create("agent:nosuch")
    with pytest.raises(NotFound):
        dsec.sandboxes.create(f"other@{one.digest}")
    for reference in ("agent:moving", "agent:stable", "agent:stable", "agent"):
        dsec.templates.remove(reference)
    with pytest.raises(NotFound):
        dsec.templates.get(two.reference)


def test_a_tag_is_never_seen_half_moved(dsec: Dsec) -> None:
    digests = {
        build(dsec, DOCUMENT.replace("hello", str(number)), tag=f"t{number}").digest for number in range(2)
    }
    errors: list[BaseException] = []
    stop = threading.Event()

    def move() -> None:
        try:
            while not stop.is_set():
                for number in range(2):
                    dsec.templates.tag(f"agent:t{number}", "moved")
        except BaseException as error:  # noqa: BLE001 - told below
            errors.append(error)

    dsec.templates.tag("agent:t0", "moved")
    mover = threading.Thread(target=move)
    mover.start()
    for _ in range(20):
        with dsec.sandboxes.create("agent:moved") as sandbox:
            assert sandbox.info.spec.template.rpartition("@")[2] in digests
            assert sandbox.exec("echo $GREETING").text in ("0\n", "1\n")
    stop.set()
    mover.join()
    assert not errors


def test_what_cannot_be_built_is_refused_by_name(dsec: Dsec) -> None:
    with pytest.raises(BadRequest, match=r"line 5: other>=1"):
        build(dsec, strict=True)
    build(dsec, DOCUMENT.replace("other>=1", "other==1.0"), strict=True)
    for text, error, words in (
        (DOCUMENT.replace("/tmp", "/nowhere"), BadRequest, "runtime.workdir"),
        (DOCUMENT.replace("greeter==1.0", "greeter==2.0"), BadRequest, "greeter"),
        (DOCUMENT.replace("runtime:\n", "runtime:\n  base: nosuch:1\n"), NotFound, "nosuch:1"),
        ("version: 1\nnmae: x\n", BadRequest, "line 2"),
    ):
        with pytest.raises(error, match=words):
            build(dsec, text)


def test_a_flipped_byte_is_refused(dsec: Dsec, store: Path) -> None:
    built = build(dsec, DOCUMENT.replace("other>=1", "other==1.0").replace("hello", "flipped"))
    path = store / "images" / f"{built.layers[0].removeprefix('sha256:')}.erofs"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    with Dsec(settings=Settings(images=store, pool=0)) as fresh, pytest.raises(StoreDamaged):
        fresh.sandboxes.create(built.reference)
    assert (
        build(dsec, DOCUMENT.replace("other>=1", "other==1.0").replace("hello", "flipped")).layers
        == built.layers
    )
