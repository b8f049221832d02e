"""Acts during which a server is killed, and what must be true of each afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dsec import Dsec
from dsec.client.sync import Sandbox
from dsec.errors import DsecError
from dsec.model.sandbox import State

CONTENT: Final = b"0123456789abcdef" * 8192
COMMAND: Final = "echo ran >> ran; echo out; exit 7"


@dataclass(slots=True)
class Case:
    """One act at one server: what it is done to, what was answered, and what lived before."""

    dsec: Dsec
    sandbox: Sandbox
    level: str = "container"
    facts: dict[str, Any] = field(default_factory=dict)
    answer: Any = None
    error: DsecError | None = None

    def again(self, dsec: Dsec) -> Sandbox:
        """The same sandbox, as another server knows it."""
        return dsec.sandboxes.get(self.sandbox.id)


@dataclass(frozen=True, slots=True)
class Act:
    """``prepare`` before the server that will die, ``do`` at it, ``judge`` at its successor: gives the ids of new sandboxes that must live."""

    do: Callable[[Case], Any]
    judge: Callable[[Case, Dsec], list[str]]
    prepare: Callable[[Case], None] = lambda _: None
    sure: bool = True
    """Asked again after the answer was lost, it must succeed; others may be told that nobody knows: it was done once, or not at all."""
    ends: tuple[str, ...] = ()
    """Failpoints at which the sandbox may be lost, because its processes had been ended."""


def usable(sandbox: Sandbox) -> None:
    """It does a command."""
    assert sandbox.exec("echo usable").stdout == b"usable\n"


def _created(case: Case, dsec: Dsec) -> list[str]:
    usable(dsec.sandboxes.get(case.answer.id))
    usable(case.again(dsec))
    return [case.answer.id]


def _destroyed(case: Case, dsec: Dsec) -> list[str]:
    assert case.again(dsec).info.state is State.GONE
    return []


def _paused(case: Case, dsec: Dsec) -> list[str]:
    one = case.again(dsec)
    assert one.info.state is State.PAUSED
    one.resume()
    usable(one)
    return []


def _runs(case: Case, dsec: Dsec) -> list[str]:
    one = case.again(dsec)
    assert one.info.state is State.RUNNING
    usable(one)
    assert one.files.read("kept") == b"kept"
    return []


def _keep(case: Case) -> None:
    case.sandbox.files.write("kept", b"kept")


def _keep_and_pause(case: Case) -> None:
    _keep(case)
    case.sandbox.pause()


def _keep_and_hibernate(case: Case) -> None:
    _keep(case)
    case.sandbox.hibernate()


def _hibernated(case: Case, dsec: Dsec) -> list[str]:
    one = case.again(dsec)
    assert one.info.state is State.HIBERNATED
    one.resume()
    return _runs(case, dsec)


def _snapshotted(case: Case, dsec: Dsec) -> list[str]:
    found = dsec.snapshots.list(case.sandbox.id)
    assert len(found) <= 1
    if case.error is None:
        assert [one.id for one in found] == [case.answer.id]
    for one in found:
        made = dsec.sandboxes.create(one)
        assert made.files.read("kept") == b"kept"
        made.destroy()
        dsec.snapshots.remove(one.id)
    return _runs(case, dsec)


def _forked(case: Case, dsec: Dsec) -> list[str]:
    told = [
        one for one in case.again(dsec).events() if one.act == "sandbox.fork" and one.payload.get("children")
    ]
    children = [str(child) for one in told for child in one.payload["children"]]  # type: ignore[union-attr]
    assert len(children) in (0, 2)
    if case.error is None:
        assert children == [child.id for child in case.answer]
    for child in children:
        one = dsec.sandboxes.get(child)
        usable(one)
        assert one.files.read("kept") == b"kept"
    _runs(case, dsec)
    return children


def _keep_and_snapshot(case: Case) -> None:
    _keep(case)
    case.facts["snapshot"] = case.sandbox.snapshot()
    case.sandbox.files.write("kept", b"later")


def _rolled_back(case: Case, dsec: Dsec) -> list[str]:
    one = case.again(dsec)
    if case.error is None:
        _runs(case, dsec)
    elif one.info.state is State.RUNNING:
        usable(one)
        assert one.files.read("kept") in (b"kept", b"later")
    dsec.snapshots.remove(case.facts["snapshot"].id)
    return []


def _started(case: Case, dsec: Dsec) -> list[str]:
    one = case.again(dsec)
    told = [record for record in one.events() if record.act == "exec"]
    if case.error is not None and not told:
        assert not one.files.exists("ran")
        return []
    (ref,) = {record.ref for record in told}
    assert case.error is not None or ref == case.answer.id
    try:
        result = one.attach(ref).wait()
    except DsecError as error:  # it was recorded, and never began
        assert case.error is not None and error.code == "unknown_outcome", f"{case.error!r}, {error!r}"
        assert "began" not in case.facts, "it was said to have begun"
        assert not one.files.exists("ran")
        return []
    assert result.exit_code == 7
    # What it wrote is kept by the server that followed it; when that died after the end was recorded, the successor says how much is missing.
    assert result.stdout == b"out\n" or (result.truncated and result.dropped == 4), result
    assert one.files.read("ran") == b"ran\n"
    told = [record for record in one.events() if record.ref == ref]
    assert [record.phase.value for record in told] == ["intent", "result"]
    assert told[1].payload["exit_code"] == 7
    return []


def _start(case: Case) -> Any:
    started = case.sandbox.start(COMMAND)
    case.facts["began"] = True
    started.wait()
    return started


def _written(case: Case, dsec: Dsec) -> list[str]:
    assert case.again(dsec).files.read("content") == CONTENT
    return []


def _decided(case: Case, dsec: Dsec) -> list[str]:
    made = [one for one in case.again(dsec).events() if one.act == "decision"]
    assert len(made) <= 1
    assert case.error is not None or len(made) == 1
    return []


def _upload(case: Case) -> Any:
    return case.sandbox.files.write("content", CONTENT)


ACTS: Final[Mapping[str, Act]] = {
    "create": Act(lambda case: case.dsec.sandboxes.create(level=case.level), _created),
    "destroy": Act(lambda case: case.sandbox.destroy(), _destroyed),
    "pause": Act(lambda case: case.sandbox.pause(), _paused),
    "resume": Act(lambda case: case.sandbox.resume(), _runs, _keep_and_pause),
    "snapshot": Act(lambda case: case.sandbox.snapshot(), _snapshotted, _keep, sure=False),
    "fork": Act(lambda case: case.sandbox.fork(2), _forked, _keep, sure=False),
    "rollback": Act(
        lambda case: case.sandbox.rollback(case.facts["snapshot"]),
        _rolled_back,
        _keep_and_snapshot,
        sure=False,
        ends=("rollback.recorded", "rollback.ended", "rollback.made"),
    ),
    "exec": Act(_start, _started, sure=False),
    "upload": Act(_upload, _written),
    "journal": Act(lambda case: case.sandbox.decide({"step": 1}), _decided, sure=False),
    "wake": Act(lambda case: case.sandbox.resume(), _runs, _keep_and_hibernate),
    "hibernate": Act(lambda case: case.sandbox.hibernate(), _hibernated, _keep),
}
"""By the first word of the failpoints that they reach."""
