"""The Open Cybersecurity Schema Framework, version 1.5.0: one JSON document a line, ASCII only.

What a sandbox chose stands in fields of fixed types, with escapes for what cannot be printed; the whole payload is ``raw_data``, a text.
So no record can make a reader refuse it, or fill an index with fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from posixpath import basename
from typing import Any, Final

from dsec.model.journal import Json, Phase, Record
from dsec.observe.cef import PRODUCT, VENDOR
from dsec.observe.events import LOG, Event, Origin
from dsec.observe.ocsf_acts import ACTS, UNKNOWN, Class, Kind
from dsec.observe.text import visible
from dsec.observe.verdict import Verdict, verdict_of

VERSION: Final = "1.5.0"
_PROFILES: Final = ["container", "host"]
_SEVERITY: Final = {
    Verdict.ASKED: (1, "Informational"),
    Verdict.DONE: (1, "Informational"),
    Verdict.FAILED: (2, "Low"),
    Verdict.ALERT: (4, "High"),
}
_STATUS: Final = {
    Verdict.ASKED: (99, "Asked"),
    Verdict.DONE: (1, "Success"),
    Verdict.FAILED: (2, "Failure"),
    Verdict.ALERT: (2, "Failure"),
}
_TEXT: Final = 8192  # characters of a field that a sandbox chose
_NAME: Final = 512
_INT: Final = 2**31 - 1
_UNKNOWN_FILE, _FILE, _FOLDER = 0, 1, 2
_FOLDERS: Final = frozenset({"files.mkdir", "files.upload", "files.unpack", "files.pack", "files.batch"})

Fields = dict[str, Any]


def ocsf(event: Event, origin: Origin) -> bytes:
    """One line, without its end."""
    return json.dumps(document(event, origin), separators=(",", ":")).encode("ascii")


def document(event: Event, origin: Origin) -> Fields:
    """An event of the class that its act has."""
    record = event.record
    kind = ACTS.get(record.act, UNKNOWN)
    activity, name = _activity(kind, record)
    verdict = verdict_of(record)
    severity, severity_name = _SEVERITY[verdict]
    status, status_name = _STATUS[verdict]
    fields: Fields = {
        "activity_id": activity,
        "activity_name": name,
        "category_uid": kind.of.category,
        "category_name": kind.of.category_title,
        "class_uid": kind.of.uid,
        "class_name": kind.of.title,
        "type_uid": kind.of.uid * 100 + activity,
        "type_name": f"{kind.of.title}: {name}",
        "time": round(record.at * 1000),
        "severity_id": severity,
        "severity": severity_name,
        "status_id": status,
        "status": status_name,
        "message": visible(f"{record.act} {record.phase.value}", _NAME),
        "metadata": _metadata(event, origin),
        "actor": {"user": {"uid": visible(record.actor, _NAME) or "unknown"}},
        "device": _device(record, origin),
        "unmapped": _unmapped(record),
        "raw_data": event.data,
    }
    _outcome(fields, record.payload)
    _OF_CLASS[kind.of](fields, event, origin)
    return fields


def _activity(kind: Kind, record: Record) -> tuple[int, str]:
    if kind.end is not None and record.phase is Phase.RESULT:
        return kind.end
    return kind.activity, kind.name


def _metadata(event: Event, origin: Origin) -> Fields:
    record = event.record
    metadata: Fields = {
        "version": VERSION,
        "product": {"name": PRODUCT, "vendor_name": VENDOR, "version": origin.version},
        "profiles": _PROFILES,
        "uid": event.uid,
        "event_code": visible(record.act, _NAME),
        "sequence": event.position,
        "log_name": "journal",
        "log_provider": PRODUCT,
    }
    if record.ref:
        metadata["correlation_uid"] = visible(record.ref, _NAME)
    project = record.payload.get("project")
    if isinstance(project, str) and project:
        metadata["tenant_uid"] = visible(project, _NAME)
    return metadata


def _device(record: Record, origin: Origin) -> Fields:
    device: Fields = {"type_id": 1, "type": "Server", "hostname": origin.host}
    if record.chain != LOG:
        device["container"] = _container(record)
    return device


def _container(record: Record) -> Fields:
    container: Fields = {"uid": visible(record.chain, _NAME)}
    level, image = record.payload.get("level"), record.payload.get("base_digest")
    if isinstance(level, str) and level:
        container["runtime"] = visible(level, _NAME)
    if isinstance(image, str) and image:
        container["image"] = {"uid": visible(image, _NAME)}
        base = record.payload.get("base")
        if isinstance(base, str) and base:
            container["image"]["name"] = visible(base, _NAME)
    return container


def _unmapped(record: Record) -> Fields:
    return {
        "chain": record.chain,
        "seq": record.seq,
        "phase": record.phase.value,
        "ref": visible(record.ref, _NAME),
        "digest": record.digest,
    }


def _outcome(fields: Fields, payload: Any) -> None:
    outcome, message, seconds = (payload.get(key) for key in ("outcome", "message", "duration"))
    if isinstance(outcome, str) and outcome:
        fields["status_code"] = visible(outcome, _NAME)
    if isinstance(message, str) and message:
        fields["status_detail"] = visible(message, _TEXT)
    if isinstance(seconds, int | float) and 0 <= seconds < _INT / 1000:
        fields["duration"] = round(seconds * 1000)


def _whole(value: Json) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and -_INT <= value <= _INT:
        return value
    return None


def _api(fields: Fields, event: Event, origin: Origin) -> None:
    record = event.record
    fields["api"] = {"operation": visible(record.act, _NAME), "service": {"name": PRODUCT}}
    fields["src_endpoint"] = {"hostname": origin.host, "svc_name": PRODUCT}
    fields["resources"] = _resources(record)


def _resources(record: Record) -> list[Fields]:
    found = [{"uid": record.chain, "type": "sandbox"}] if record.chain != LOG else []
    if record.ref:
        found.append({"uid": visible(record.ref, _NAME), "type": record.act.split(".", 1)[0][:_NAME]})
    name = record.payload.get("name")
    if isinstance(name, str) and name and record.ref:
        found[-1]["name"] = visible(name, _NAME)
    return found or [{"uid": record.chain, "type": "log"}]


def _process(fields: Fields, event: Event, origin: Origin) -> None:
    del origin
    record, payload = event.record, event.record.payload
    process: Fields = {"uid": visible(record.ref, _NAME) or event.uid}
    if record.chain != LOG:
        process["container"] = {"uid": visible(record.chain, _NAME)}
    argv = payload.get("argv")
    if isinstance(argv, list) and argv:
        words = [one if isinstance(one, str) else str(one) for one in argv]
        process["cmd_line"] = visible(" ".join(words), _TEXT)
        process["name"] = visible(basename(words[0]) or words[0], _NAME) or "?"
    cwd, uid = payload.get("cwd"), _whole(payload.get("uid"))
    if isinstance(cwd, str) and cwd:
        process["working_directory"] = visible(cwd, _TEXT)
    if uid is not None:
        process["user"] = {"uid": str(uid)}
    fields["process"] = process
    exit_code = _whole(payload.get("exit_code"))
    if exit_code is not None:
        fields["exit_code"] = exit_code


def _file(fields: Fields, event: Event, origin: Origin) -> None:
    del origin
    record, payload = event.record, event.record.payload
    source, target = payload.get("source"), payload.get("target")
    size = payload.get("bytes")
    kind = _FOLDER if record.act in _FOLDERS else _UNKNOWN_FILE
    if record.act in ("files.read", "files.write"):
        kind = _FILE
    fields["file"] = _file_of(source if isinstance(source, str) else payload.get("path"), kind)
    if isinstance(target, str):
        fields["file_result"] = _file_of(target, kind)
    if kind == _FILE and isinstance(size, int) and 0 <= size < 2**53:
        fields["file"]["size"] = size


def _file_of(path: Json, kind: int) -> Fields:
    path = path if isinstance(path, str) else ""
    name = visible(basename(path.rstrip("/")), _NAME) or "/"
    file: Fields = {"name": name, "type_id": kind}
    if path:
        file["path"] = visible(path, _TEXT)
    return file


def _log(fields: Fields, event: Event, origin: Origin) -> None:
    del event, origin
    fields["log_name"] = "journal"
    fields["log_provider"] = PRODUCT
    fields["log_type_id"] = 99
    fields["log_type"] = "Audit"


def _user(fields: Fields, event: Event, origin: Origin) -> None:
    """Of a key: the account that it is."""
    del origin
    record = event.record
    fields["user"] = {"uid": visible(record.ref or record.actor, _NAME) or "unknown"}


def _authentication(fields: Fields, event: Event, origin: Origin) -> None:
    _user(fields, event, origin)
    fields["service"] = {"name": PRODUCT}


def _entity(fields: Fields, event: Event, origin: Origin) -> None:
    del origin
    record = event.record
    name = record.payload.get("name")
    uid = record.ref or (name if isinstance(name, str) else "") or record.act
    fields["entity"] = {
        "uid": visible(uid, _NAME),
        "type_id": 99,
        "type": record.act.split(".", 1)[0][:_NAME],
    }


_OF_CLASS: Final[dict[Class, Callable[[Fields, Event, Origin], None]]] = {
    Class.API: _api,
    Class.PROCESS: _process,
    Class.FILE: _file,
    Class.LOG: _log,
    Class.ACCOUNT: _user,
    Class.AUTHENTICATION: _authentication,
    Class.ENTITY: _entity,
}
