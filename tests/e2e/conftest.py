"""What end-to-end tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec import Dsec, Settings


@pytest.fixture(scope="session")
def image_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One image store for the whole run. The base image is built here, and what a process opens once for good (the event
    loop's library has a pipe) is open from here on, so that no census counts it."""
    store = tmp_path_factory.mktemp("images")
    with Dsec(settings=Settings(images=store, pool=0)) as engine:
        engine.sandboxes.create(level="container" if os.geteuid() == 0 else "process").destroy()
    return store
