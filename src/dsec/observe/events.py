"""What is exported: records of the journal with a stable id, and what an export has to say about itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from dsec.model.journal import Json, Phase, Record

LOG: Final = "engine"
"""The chain that events without a sandbox belong to."""
GAP: Final = "export.gap"
REWOUND: Final = "export.rewound"
_NAME: Final = 64  # characters of a name that are kept when an event must be short
_UID: Final = 32
_INT: Final = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where events come from: the name of the machine, and the version of DSec."""

    host: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event.

    Attributes:
        uid: the same whenever and however often the record is exported; 32 hexadecimal digits.
        position: of the record among all of the journal.
        record: what happened. data: its payload as canonical JSON, ASCII only.
    """

    uid: str
    position: int
    record: Record
    data: str


def canonical(payload: Mapping[str, Json]) -> str:
    """As the journal stores it: sorted keys, no spaces, ASCII."""
    return json.dumps(payload, sort_keys=True, separators=(",", ":"))


def event_of(position: int, record: Record) -> Event:
    """A record as an event: its id follows from its chain, its number and its digest."""
    uid = _uid(record.chain, str(record.seq), record.digest)
    return Event(uid=uid, position=position, record=record, data=canonical(record.payload))


def statement(act: str, position: int, at: float, payload: Mapping[str, Json]) -> Event:
    """What an export says about itself: a record that is in no chain (``seq`` 0, no digest). The same facts have the same id."""
    record = Record(
        chain=LOG,
        seq=0,
        at=at,
        act=act,
        phase=Phase.NOTE,
        ref="",
        actor="local",
        payload=payload,
        digest="",
    )
    data = canonical(payload)
    return Event(uid=_uid(act, str(position), data), position=position, record=record, data=data)


def _uid(*parts: str) -> str:
    return sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_UID]


def abridged(event: Event) -> Event:
    """The same event without its payload, of which size and digest are told, and with short names."""
    record = event.record
    facts: dict[str, Json] = {
        "abridged": True,
        "bytes": len(event.data),
        "digest": "sha256:" + sha256(event.data.encode("ascii")).hexdigest(),
    }
    outcome, exit_code = record.payload.get("outcome"), record.payload.get("exit_code")
    if isinstance(outcome, str):
        facts["outcome"] = outcome[:_NAME]
    if isinstance(exit_code, int) and -_INT <= exit_code <= _INT:
        facts["exit_code"] = exit_code
    short = replace(
        record,
        payload=facts,
        act=record.act[:_NAME],
        ref=record.ref[:_NAME],
        actor=record.actor[:_NAME],
    )
    return replace(event, record=short, data=canonical(facts))
