"""Registries of images on loopback, for tests: Debian's own, and a small one that can be told to stop in the middle."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dsec.images.tools import environment

_PATIENCE = 30.0
_BLOB = re.compile(r'"GET /v2/\S+/blobs/(sha256:[0-9a-f]{64}) HTTP')
_CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {data}}}}}
http: {{addr: "127.0.0.1:{port}"}}
log: {{level: error, accesslog: {{disabled: false}}}}
"""


class Registry:
    """On loopback, ``address`` is ``host:port``."""

    address: str

    def asked(self) -> Counter[str]:
        """How often each blob was asked for, by digest."""
        raise NotImplementedError

    def push(self, layout: Path, tag: str) -> None:
        source, target = f"oci:{layout}", f"docker://{self.address}/team/example:{tag}"
        command = ["skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", source, target]
        subprocess.run(
            command, check=True, capture_output=True, env=environment() | {"HOME": os.fspath(layout)}
        )


class SmallRegistry(Registry):
    """Only what a client that pulls asks for."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.counted: Counter[str] = Counter()
        self.stalled = ""
        """A blob of which only the first half is sent, until :attr:`going` is set."""
        self.going = threading.Event()
        handler = partial(Answers, self)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)

    def asked(self) -> Counter[str]:
        return self.counted.copy()

    def push(self, layout: Path, tag: str) -> None:
        for path in (layout / "blobs/sha256").iterdir():
            self.blobs[f"sha256:{path.name}"] = path.read_bytes()
        self.tags[tag] = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]


class Answers(BaseHTTPRequestHandler):
    """GET and HEAD of manifests and blobs."""

    def __init__(self, registry: SmallRegistry, *rest: Any) -> None:
        self.registry = registry
        super().__init__(*rest)

    def do_GET(self) -> None:
        path = self.path.removeprefix("/v2/team/example/")
        wanted = path.rpartition("/")[2]
        digest = self.registry.tags.get(wanted, wanted)
        data = b"{}" if self.path == "/v2/" else self.registry.blobs.get(digest)
        self.send_response(200 if data is not None else 404)
        body = (
            b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'
            if data is None
            else data
        )
        manifest = path.startswith("manifests/") and data is not None
        kind = "application/vnd.oci.image.manifest.v1+json" if manifest else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if self.command != "GET":
            return
        if path.startswith("blobs/"):
            self.registry.counted[digest] += 1
        half = len(body) // 2 if digest == self.registry.stalled else 0
        with suppress(ConnectionError):  # who asked was killed
            if half:
                self.wfile.write(body[:half])
                self.wfile.flush()
                self.registry.going.wait(_PATIENCE)
            self.wfile.write(body[half:])

    do_HEAD = do_GET  # noqa: N815 - the library looks for that name

    def log_message(self, *_: object) -> None:
        """Silent."""


@contextmanager
def small_registry(_: Path) -> Iterator[Registry]:
    registry = SmallRegistry()
    registry.thread.start()
    try:
        yield registry
    finally:
        registry.going.set()
        registry.server.shutdown()
        registry.thread.join()
        registry.server.server_close()


class DebianRegistry(Registry):
    """The program ``docker-registry``; ``log`` says what it was asked for."""

    def __init__(self, port: int, log: Path) -> None:
        self.address = f"127.0.0.1:{port}"
        self._log = log

    def asked(self) -> Counter[str]:
        return Counter(_BLOB.findall(self._log.read_text()))


@contextmanager
def docker_registry(tmp_path: Path) -> Iterator[Registry]:
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "registry.yml"
    config.write_text(_CONFIG.format(data=tmp_path / "registry", port=port))
    with (tmp_path / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", os.fspath(config)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _reachable(port):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield DebianRegistry(port, tmp_path / "registry.log")
    finally:
        process.kill()
        process.wait()


def _reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
