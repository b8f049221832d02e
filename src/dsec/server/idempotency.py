"""Creating calls with an ``Idempotency-Key``: done once, however often they are asked.

The key is stored before the act and its answer after it: before the answer is given, or, where what was made can be found again, while it is
given. When something came between the two, the next one who asks is answered by what the first try made, which carries the request's mark; where
nobody can know that, the answer is ``unknown_outcome``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from hashlib import sha256
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from dsec.errors import BadRequest, DsecError, UnknownOutcome, Unsupported
from dsec.model.tenants import Principal, Scope
from dsec.ports.engine import Services
from dsec.ports.idempotency import Begun, IdempotencyStore, Recorded
from dsec.server.bodies import MAX_JSON, collected
from dsec.server.context import principal_of, services_of
from dsec.server.failures import failure

Endpoint = Callable[..., Awaitable[Response]]
Record = Callable[[], Coroutine[Any, Any, None]]

log: Final = logging.getLogger("dsec.server")
HEADER: Final = "idempotency-key"
REPLAY: Final = "idempotent-replay"
MARK: Final = "dsec.request"
"""In the scope of a request: its digest, which goes into what it makes."""
_KEY: Final = re.compile(r"[!-~]{1,255}")
TOGETHER: Final = 0.02  # seconds in which answers are gathered that are recorded in one transaction
_LENGTH: Final = 32  # hexadecimal digits of a mark
_HARMLESS: Final = frozenset(
    {
        *(
            "bad_request",
            "unauthenticated",
            "denied",
            "not_found",
            "conflict",
            "too_large",
            "busy",
            "over_quota",
        ),
        *("unsupported", "isolation_unavailable", "build_failed", "file_not_found", "file_denied"),
    }
)
"""Codes that say that nothing was made."""


class Recover(Protocol):
    """Finds what an earlier try made.

    Returns the answer that it would have had; None: it made nothing, for certain.

    Raises:
        UnknownOutcome: nobody can know.
    """

    def __call__(
        self, services: Services, caller: Principal, mark: str, begun: Begun, **arguments: Any
    ) -> Awaitable[Response | None]: ...


class Flights:
    """Requests that are being done here and now, by project and key as they are kept."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], asyncio.Event] = {}
        self._gathered: list[tuple[tuple[str, str], Record]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._landing: set[asyncio.Task[None]] = set()

    async def enter(self, name: tuple[str, str]) -> None:
        """Wait until nobody else does it."""
        while (other := self._of.get(name)) is not None:
            await other.wait()
        self._of[name] = asyncio.Event()

    def leave(self, name: tuple[str, str]) -> None:
        self._of.pop(name).set()

    def land(self, name: tuple[str, str], record: Record) -> None:
        """Leave when the answer is recorded, soon, with others; whoever asks the same meanwhile waits for that."""
        self._gathered.append((name, record))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TOGETHER, self._land)

    def _land(self) -> None:
        gathered, self._gathered, self._timer = self._gathered, [], None
        for name, record in gathered:
            task = asyncio.get_running_loop().create_task(self._recorded(name, record))
            self._landing.add(task)
            task.add_done_callback(self._landing.discard)

    async def land_all(self) -> None:
        """Return when all answers are recorded."""
        if self._timer is not None:
            self._timer.cancel()
            self._land()
        if self._landing:
            await asyncio.wait(set(self._landing))

    async def _recorded(self, name: tuple[str, str], record: Record) -> None:
        try:
            await record()
        except DsecError as error:  # then what was made is looked for
            log.warning("the answer of a request is not recorded: %s", error)
        finally:
            self.leave(name)


def mark_of(request: Request) -> str:
    """The mark that what it makes is to carry, "" = none."""
    return str(request.scope.get(MARK, ""))


def once(endpoint: Endpoint, recover: Recover | None, *, findable: bool = False) -> Endpoint:
    """The same endpoint, which with an ``Idempotency-Key`` does a thing once. It takes ``request``.

    Args:
        findable: ``recover`` finds what was made for certain, so that the answer need not wait until it is recorded.
    """
    if "request" not in inspect.signature(endpoint).parameters:
        raise TypeError(f"{endpoint.__name__} has no parameter `request`")

    @wraps(endpoint)
    async def guarded(**arguments: Any) -> Response:
        request: Request = arguments["request"]
        key = request.headers.get(HEADER)
        if key is None:
            return await endpoint(**arguments)
        return await _guarded(endpoint, recover, request, key, arguments, later=findable)

    return guarded


