"""Formats of audit export: exact, valid, and one line an event whatever a sandbox writes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from ocsf_json_schema import OcsfJsonSchemaEmbedded, get_ocsf_schema  # type: ignore[import-untyped]

from dsec.model.journal import Json, Phase, Record
from dsec.observe.cef import BOUNDS
from dsec.observe.events import GAP, REWOUND, Event, Origin, abridged, event_of, statement
from dsec.observe.formats import FORMATS, LEAST_BYTES, line_of
from dsec.observe.ocsf import VERSION
from dsec.observe.ocsf_acts import ACTS, Class
from dsec.stores.chain import GENESIS, encode, link_fields

ORIGIN = Origin(host="machine", version="1.2.3")
SANDBOX = "sb-aaaaaaaaaaaaaaaaaaaaaaaaaa"
HOSTILE = 'a\n{"id":"forged"}\r\nCEF:0|x|y|1|forged|f|9|\u2028\x85\x1b[2J\0 \udc80 =|\\ act=forged \u202e'

# Every kind of character, with those that mean something to one of the formats more often than chance would have them.
hostile = st.text(
    st.one_of(
        st.sampled_from('\n\r\0\x1b\x85\u2028\u2029|\\="{} \udc80\ud83d\udc31\u202e'),
        st.characters(codec=None),
    )
)
facts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | hostile,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile, inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    "argv",
    "path",
    "source",
    "target",
    "outcome",
    "message",
    "exit_code",
    "duration",
    "bytes",
    "cwd",
    "uid",
    "level",
    "base",
    "base_digest",
    "project",
    "name",
)
payloads = st.dictionaries(st.sampled_from(KEYS) | hostile, facts | st.lists(hostile, max_size=3), max_size=6)


def record(act: str = "exec", payload: dict[str, Json] | None = None, **other: Any) -> Record:
    fields: dict[str, Any] = {
        "chain": SANDBOX,
        "seq": 7,
        "at": 1796078905.088282,
        "act": act,
        "phase": Phase.RESULT,
        "ref": "ex-1",
        "actor": "local",
        "payload": payload or {},
        "digest": "ab" * 32,
    }
    return Record(**{**fields, **other})


def records() -> st.SearchStrategy[Record]:
    return st.builds(
        record,
        act=st.sampled_from(sorted(ACTS)) | hostile.map(lambda text: text[:64]),
        payload=payloads,
        phase=st.sampled_from(Phase),
        ref=hostile.map(lambda text: text[:64]),
        actor=hostile.map(lambda text: text[:64]),
        chain=st.sampled_from([SANDBOX, "engine"]),
    )


# One line an event


@pytest.mark.parametrize("name", FORMATS)
@given(one=records(), limit=st.sampled_from([0, LEAST_BYTES]))
def test_no_text_can_forge_a_line(name: str, one: Record, limit: int) -> None:
    line = line_of(FORMATS[name], event_of(1, one), ORIGIN, limit)
    assert line.isascii()
    assert all(0x20 <= byte < 0x7F for byte in line)
    assert line.startswith(FORMATS[name].opening)
    assert not limit or len(line) <= limit


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_record_is_the_same_event(name: str) -> None:
    one, other = event_of(3, record()), event_of(3, record(payload={}))
    assert FORMATS[name].render(one, ORIGIN) == FORMATS[name].render(other, ORIGIN)
    assert (
        len(
            {
                event_of(3, record(**change)).uid
                for change in ({}, {"seq": 8}, {"digest": "cd"}, {"chain": "engine"})
            }
        )
        == 4
    )
    assert event_of(3, record()).uid.encode() in FORMATS[name].render(one, ORIGIN)


def test_an_event_that_is_too_long_tells_the_digest_of_what_is_left_out() -> None:
    whole = event_of(1, record(payload={"argv": ["x" * 60_000], "outcome": "failed", "exit_code": 3}))
    short = json.loads(line_of(FORMATS["jsonl"], whole, ORIGIN, LEAST_BYTES))
    assert short["id"] == whole.uid
    assert short["payload"] == {
        "abridged": True,
        "bytes": len(whole.data),
        "digest": "sha256:" + hashlib.sha256(whole.data.encode()).hexdigest(),
        "outcome": "failed",
        "exit_code": 3,
    }


# JSON lines


def _strict(line: bytes) -> Any:
    """As a reader that takes no lone surrogates, no NaN and no key twice."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in found}) == len(found)
        return dict(found)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    value = json.loads(line, object_pairs_hook=pairs, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


@given(one=records())
def test_jsonl_is_exact_and_readable_by_strict_readers(one: Record) -> None:
    read = _strict(FORMATS["jsonl"].render(event_of(9, one), ORIGIN))
    stored = base64.b64decode(read["payload_base64"]) if "payload_base64" in read else None
    exact = json.loads(stored) if stored is not None else read["payload"]
    assert exact == one.payload
    assert (read["at"], read["seq"], read["digest"]) == (one.at, one.seq, one.digest)


def test_what_is_exported_can_be_verified_by_its_digests() -> None:
    previous = GENESIS
    payloads: list[dict[str, Json]] = [{"argv": ["x", HOSTILE]}, {"outcome": "ok", "n": 1.5}]
    for seq, payload in enumerate(payloads, 1):
        fields = (SANDBOX, seq, 1796078905088282 + seq, "exec", "note", "r", "local")
        sha = hashlib.sha256(encode(payload)).digest()
        digest = link_fields(fields, payload_digest=sha, previous=previous)
        one = record(
            payload=payload, seq=seq, at=fields[2] / 1_000_000, phase=Phase.NOTE, ref="r", digest=digest.hex()
        )
        line = json.loads(FORMATS["jsonl"].render(event_of(seq, one), ORIGIN))
        data = (
            base64.b64decode(line["payload_base64"]) if "payload_base64" in line else encode(line["payload"])
        )
        again = (
            line["chain"],
            line["seq"],
            round(line["at"] * 1_000_000),
            *(line[key] for key in ("act", "phase", "ref", "actor")),
        )
        assert (
            link_fields(again, payload_digest=hashlib.sha256(data).digest(), previous=previous).hex()
            == line["digest"]
        )
        previous = digest


# CEF


def read_cef(line: str) -> tuple[list[str], dict[str, str]]:
    """By the rules of the format: header fields end at a bare |, values at the next ` key=` whose = is bare."""
    parts = _split(line)
    head, tail = parts[:7], parts[7]
    values: dict[str, str] = {}
    marks = list(re.finditer(r"(?:^| )([A-Za-z0-9_]+)(?<!\\)=", tail))
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        assert mark[1] not in values, f"{mark[1]} twice"
        values[mark[1]] = _unescaped(tail[mark.end() : following.start() if following else len(tail)], "\\=")
    return [_unescaped(one, "\\|") for one in head], values


def _split(line: str) -> list[str]:
    parts: list[str] = []
    current, rest = "", iter(line)
    for char in rest:
        if char == "\\":
            current += char + next(rest)
        elif char == "|" and len(parts) < 7:
            parts.append(current)
            current = ""
        else:
            current += char
    return [*parts, current]


def _unescaped(text: str, allowed: str) -> str:
    found, rest = "", iter(text)
    for char in rest:
        assert char == "\\" or char not in allowed, f"a bare {char!r}"
        escaped = next(rest) if char == "\\" else ""
        assert not escaped or escaped in allowed, f"\\{escaped} means nothing"
        found += escaped or char
    return found


@given(one=records())
def test_cef_keeps_its_fields_apart(one: Record) -> None:
    event = event_of(5, one)
    head, values = read_cef(FORMATS["cef"].render(event, ORIGIN).decode("ascii"))
    assert head[:4] == ["CEF:0", "DSec", "dsec", "1.2.3"]
    assert len(head) == 7
    assert 0 <= int(head[6]) <= 10
    assert [len(one) <= most for one, most in zip(head[1:6], (63, 63, 31, 255, 512), strict=True)] == [
        True
    ] * 5
    assert all(len(value) <= BOUNDS[key] for key, value in values.items())
    assert values["externalId"] == event.uid
    assert int(values["rt"]) == 1796078905088
    if len(event.data) <= BOUNDS["cs4"]:
        assert values["cs4"] == event.data


def test_cef_escapes_what_it_must() -> None:
    event = event_of(1, record(payload={"path": "a|b=c\\d\ne\x1b", "outcome": "ok"}, act="x|y\\z"))
    line = FORMATS["cef"].render(event, ORIGIN).decode()
    assert "|x\\|y\\\\z|" in line
    assert "filePath=a|b\\=c\\\\d\\\\x0ae\\\\x1b " in line


# OCSF


@cache
def validators() -> dict[int, Draft202012Validator]:
    source = get_ocsf_schema(VERSION)
    schema = OcsfJsonSchemaEmbedded(source)
    found = {}
    for name, one in source["classes"].items():
        if one["uid"] in {kind.uid for kind in Class}:
            found[one["uid"]] = Draft202012Validator(schema.get_class_schema(name, ["container", "host"]))
    return found


def checked(event: Event) -> dict[str, Any]:
    document: dict[str, Any] = _strict(FORMATS["ocsf"].render(event, ORIGIN))
    validator = validators()[document["class_uid"]]
    errors = [f"{'.'.join(map(str, one.path))}: {one.message}" for one in validator.iter_errors(document)]
    assert errors == []
    return document


@given(one=records())
def test_every_event_is_valid_by_the_schema(one: Record) -> None:
    for event in (event_of(5, one), abridged(event_of(5, one))):
        document = checked(event)
        assert document["metadata"]["uid"] == event.uid
        assert document["raw_data"] == event.data


def test_the_schema_refuses_what_is_wrong() -> None:
    document = checked(event_of(5, record()))
    assert list(validators()[1007].iter_errors({**document, "argv": "x"}))
    assert list(validators()[1007].iter_errors({**document, "type_uid": 1}))
    assert list(validators()[1007].iter_errors({key: document[key] for key in document if key != "process"}))


def test_names_of_classes_and_activities_are_those_of_the_schema() -> None:
    source = get_ocsf_schema(VERSION)
    classes = {one["uid"]: one for one in source["classes"].values()}
    for act, kind in ACTS.items():
        found = classes[kind.of.uid]
        assert found["caption"] == kind.of.title
        assert (
            found["attributes"]["category_uid"]["enum"][str(kind.of.category)]["caption"]
            == kind.of.category_title
        )
        activities = {
            int(key): one["caption"] for key, one in found["attributes"]["activity_id"]["enum"].items()
        }
        for number, name in ((kind.activity, kind.name), *([kind.end] if kind.end else [])):
            assert activities[number] == name, act


def test_what_a_command_is_in_ocsf() -> None:
    intent = record(
        phase=Phase.INTENT, payload={"argv": ["/bin/sh", "-c", HOSTILE], "cwd": "/w", "uid": 1000}
    )
    begun = checked(event_of(5, intent))
    assert (begun["activity_name"], begun["status"], begun["process"]["name"]) == ("Launch", "Asked", "sh")
    assert begun["process"]["user"] == {"uid": "1000"}
    assert begun["device"]["container"] == {"uid": SANDBOX}
    assert begun["time"] == 1796078905088
    assert begun["process"]["cmd_line"].isprintable()
    ended = checked(event_of(6, record(payload={"outcome": "timed_out", "exit_code": 9, "duration": 1.5})))
    assert (ended["activity_name"], ended["status"], ended["status_code"]) == (
        "Terminate",
        "Failure",
        "timed_out",
    )
    assert (ended["exit_code"], ended["duration"]) == (9, 1500)


def test_gaps_are_events_that_alert() -> None:
    for act in (GAP, REWOUND):
        told = checked(statement(act, 4, 1.0, {"records": 3, "chains": {SANDBOX: 3}}))
        assert (told["class_uid"], told["severity"]) == (1008, "High")


@pytest.mark.parametrize("act", sorted(ACTS))
@pytest.mark.parametrize("phase", Phase)
def test_every_act_is_valid(act: str, phase: Phase) -> None:
    kind = ACTS[act]
    payloads: list[dict[str, Json]] = [
        {},
        {"path": "/a/b", "outcome": "ok"},
        {"source": "/a", "target": HOSTILE},
        {"argv": []},
    ]
    for payload in payloads:
        document = checked(event_of(1, record(act, payload, phase=phase, ref="")))
        assert document["class_uid"] == kind.of.uid
        assert document["type_uid"] == kind.of.uid * 100 + document["activity_id"]


def test_an_act_that_nobody_knows_is_exported_all_the_same() -> None:
    document = checked(event_of(1, record("something.new", {"a": 1})))
    assert (document["class_uid"], document["activity_id"], document["api"]["operation"]) == (
        6003,
        99,
        "something.new",
    )
