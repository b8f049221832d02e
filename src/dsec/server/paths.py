"""Names of files in a query, exactly: what is no UTF-8 is kept as surrogate escapes."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import unquote_to_bytes

from fastapi import Depends, Query, Request

from dsec.errors import BadRequest
from dsec.model.checks import check_path

_Path = Annotated[
    str, Query(min_length=1, description="relative to the working directory; any bytes, percent-encoded")
]


def exact_path(request: Request, path: _Path) -> str:
    """The parameter ``path``.  Raises: BadRequest: given twice, or no path."""
    del path  # decoded with replacement characters: for the documents
    given = named(request, "path")
    check_path("path", given)
    return given


def named(request: Request, name: str, default: str = "") -> str:
    """A parameter of the query, its bytes as a file system has them.  Raises: BadRequest: it is given twice."""
    raw: bytes = request.scope["query_string"]
    found = [
        value
        for field in raw.split(b"&")
        for key, _, value in (field.partition(b"="),)
        if key == name.encode()
    ]
    if len(found) > 1:
        raise BadRequest(f"{name}: it is given twice", field=name)
    if not found:
        return default
    return unquote_to_bytes(found[0].replace(b"+", b" ")).decode("utf-8", "surrogateescape")


ExactPath = Annotated[str, Depends(exact_path)]
User = Annotated[str, Query(max_length=255, description="as for a command")]
