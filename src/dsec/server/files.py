"""Files of sandboxes: content as raw bytes, everything else as JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dsec.model.checks import check_path
from dsec.model.files import Change, Entry, FileEvent, Listing, MakeDir, Remove, Rename, SetAttr, WriteOptions
from dsec.model.ids import parse_sandbox_id
from dsec.server.bodies import body_of, pieces_of
from dsec.server.context import Engine, answer
from dsec.server.documents import BYTES, EVENTS, call
from dsec.server.outflow import ending, outflow
from dsec.server.paths import ExactPath, User, named
from dsec.server.shapes import ChangeBody, MakeDirBody, RemoveBody, RenameBody
from dsec.server.streams import event, event_stream

router: Final = APIRouter(prefix="/v1/sandboxes/{sandbox}/files", tags=["files"])

MOST_ENTRIES: Final = 100_000
_ALL: Final = 2**63 - 1
Bytes = Annotated[int, Query(ge=0, le=_ALL)]
Mode = Annotated[int, Query(ge=0, le=0o7777, description="permission bits, as a decimal number")]


@router.get("/content", operation_id="readFile", summary="Read a file, or a part of it.")
@call(answer=BYTES)
async def read(
    sandbox: str, path: ExactPath, services: Engine, offset: Bytes = 0, length: Bytes = _ALL, user: User = ""
) -> Response:
    pieces = services.files.read(parse_sandbox_id(sandbox), path, offset=offset, length=length, user=user)
    return await outflow(pieces, BYTES, {"x-content-type-options": "nosniff"})


@router.put("/content", operation_id="writeFile", summary="Write a file: all of the body, however long.")
@call(body=BYTES, needed=False, answer=Entry)
async def write(
    request: Request,
    sandbox: str,
    path: ExactPath,
    services: Engine,
    user: User = "",
    mode: Mode = 0o644,
    create: bool = True,
    exclusive: bool = False,
    append: bool = False,
    parents: bool = False,
    atomic: bool = False,
    root: Annotated[str, Query(max_length=4095)] = "",
) -> Response:
    del root  # exactly, below
    options = WriteOptions(
        mode=mode,
        create=create,
        exclusive=exclusive,
        append=append,
        parents=parents,
        atomic=atomic,
        root=named(request, "root"),
    )
    written = await services.files.write(
        parse_sandbox_id(sandbox), path, pieces_of(request), options=options, user=user
    )
    return answer(written)


@router.get("/stat", operation_id="statFile", summary="See one file, directory or link.")
@call(answer=Entry)
async def stat(
    sandbox: str, path: ExactPath, services: Engine, follow: bool = True, user: User = ""
) -> Response:
    return answer(await services.files.stat(parse_sandbox_id(sandbox), path, follow=follow, user=user))


@router.get("/list", operation_id="listFiles", summary="List a directory, by name.")
@call(answer=Listing)
async def listed(
    sandbox: str,
    path: ExactPath,
    services: Engine,
    limit: Annotated[int, Query(ge=1, le=MOST_ENTRIES)] = MOST_ENTRIES,
    user: User = "",
) -> Response:
    return answer(await services.files.list(parse_sandbox_id(sandbox), path, limit=limit, user=user))


@router.post(
    "/change",
    operation_id="changeFiles",
    summary="Make a directory, rename, remove, or set attributes.",
    status_code=204,
)
@call(body=ChangeBody, status=204)
async def change(request: Request, sandbox: str, services: Engine, user: User = "") -> Response:
    which = parse_sandbox_id(sandbox)
    kind: Any = ChangeBody
    await services.files.change(which, change_of(await body_of(request, kind)), user=user)
    return Response(status_code=204)


def change_of(body: ChangeBody) -> Change:
    """The change that a body means.  Raises: BadRequest."""
    if isinstance(body, MakeDirBody):
        return MakeDir(body.path, body.mode, body.parents)
    if isinstance(body, RenameBody):
        return Rename(body.source, body.target, body.replace)
    if isinstance(body, RemoveBody):
        return Remove(body.path, body.recursive)
    check_path("path", body.path)
    return SetAttr(**msgspec.structs.asdict(body))


@router.get(
    "/watch",
    operation_id="watchFiles",
    summary="Follow what happens below a directory, as events: first `ready`, then `file`.",
)
@call(answer=EVENTS)
async def watch(
    request: Request,
    sandbox: str,
    path: ExactPath,
    services: Engine,
    recursive: bool = False,
    user: User = "",
) -> Response:
    found = await services.files.watch(parse_sandbox_id(sandbox), path, recursive=recursive, user=user)
    return await event_stream(request, _events(found))


async def _events(found: AsyncIterator[FileEvent]) -> AsyncIterator[bytes]:
    async with ending(found) as events:
        yield event("ready", {})
        async for each in events:
            yield event("file", each)