async def _guarded(
    endpoint: Endpoint,
    recover: Recover | None,
    request: Request,
    key: str,
    arguments: dict[str, Any],
    *,
    later: bool,
) -> Response:
    store = getattr(request.app.state, "idempotency", None)
    if not isinstance(store, IdempotencyStore):
        raise Unsupported("Idempotency-Key: this server keeps none", hint="leave it out")
    if not _KEY.fullmatch(key):
        raise BadRequest("Idempotency-Key: it is not 1 to 255 printable characters of ASCII")
    raw = await collected(request, MAX_JSON)
    name = _name(principal_of(request), key)
    digest = _digest(request, name, raw)
    flights: Flights = request.app.state.flights
    await flights.enter(name)
    landing: Record | None = None
    try:
        begun = await store.begin(*name, digest)
        if begun.answer is not None:
            return _replayed(begun.answer)
        request.scope[MARK] = digest[:_LENGTH]
        if not begun.fresh:
            looking = Request(request.scope, _again(raw, request.receive))
            found = await _recovered(recover, looking, begun, arguments)
            if found is not None:
                await store.finish(*name, _recorded(found))
                return _replayed(_recorded(found))
        fresh = Request(request.scope, _again(raw, request.receive))
        answer = await _done(store, name, endpoint, {**arguments, "request": fresh})
        record = partial(store.finish, *name, _recorded(answer))
        if later:
            landing = record
        else:
            await record()
        return answer
    finally:
        if landing is None:
            flights.leave(name)
        else:
            flights.land(name, landing)


async def _done(
    store: IdempotencyStore, name: tuple[str, str], endpoint: Endpoint, arguments: dict[str, Any]
) -> Response:
    """Do it. What failed and may have been done all the same stays begun: the next one who asks looks for it."""
    try:
        return await endpoint(**arguments)
    except DsecError as error:
        if error.code in _HARMLESS:
            await store.forget(*name)
        elif isinstance(error, UnknownOutcome):
            await store.finish(*name, _recorded(failure(error)))
        raise


async def _recovered(
    recover: Recover | None, request: Request, begun: Begun, arguments: dict[str, Any]
) -> Response | None:
    if recover is None:
        raise UnknownOutcome(
            "the server was interrupted while it did this, and cannot know how far it came",
            hint="look at what is there, then ask again with another key",
            begun=begun.at,
        )
    given = {**arguments, "request": request}
    services, caller = services_of(request), principal_of(request)
    given.pop("services", None)
    given.pop("caller", None)
    return await recover(services, caller, mark_of(request), begun, **given)


def _name(caller: Principal, key: str) -> tuple[str, str]:
    """Project and key as they are kept. Answers are for those who may ask: a sandbox's token, a developer and an admin share none."""
    match caller.scope:
        case Scope.DEVELOPER:
            return caller.project, key
        case Scope.SANDBOX:
            return caller.project, f"{caller.sandbox} {key}"  # no key has a space
        case Scope.ADMIN:
            return caller.project, f"admin {key}"


def _digest(request: Request, name: tuple[str, str], raw: bytes) -> str:
    """Of everything that is asked, and by whom."""
    parts = (
        request.method.encode(),
        request.url.path.encode("utf-8", "surrogateescape"),
        request.scope["query_string"],
        *(part.encode() for part in name),
        raw,
    )
    whole = sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()


def _again(raw: bytes, receive: Receive) -> Receive:
    """A body that was read, once more."""
    first = True

    async def again() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": raw, "more_body": False}
        return await receive()

    return again


def _recorded(answer: Response) -> Recorded:
    return Recorded(status=answer.status_code, media_type=answer.media_type or "", body=bytes(answer.body))


def _replayed(answer: Recorded) -> Response:
    return Response(
        answer.body, answer.status, media_type=answer.media_type or None, headers={REPLAY: "true"}
    )
