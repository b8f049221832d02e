"""An engine that is there to be killed: ``crash_child.py HOME|- IMAGES SCENARIO LEVEL POOL``.

It prints a line of JSON *after* each step that was acknowledged, so that whoever kills it knows what must have survived.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsec import Dsec, Settings
from dsec.errors import DsecError

MIB = 2**20
FOREVER = 600.0
OUTPUT = "i=0; echo ran >> ran; while [ $i -lt 60 ]; do i=$((i+1)); echo line $i; sleep 0.01; done; exit 7"


def say(step: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"step": step, **facts}) + "\n")
    sys.stdout.flush()


def settings(images: Path, pool: int) -> Settings:
    return Settings(images=images, pool=pool, pool_bytes=256 * MIB, shelf=2, wait=5)


def idle(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level)
    sandbox.files.write("kept", sandbox.id.encode())
    say("created", id=sandbox.id)
    time.sleep(FOREVER)


def creating(dsec: Dsec, level: str) -> None:
    while True:
        try:
            say("created", id=dsec.sandboxes.create(level=level).id)
        except DsecError as error:
            say("refused", code=error.code, retryable=error.retryable, message=str(error))


def executing(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level)
    running = sandbox.start(["sh", "-c", OUTPUT])
    say("created", id=sandbox.id)
    say("started", id=sandbox.id, exec=running.id)
    result = running.wait()
    say("ended", exec=running.id, code=result.exit_code, stdout=result.text)
    while True:
        sandbox.exec("echo x >> more")
        say("more")
        time.sleep(0.005)


def destroying(dsec: Dsec, level: str) -> None:
    found = [dsec.sandboxes.create(level=level) for _ in range(4)]
    for sandbox in found:
        say("created", id=sandbox.id)
    for sandbox in found[:3]:
        say("destroying", id=sandbox.id)
        sandbox.destroy()
        say("destroyed", id=sandbox.id)
    time.sleep(FOREVER)


def pausing(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level)
    say("created", id=sandbox.id)
    while True:
        sandbox.pause()
        say("paused")
        sandbox.resume()
        say("resumed")


def paused(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level)
    running = sandbox.start(["sh", "-c", OUTPUT])
    sandbox.pause()
    say("created", id=sandbox.id)
    say("started", id=sandbox.id, exec=running.id)
    time.sleep(FOREVER)


def scratch(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level)
    say("created", id=sandbox.id)
    sandbox.exec("sleep 600", scratch=True)


def writing(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level)
    say("created", id=sandbox.id)
    number = 0
    while True:
        number += 1
        sandbox.files.write(f"f{number}", b"%d\n" % number * 20_000)
        say("wrote", id=sandbox.id, number=number)


def snapshots(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level)
    say("created", id=sandbox.id)
    number, before = 0, ""
    while True:
        number += 1
        sandbox.files.write("f", b"%d" % number)
        snapshot = sandbox.snapshot()
        say("kept", id=snapshot.id, number=number)
        if before:
            dsec.snapshots.remove(before)
            say("removed", id=before)
        before = snapshot.id
        say("rolling", id=sandbox.id)
        sandbox.rollback(snapshot)
        say("rolled", id=sandbox.id)


def volumes(dsec: Dsec, level: str) -> None:
    """Of four volumes one goes, one is left with a sandbox, two with what was written."""
    number = 0
    while True:
        number += 1
        try:
            _use_volume(dsec, level, number)
        except DsecError as error:  # its spawner was killed
            say("refused", code=error.code, message=str(error))


def _use_volume(dsec: Dsec, level: str, number: int) -> None:
    name = f"v{number}"
    say("making", id=name)
    dsec.volumes.create(name, size_mib=8)
    say("made", id=name)
    sandbox = dsec.sandboxes.create(level=level, volumes=[f"{name}:/data"])
    sandbox.files.write("/data/f", b"%d" % number)
    say("wrote", id=name, number=number, sandbox=sandbox.id)
    if number % 4:
        sandbox.destroy()
        say("freed", id=name)
    if number % 4 == 1:
        say("removing", id=name)
        dsec.volumes.remove(name)
        say("gone", id=name)


def forks(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level)
    sandbox.files.write("kept", b"1")
    say("created", id=sandbox.id)
    while True:
        say("forking")
        children = sandbox.fork(3)
        say("forked", ids=[child.id for child in children])


def ttl(dsec: Dsec, level: str) -> None:
    sandbox = dsec.sandboxes.create(level=level, ttl=1)
    say("created", id=sandbox.id)
    time.sleep(FOREVER)


def polling(dsec: Dsec, level: str) -> None:
    """As ``idle``, with a sandbox that others are compared with, until its input ends."""
    one, other = dsec.sandboxes.create(level=level), dsec.sandboxes.create(level=level, ttl=2)
    say("created", id=one.id, other=other.id)
    seen = ("", "")
    while True:
        now = (str(one.inspect().state), str(other.inspect().state))
        if now != seen:
            seen = now
            say("state", one=now[0], reason=one.info.reason, other=now[1], why=other.info.reason)
        time.sleep(0.02)


SCENARIOS: dict[str, Callable[[Dsec, str], None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(
            idle,
            creating,
            executing,
            destroying,
            pausing,
            paused,
            scratch,
            writing,
            snapshots,
            volumes,
            forks,
            ttl,
            polling,
        ),
    )
}


def main() -> None:
    home, images, scenario, level, pool = sys.argv[1:]
    with Dsec(None if home == "-" else home, settings=settings(Path(images), int(pool))) as dsec:
        say("open")
        SCENARIOS[scenario](dsec, level)


if __name__ == "__main__":
    main()
