"""Base `host`: programs of this machine, to be read and run, and nothing else of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsec import Dsec, Settings
from dsec.client.sync import Sandbox
from dsec.control.template_store import TemplateStore, digest_of
from dsec.errors import BadRequest, Unsupported

pytestmark = [pytest.mark.needs_root, pytest.mark.timeout(120)]
DOCUMENT = b"""
version: "1"
name: here
runtime: {base: host}
"""


@pytest.fixture(scope="module")
def dsec(image_store: Path) -> Iterator[Dsec]:
    with Dsec(settings=Settings(images=image_store, pool=0)) as engine:
        engine.templates.build(DOCUMENT)
        for name in ("base", "here"):  # what an engine opens once, images among it, it opens now
            with engine.sandboxes.create(name) as first:
                first.exec("true")
        yield engine


@pytest.fixture
def sandbox(dsec: Dsec) -> Iterator[Sandbox]:
    with dsec.sandboxes.create("here") as made:
        yield made


def test_programs_of_this_machine_run(sandbox: Sandbox) -> None:
    done = sandbox.exec(
        "python3 -c 'print(6 * 7)'; awk 'BEGIN { print 1 }'; id -u; stat -c '%u %g' /usr/bin/env /bin/sh; cat /etc/hostname"
    )
    assert done.text == "42\n1\n1000\n0 0\n0 0\nsandbox\n"
    assert sandbox.info.spec.base == "host"
    theirs = sandbox.exec("sha256sum </usr/bin/env").text.split()[0]
    assert theirs == hashlib.sha256(Path("/usr/bin/env").read_bytes()).hexdigest()


def test_nothing_of_it_can_be_changed(sandbox: Sandbox) -> None:
    for command in (
        "touch /usr/bin/new",
        "rm /usr/bin/env",
        "chmod 777 /usr/bin/env",
        "echo >>/usr/bin/env",
        "mount -o remount,rw /usr/bin",
        "mv /usr/bin /usr/nib",
    ):
        done = sandbox.exec(command, user="root")
        assert not done.ok, command
        assert Path("/usr/bin/env").stat().st_mode & 0o777 == 0o755
    assert not Path("/usr/bin/new").exists()
    assert sandbox.exec(
        "mkdir -p /usr/local/bin && touch /usr/local/bin/new", user="root"
    ).ok  # control: what is its own
    assert not Path("/usr/local/bin/new").exists()


def test_nothing_else_of_it_is_there(sandbox: Sandbox, tmp_path: Path) -> None:
    assert sandbox.exec("find /usr/local /home /root /opt /srv -type f -o -type l").text == ""
    assert "root:*:" in sandbox.exec("cat /etc/shadow", user="root").text
    names = set(sandbox.exec("ls /etc", user="root").text.split())
    assert names < {
        *(
            "alternatives",
            "bash.bashrc",
            "group",
            "host.conf",
            "hostname",
            "hosts",
            "ld.so.conf",
            "localtime",
            "mtab",
        ),
        *(
            "nsswitch.conf",
            "os-release",
            "passwd",
            "profile",
            "resolv.conf",
            "shadow",
            "shells",
            "ssl",
            "timezone",
            "machine-id",
        ),
    }
    assert not sandbox.exec(["test", "-e", str(tmp_path)]).ok
    assert tmp_path.exists()  # control


def test_nothing_gains_privileges(sandbox: Sandbox) -> None:
    setuid = [
        path
        for path in ("/usr/bin/su", "/usr/bin/mount", "/usr/bin/passwd")
        if os.stat(path).st_mode & 0o4000
    ]
    assert setuid  # control: there are some here
    flags = sandbox.exec("grep ' /usr/bin ' /proc/self/mountinfo; grep NoNewPrivs /proc/self/status").text
    options = flags.split()[5].split(",")
    assert {"ro", "nosuid", "nodev"} <= set(options)
    assert flags.split()[-1] == "1"
    done = sandbox.exec([setuid[-1], "--help"])
    assert sandbox.exec("id -u").text == "1000\n", done


def test_what_changes_cannot_be_kept(dsec: Dsec, sandbox: Sandbox) -> None:
    with dsec.sandboxes.create() as other:
        snapshot = other.snapshot()  # control
        for act in (sandbox.snapshot, sandbox.fork, lambda: sandbox.rollback(snapshot)):
            with pytest.raises(Unsupported, match="base 'host'") as caught:
                act()
            assert caught.value.hint
        dsec.snapshots.remove(snapshot.id)
    assert sandbox.exec("true").ok
    with pytest.raises(BadRequest, match="can change"):
        dsec.templates.build(DOCUMENT, strict=True)
    with pytest.raises(Unsupported, match="can change"):
        dsec.templates.build(DOCUMENT.replace(b"host", b"host, dependencies: [a==1]"))
    assert {each.mutable for each in dsec.images.list() if "host" in each.names} == {True}
    assert not any(each.mutable for each in dsec.images.list() if "system" in each.names)


def test_what_shows_this_machine_is_host_whatever_a_template_says(dsec: Dsec, image_store: Path) -> None:
    """A record that calls it otherwise, as if somebody had put it there: what may be kept is decided by what is shown."""
    plain = dsec.templates.build(b"version: '1'\nname: plain\n")
    here = dsec.templates.get("here")
    made = digest_of(plain.blueprint, here.base_digest, (), plain.lock)
    assert plain.base == "system"
    TemplateStore(image_store / "templates").put(
        replace(plain, base_digest=here.base_digest, digest=made), "evil"
    )
    with dsec.sandboxes.create("plain:evil") as sandbox:
        assert sandbox.info.spec.base == "host"
        with pytest.raises(Unsupported, match="base 'host'"):
            sandbox.snapshot()
    with dsec.sandboxes.create("plain") as sandbox:  # positive control
        assert sandbox.info.spec.base == "system"
        dsec.snapshots.remove(sandbox.snapshot().id)
    dsec.templates.remove("plain:evil")
    dsec.templates.remove("plain")
