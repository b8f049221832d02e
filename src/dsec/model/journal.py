"""Records of the journal, as values. How they are chained and stored is the store's affair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dsec.model.actors import actor

if TYPE_CHECKING:
    Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
else:  # what reads JSON by these annotations cannot follow a name into itself
    Json = Any


class Phase(StrEnum):
    """Intent comes before the act, result after it; a note stands alone."""

    INTENT = "intent"
    RESULT = "result"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A record before it is stored.

    Attributes:
        chain: whose chain it belongs to: a sandbox id, or "engine".
        act: dotted name, such as ``sandbox.create``, ``exec``, ``files.write``.
        ref: ties result to intent (an exec id, for instance), or "".
        payload: facts; contents and standard input by digest only.
        actor: who acted; as a rule whoever acts where the draft is made.
    """

    chain: str
    act: str
    phase: Phase
    ref: str = ""
    actor: str = field(default_factory=actor)
    payload: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A stored record.

    Attributes:
        chain: whose it is: a sandbox id, or "engine". seq: its number in that chain, from 1. at: seconds since the epoch.
        act: dotted name, such as ``sandbox.create``, ``exec``, ``files.write``. phase: before the act, after it, or a note.
        ref: ties result to intent, or "". actor: who acted. payload: facts. digest: SHA-256, over the record and the digest before it.
    """

    chain: str
    seq: int
    at: float
    act: str
    phase: Phase
    ref: str
    actor: str
    payload: Mapping[str, Json]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing wrong with the journal: the first bad record of a chain, or a tail that was cut."""

    chain: str
    seq: int
    problem: str
