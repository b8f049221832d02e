"""The OpenAPI document as one page to read, without a script: a browser keeps the key that opens it, and foreign code beside it could use that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

PATH: Final = "/docs"
_METHODS: Final = ("get", "post", "put", "patch", "delete", "head")
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b}"
    "code,pre{font:13px/1.45 ui-monospace,monospace}pre{background:#f5f5f3;padding:.6rem;overflow:auto}"
    "summary{cursor:pointer;padding:.25rem 0}.m{display:inline-block;min-width:4.2rem;font-weight:600}"
    "table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0}"
    "details{border-bottom:1px solid #e3e3df}details>*:not(summary){margin-left:1rem}"
)


def route() -> Route:
    """``GET /docs`` of the application that it is put into."""
    return Route(PATH, _answer, methods=["GET"], include_in_schema=False)


async def _answer(request: Request) -> Response:
    headers = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer"}
    return HTMLResponse(page(request.app.openapi()), headers=headers)


def page(document: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI document: its calls by tag, then its shapes."""
    info = document["info"]
    body = "".join(_body(document))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f"<p>{escape(info.get('description', ''))}</p>"
        f'<p>For programs: <a href="/openapi.json">openapi.json</a>.</p>{body}</body></html>'
    )


def _body(document: Mapping[str, Any]) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                operation = item[method]
                tag = (operation.get("tags") or ["other"])[0]
                by_tag.setdefault(tag, []).append("".join(_operation(method, path, operation)))
    for tag, operations in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(operations)}"
    yield "<h2>shapes</h2>"
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f'<details id="{escape(operation.get("operationId", ""))}"><summary><span class="m">{method.upper()}</span>'
    yield f"<code>{escape(path)}</code> {escape(operation.get('summary', ''))}</summary>"
    if operation.get("description"):
        yield f"<p>{escape(operation['description'])}</p>"
    parameters = operation.get("parameters", [])
    if parameters:
        rows = "".join(
            f"<tr><td><code>{escape(one['name'])}</code></td><td>{escape(one['in'])}{', required' if one.get('required') else ''}</td>"
            f"<td>{escape(one.get('description', ''))}</td></tr>"
            for one in parameters
            if "name" in one
        )
        yield f"<table>{rows}</table>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, <code>{escape(kind)}</code>:</p>{_shape(content.get('schema', {}))}"
    yield "<table>"
    for status, answer in operation.get("responses", {}).items():
        shapes = "".join(_shape(content.get("schema", {})) for content in answer.get("content", {}).values())
        yield f"<tr><td>{escape(str(status))}</td><td>{escape(answer.get('description', ''))}</td><td>{shapes}</td></tr>"
    yield "</table></details>"


def _shape(schema: Mapping[str, Any]) -> str:
    """A link to a shape that has a name, or what it is."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name:
        return f'<a href="#{escape(name)}"><code>{escape(name)}</code></a>'
    return _json(schema) if schema else ""


def _json(schema: object) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=1, ensure_ascii=False))}</pre>"
