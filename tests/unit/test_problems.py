"""Errors across HTTP: every one makes the trip, and what a server makes up breaks nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsec.errors import DsecError, NotFound, all_errors
from dsec.wire.problems import STATUS, from_body, to_body

KINDS = [kind for kind in all_errors() if kind.__module__ == DsecError.__module__]  # one of each code


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_every_error_survives_the_trip(kind: type[DsecError]) -> None:
    facts: dict[str, Any] = {"path": "/a", "count": 3, "ratio": 0.5, "all": ["a", "b"], "none": None}
    sent = kind("what happened", hint="what to do", **facts)
    came = from_body(json.loads(json.dumps(to_body(sent))), STATUS[kind.code])
    assert type(came) is kind
    assert (came.code, came.retryable) == (kind.code, kind.retryable)
    assert (came.message, came.hint, came.facts) == ("what happened", "what to do", facts)


def test_a_fact_that_json_does_not_have_is_text() -> None:
    facts = to_body(NotFound("no", where={"a": 1}, names=("a", b"b")))["error"]["facts"]
    assert facts == {"where": "{'a': 1}", "names": ["a", "b'b'"]}


@pytest.mark.parametrize("name", ["self", "message", "hint"])
def test_facts_that_are_parameters_are_passed_over(name: str) -> None:
    body = {"error": {"code": "not_found", "message": "no", "hint": "look", "facts": {name: "x", "a": 1}}}
    came = from_body(body, 404)
    assert (type(came), came.message, came.hint, came.facts) == (NotFound, "no", "look", {"a": 1})


@pytest.mark.parametrize("body", [None, [], "x", {}, {"error": []}, {"error": {"message": 3}}])
def test_what_is_no_error_is_told_by_its_status(body: object) -> None:
    assert type(from_body(body, 404)) is NotFound
    assert type(from_body(body, 418)) is DsecError
