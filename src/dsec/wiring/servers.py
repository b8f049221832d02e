"""Reaching engines behind servers. Nothing here loads what makes an engine."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Final

from dsec.client.aio_link import Connect
from dsec.ports.engine import Services
from dsec.remote.endpoint import check_key, parse_endpoint
from dsec.runtimes.local_trees import LocalArchives

API_KEY: Final = "DSEC_API_KEY"
"""The variable that holds the key of a server."""


def server(url: str, api_key: str | None = None) -> Connect:
    """What opens the engine behind a server.

    Args:
        api_key: None = ``$DSEC_API_KEY``, "" = none.

    Raises:
        BadRequest: no URL of a server, or no key; neither is repeated with what it should have kept to itself.
    """
    endpoint = parse_endpoint(url)
    key = check_key(os.environ.get(API_KEY, "") if api_key is None else api_key)

    async def connect() -> Services:
        services = import_module(
            "dsec.remote.services"
        )  # its HTTP library is slow to load, and needed for nothing else
        opened: Services = await services.connect(endpoint, key, LocalArchives())
        return opened

    return connect
