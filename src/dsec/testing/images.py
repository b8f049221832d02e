"""Images made by hand: layers entry by entry, also such as no honest tool would write, in layouts and archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

WHEN: Final = 1_700_000_000
"""Seconds: the time of every entry, unless it says another one."""

_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_SUFFIX: Final = {"": "", "gzip": "+gzip", "zstd": "+zstd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a layer; ``kind`` as in :mod:`tarfile`, ``pax`` the attributes of its extended header."""

    name: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    when: int = WHEN
    pax: Mapping[str, str] | None = None
    device: tuple[int, int] = (0, 0)


def file(name: str, content: bytes = b"", **more: Any) -> Entry:
    """A regular file."""
    return Entry(name=name, content=content, **more)


def directory(name: str, **more: Any) -> Entry:
    """A directory, mode 0755."""
    return Entry(name=name, kind=tarfile.DIRTYPE, **{"mode": 0o755, **more})


def symlink(name: str, target: str) -> Entry:
    """A symbolic link."""
    return Entry(name=name, kind=tarfile.SYMTYPE, link=target)


def hardlink(name: str, target: str) -> Entry:
    """Another name of a file."""
    return Entry(name=name, kind=tarfile.LNKTYPE, link=target)


def layer(*entries: Entry) -> bytes:
    """A layer's archive, not compressed."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            member = tarfile.TarInfo(entry.name)
            member.type, member.linkname, member.mode = entry.kind, entry.link, entry.mode
            member.uid, member.gid, member.mtime = entry.uid, entry.gid, entry.when
            member.size = len(entry.content)
            member.devmajor, member.devminor = entry.device
            member.pax_headers = dict(entry.pax or {})
            tar.addfile(member, io.BytesIO(entry.content))
    return out.getvalue()


def digest(data: bytes) -> str:
    """``sha256:…``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config(layers: Sequence[bytes], **section: object) -> bytes:
    """The config of an image of these layers, for this machine."""
    architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
    value = {
        "architecture": architecture,
        "os": "linux",
        "config": section,
        "rootfs": {"type": "layers", "diff_ids": [digest(each) for each in layers]},
    }
    return json.dumps(value).encode()


def write_layout(
    root: Path, layers: Sequence[bytes], *, packing: str = "gzip", tag: str = "", **section: object
) -> Path:
    """An OCI layout in the directory ``root``; ``root``.

    Args:
        packing: "gzip", "zstd" (by the program of that name) or "".
        tag: of the image in the index.
        section: Env, Entrypoint and the like.
    """
    descriptors = [
        _blob(root, _pack(each, packing), f"application/vnd.oci.image.layer.v1.tar{_SUFFIX[packing]}")
        for each in layers
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _blob(root, config(layers, **section), "application/vnd.oci.image.config.v1+json"),
        "layers": descriptors,
    }
    described = _blob(root, json.dumps(manifest).encode(), str(manifest["mediaType"]))
    if tag:
        described["annotations"] = {"org.opencontainers.image.ref.name": tag}
    index = {"schemaVersion": 2, "manifests": [described]}
    (root / "index.json").write_text(json.dumps(index))
    (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return root


def write_archive(path: Path, layout: Path) -> Path:
    """A layout in one tar file, through gzip when its name ends so; ``path``."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        tar.add(layout, ".")
    return path


def write_saved(
    path: Path, layers: Sequence[bytes], *, tag: str = "example:latest", **section: object
) -> Path:
    """What ``docker save`` writes, in its older form; ``path``."""
    text = config(layers, **section)
    name = f"{digest(text).removeprefix('sha256:')}.json"
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": names}]).encode()
    parts = [file(name, text), *map(file, names, layers), file("manifest.json", manifest)]
    path.write_bytes(layer(*parts))
    return path


def _pack(data: bytes, packing: str) -> bytes:
    if packing == "gzip":
        return gzip.compress(data, mtime=0)
    if packing == "zstd":
        return subprocess.run(["zstd", "-c"], input=data, capture_output=True, check=True).stdout
    return data


def _blob(root: Path, data: bytes, kind: str) -> dict[str, object]:
    """Store it; its descriptor."""
    found = digest(data)
    path = root / "blobs" / "sha256" / found.removeprefix("sha256:")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return {"mediaType": kind, "digest": found, "size": len(data)}


def linked_store(source: Path, root: Path) -> Path:
    """An image store at ``root`` that begins with the ``system`` base of another one, on the same file system."""
    for part in ("images", "names"):
        (root / part).mkdir(mode=0o700, parents=True)
        for path in (source / part).iterdir():
            if part == "images" or path.name == "system":
                os.link(path, root / part / path.name)
    return root
