"""What end-to-end tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec import Dsec, Settings
from dsec.testing.serving import stop_server_of


@pytest.fixture(scope="session")
def image_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One image store for the whole run. The base image is built here, and what a process opens once for good (the event
    loop's library has a pipe) is open from here on, so that no census counts it."""
    store = tmp_path_factory.mktemp("images")
    with Dsec(settings=Settings(images=store, pool=0)) as engine:
        engine.sandboxes.create(level="container" if os.geteuid() == 0 else "process").destroy()
    return store


@pytest.fixture(autouse=True)
def _servers_end(_test_leaves_nothing: None, tmp_path: Path) -> Iterator[None]:
    """Commands of ours start a server for the home that they are given: it ends with the test, before what is left is counted."""
    del _test_leaves_nothing
    yield
    for pattern in ("dsec.sock", "*/dsec.sock", "*/*/dsec.sock"):
        for place in tmp_path.glob(pattern):
            stop_server_of(place.parent)
