"""The documents of `--json` have the keys that are documented."""

from __future__ import annotations

from dataclasses import fields

from dsec.cli import execs, records, sandboxes, shapes, volumes
from dsec.cli.main import COMMANDS
from dsec.model.execs import ExecInfo, ExecResult
from dsec.model.files import Transfer
from dsec.model.health import Layer, Report, Verdict
from dsec.model.ids import ExecId, SandboxId, new_exec_id, new_sandbox_id, new_volume_id
from dsec.model.images import Freed, ImageInfo
from dsec.model.journal import Finding, Phase, Record
from dsec.model.sandbox import Limits, Metrics, Problem, SandboxInfo, SandboxSpec, State, Volume
from dsec.model.volumes import VolumeInfo
from dsec.wiring import Collected

SANDBOX: SandboxId = new_sandbox_id()
EXEC: ExecId = new_exec_id()


def _names(*classes: type) -> list[set[str]]:
    return [{field.name for field in fields(one)} for one in classes]


def test_documents_that_are_put_together() -> None:
    info = SandboxInfo(id=SANDBOX, state=State.RUNNING, spec=SandboxSpec(), flags=frozenset(), created_at=1.0)
    record = Record(
        chain=SANDBOX, seq=1, at=1.0, act="x", phase=Phase.NOTE, ref="", actor="local", payload={}, digest=""
    )
    assert set(sandboxes.info_json(info)) == set(shapes.SANDBOX)
    volume = VolumeInfo(id=new_volume_id(), project="default", name="data", size_mib=1, created_at=1.0)
    assert set(volumes.volume_json(volume)) == set(shapes.VOLUME)
    assert set(records.record_json(record)) == set(shapes.RECORD)
    assert set(execs.result_json(ExecResult(id=EXEC, exit_code=0, stdout=b"", stderr=b""))) == set(
        shapes.RESULT
    )
    assert set(execs.exec_json(SANDBOX, ExecInfo(id=EXEC, pid=1, started_at=1.0, exit=None))) == set(
        shapes.EXEC
    )


def test_documents_that_are_values() -> None:
    documented = [set(one) for one in (shapes.PROBLEM, shapes.TRANSFER, shapes.REPORT, shapes.COLLECTED)]
    assert _names(Problem, Transfer, Report, Collected) == documented


def test_images_are_documented() -> None:
    assert _names(ImageInfo, Freed) == [set(shapes.IMAGE), set(shapes.FREED)]


def test_values_within_documents() -> None:
    inner = {
        Limits: shapes.SANDBOX["limits"],
        Volume: shapes.SANDBOX["volumes"],
        Metrics: shapes.METRICS["metrics"],
        Layer: shapes.REPORT["layers"],
        Verdict: shapes.REPORT["levels"],
        Finding: shapes.FINDINGS["findings"],
    }
    for kind, words in inner.items():
        for field in fields(kind):  # type: ignore[arg-type]
            assert field.name in words, (kind, field.name)


def test_every_command_with_json_is_documented() -> None:
    documented = {name.split()[0] for name in shapes.SHAPES}
    assert documented == set(COMMANDS) - {"shell", "serve", "backup"}  # which print no document
