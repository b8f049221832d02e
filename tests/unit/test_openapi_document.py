"""The OpenAPI document: it is valid, says all that there is, and the same of everything."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, cast

import jsonschema_rs
import pytest
import schemathesis
from fastapi.routing import APIRoute

from dsec.ports.gate import Gate
from dsec.server.app import ROUTERS, make_app
from dsec.wire.problems import STATUS

FAILURE: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/Failure"}}}
_MAKING: Final = re.compile("(create|build|import|promote|take|fork|rollback|decide|exec$)")
"""In the name of an operation: it makes something."""
NOT_TWICE: Final = {
    "createKey": "its answer is a secret that is kept nowhere, so that nobody could repeat it",
    "createSandboxToken": "as createKey",
    "importTemplate": "what comes in has its own digest: twice is once",
    "importSnapshot": "its body has no bound, and could not be told from another one before its end",
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return make_app(cast("Gate", object())).openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, calls in document["paths"].items():
        for method, said in calls.items():
            yield method, path, said


def test_it_is_a_valid_openapi_3_1(document: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    assert document["openapi"].startswith("3.1")
    assert schema.validate() is None
    found = sum(1 for _ in schema.get_all_operations())
    assert found == sum(1 for _ in operations(document))


def test_every_route_is_in_it(document: dict[str, Any]) -> None:
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                assert {each.lower() for each in route.methods} <= document["paths"][route.path_format].keys()
            if isinstance(route, APIRoute) and not route.include_in_schema:
                assert "/ports/" in route.path, "what is left out"


def test_each_operation_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    names = Counter(said["operationId"] for _, _, said in operations(document))
    assert [name for name, count in names.items() if count > 1] == []
    for _, _, said in operations(document):
        assert said["summary"]
        assert said["tags"]


def test_each_operation_says_how_it_fails_and_who_may_ask(document: dict[str, Any]) -> None:
    assert document["security"]
    assert set(document["components"]["securitySchemes"]) == {
        name for one in document["security"] for name in one
    }
    for _, path, said in operations(document):
        if path == "/health":
            assert said["security"] == []
            continue
        assert "security" not in said
        for status in {400, 401, 403, 404, 405, 409, 413, 429, 431, 500, 503, 507, *STATUS.values()}:
            assert said["responses"][str(status)]["content"] == FAILURE, (path, status)
        assert any(status.startswith("2") for status in said["responses"])


def test_each_call_that_makes_something_takes_a_key(document: dict[str, Any]) -> None:
    without = set()
    for method, _, said in operations(document):
        takes = any(each["name"] == "Idempotency-Key" for each in said.get("parameters", ()))
        makes = method == "post" and ("201" in said["responses"] or _MAKING.match(said["operationId"]))
        if makes and not takes:
            without.add(said["operationId"])
    assert without == set(NOT_TWICE)


def test_every_schema_is_one_and_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
        for value, inner in examples(schema):
            whole = {**inner, "components": document["components"]}
            jsonschema_rs.Draft202012Validator(whole).validate(value)
    for place in references(document):
        assert place.removeprefix("#/components/schemas/") in schemas


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def examples(schema: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each example and default, and the schema that it is of."""
    if isinstance(schema, dict):
        given = [schema["default"]] if "default" in schema else []
        for value in (*given, *schema.get("examples", ())):
            yield value, {key: each for key, each in schema.items() if key not in ("default", "examples")}
        for inner in schema.values():
            yield from examples(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from examples(inner)
