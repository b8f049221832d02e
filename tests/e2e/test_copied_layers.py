"""Layers copied from what an overlay wrote, as a real sandbox sees them: what was taken away is gone, attributes are there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from dsec import Dsec, Settings
from dsec.control.template_store import TemplateStore, digest_of
from dsec.images.attended import threaded
from dsec.images.layer_copy import copy_layer, merge_layers
from dsec.images.layer_store import LayerStore
from dsec.images.store import ImageStore
from dsec.images.tools import Check
from dsec.model.built import Built
from dsec.ports.storage import Image
from dsec.stores.mounts import mount_detached, mount_image
from dsec.templates.document import parse
from dsec.templates.dump import digest as blueprint_of
from dsec.testing.images import linked_store

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]


@contextmanager
def mounted(image: Image) -> Iterator[Path]:
    descriptor = mount_image(image.path)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextmanager
def overlay(upper: Path, lowers: list[Path]) -> Iterator[Path]:
    work = upper.with_name(f"{upper.name}.work")
    work.mkdir()
    options = {"lowerdir": ":".join(map(str, lowers)), "upperdir": str(upper), "workdir": str(work)}
    descriptor = mount_detached("overlay", "test", options, 0)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@pytest.fixture
def store(image_store: Path, tmp_path: Path) -> Path:
    return linked_store(image_store, tmp_path / "store")


def first(root: Path) -> None:
    (root / "etc/hosts").unlink()
    shutil.rmtree(root / "home/user")
    (root / "home/user").mkdir()
    (root / "opt/new/deep").mkdir(parents=True)
    for name in ("opt/new/kept", "opt/new/deep/gone", "srv/script"):
        (root / name).write_bytes(name.encode())
    os.link(root / "opt/new/kept", root / "opt/new/other")
    os.setxattr(root / "srv/script", "user.note", b"words")
    os.chown(root / "srv/script", 1000, 1000)


def second(root: Path) -> None:
    (root / "opt/new/deep/gone").unlink()
    shutil.rmtree(root / "var/log")
    (root / "var/log").write_bytes(b"a file now")


def publish(store: Path, base: Image, layers: list[Image], name: str) -> None:
    document = parse(f'version: "1"\nname: {name}\n'.encode(), source="test")
    blueprint, digests = blueprint_of(document.template), tuple(image.digest for image in layers)
    built = Built(
        digest=digest_of(blueprint, base.digest, digests, ""),
        blueprint=blueprint,
        template=document.template,
        base=base.name,
        base_digest=base.digest,
        layers=digests,
        lock="",
        unenforced=(),
        floating=(),
        built_at=0.0,
    )
    TemplateStore(store / "templates").put(built)


LOOK = """
ls /etc/hosts; ls -A /home/user; ls /opt/new/deep; stat -c '%F' /var/log; cat /opt/new/other
stat -c '%h %u' /opt/new/kept /srv/script; python3 -c "import os; print(os.getxattr('/srv/script', 'user.note'))"
rm -r /opt/new /var/log && mkdir /var/log && ls -A /var/log /opt
"""


def _copied(upper: Path, tree: Path, check: Check) -> None:
    copy_layer(upper, tree, check=check)


def test_a_sandbox_sees_what_the_overlay_showed(store: Path, tmp_path: Path) -> None:
    base = anyio.run(ImageStore(store).get, "system")
    keep = LayerStore(store).keep
    images: list[Image] = []
    with ExitStack() as stack:
        below = [stack.enter_context(mounted(base))]
        for number, work in enumerate((first, second)):
            upper = tmp_path / f"upper{number}"
            upper.mkdir()
            with overlay(upper, below[::-1]) as root:
                work(root)
            copying = threaded(partial(_copied, upper))
            images.append(anyio.run(keep, f"copy{number}", copying))
            below.append(stack.enter_context(mounted(images[-1])))
        merged = anyio.run(
            keep, "merged", threaded(lambda tree, _: merge_layers(below[1:], tree, below=below[:1]))
        )
    publish(store, base, images[::-1], "two")
    publish(store, base, [merged], "one")
    with Dsec(settings=Settings(images=store, pool=0, pool_bytes=1 << 30)) as dsec:
        said = {}
        for name in ("two", "one"):
            with dsec.sandboxes.create(name) as sandbox:
                done = sandbox.exec(LOOK, user="root")
                assert b"cannot access '/etc/hosts'" in done.stderr
                said[name] = done.text
        with dsec.sandboxes.create() as plain:  # positive control
            assert plain.exec("cat /etc/hosts && test -d /var/log").ok
    expected = "regular file\nopt/new/kept2 0\n1 1000\nb'words'\n/opt:\n\n/var/log:\n"
    assert said == {"two": expected, "one": expected}
