"""ArcSight Common Event Format: one line of ASCII an event, with keys of its dictionary, each within its bound.

Header fields escape ``\\`` and ``|``, values of the extension ``\\`` and ``=``. No control character is ever written: what a sandbox chose
appears as escapes, and cannot begin a line, a field or another event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsec.model.journal import Phase
from dsec.observe.events import Event, Origin
from dsec.observe.text import ascii_only
from dsec.observe.verdict import Verdict, verdict_of

VENDOR: Final = "DSec"
PRODUCT: Final = "dsec"
BOUNDS: Final = {
    "rt": 20,
    "externalId": 40,
    "act": 63,
    "outcome": 63,
    "reason": 1023,
    "cat": 1023,
    "suser": 1023,
    "dvchost": 100,
    "deviceProcessName": 1023,
    "filePath": 1023,
    "msg": 1023,
    "cn1": 20,
    "cn1Label": 1023,
    "cn2": 20,
    "cn2Label": 1023,
    "cn3": 20,
    "cn3Label": 1023,
    "cs1": 4000,
    "cs1Label": 1023,
    "cs2": 4000,
    "cs2Label": 1023,
    "cs3": 4000,
    "cs3Label": 1023,
    "cs4": 4000,
    "cs4Label": 1023,
    "cs5": 4000,
    "cs5Label": 1023,
}
"""Keys of the dictionary that are used, and how many characters their values may have (before escaping)."""
_SEVERITY: Final = {Verdict.DONE: 3, Verdict.ASKED: 2, Verdict.FAILED: 6, Verdict.ALERT: 8}
_HEADER: Final = 512
_PATHS: Final = ("path", "source")


def cef(event: Event, origin: Origin) -> bytes:
    """One line, without its end."""
    record = event.record
    name = f"{record.act} {record.phase.value}"
    head = "|".join(
        (
            "CEF:0",
            _head(VENDOR, 63),
            _head(PRODUCT, 63),
            _head(origin.version, 31),
            _head(record.act, 255),
            _head(name, _HEADER),
            str(_SEVERITY[verdict_of(record)]),
        )
    )
    tail = " ".join(f"{key}={_value(value, BOUNDS[key])}" for key, value in _extension(event, origin))
    return f"{head}|{tail}".encode("ascii")


def _extension(event: Event, origin: Origin) -> Iterator[tuple[str, str]]:
    record = event.record
    yield "rt", str(round(record.at * 1000))
    yield "externalId", event.uid
    yield "dvchost", origin.host
    yield "suser", record.actor
    yield "act", record.act
    yield "cat", record.phase.value
    outcome = record.payload.get("outcome")
    if record.phase is not Phase.INTENT and isinstance(outcome, str):
        yield "outcome", outcome
    message = record.payload.get("message")
    if isinstance(message, str) and message:
        yield "reason", message
    for key in _PATHS:
        path = record.payload.get(key)
        if isinstance(path, str):
            yield "filePath", path
            break
    for key, label, value in (
        ("cn1", "seq", str(record.seq)),
        ("cn2", "position", str(event.position)),
        ("cs1", "chain", record.chain),
        ("cs2", "ref", record.ref),
        ("cs3", "digest", record.digest),
        ("cs4", "payload", event.data),
    ):
        if value:
            yield key, value
            yield f"{key}Label", label
    exit_code = record.payload.get("exit_code")
    if isinstance(exit_code, int):
        yield "cn3", str(exit_code)[:20]
        yield "cn3Label", "exitCode"


def _head(text: str, limit: int) -> str:
    return ascii_only(text, limit).replace("\\", "\\\\").replace("|", "\\|")


def _value(text: str, limit: int) -> str:
    return ascii_only(text, limit).replace("\\", "\\\\").replace("=", "\\=")
