"""The calls that agents make all the time are found without asking every route in turn.

They are routes like all others, with the same functions behind them and the same documents: this finds the function sooner.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from dsec.model.tenants import Principal
from dsec.ports.engine import Services
from dsec.server.traffic import ROUTE

Handler = Callable[[Request, Services, Principal], Awaitable[Response]]
Endpoint = Callable[..., Awaitable[Response]]

_TEMPLATES: Final = ("/v1/sandboxes", "/v1/sandboxes/{sandbox}", "/v1/sandboxes/{sandbox}/execs")
_PATH: Final = re.compile(r"/v1/sandboxes(?:/(sb-[a-z2-7]{26})(/execs)?)?")


class Hot:
    """Finds the function of a hot call.

    Args:
        endpoints: of ``POST /v1/sandboxes`` as ``create``, ``GET`` and ``DELETE`` of one as ``get`` and ``destroy``, ``POST …/execs`` as ``run``.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self._of = {
            ("POST", 0): endpoints["create"],
            ("GET", 1): endpoints["get"],
            ("DELETE", 1): endpoints["destroy"],
            ("POST", 2): endpoints["run"],
        }

    def find(self, scope: Scope) -> Handler | None:
        """None: it is none of these, or says more than they understand (a query)."""
        if scope["type"] != "http" or scope["query_string"]:
            return None
        match = _PATH.fullmatch(scope["path"])
        if match is None:
            return None
        endpoint = self._of.get((scope["method"], match.lastindex or 0))
        if endpoint is None:
            return None
        scope[ROUTE] = _TEMPLATES[match.lastindex or 0]
        sandbox = match.group(1)

        def handler(request: Request, services: Services, caller: Principal) -> Awaitable[Response]:
            if sandbox is None:
                return endpoint(request=request, services=services, caller=caller)
            return endpoint(request=request, services=services, caller=caller, sandbox=sandbox)

        return handler
