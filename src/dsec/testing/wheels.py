"""Wheels made by hand for tests: sound ones, and ones that no tool would make."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def make_wheel(
    directory: Path,
    name: str,
    version: str = "1.0",
    *,
    tag: str = "py3-none-any",
    requires: Iterable[str] = (),
    extras: Iterable[str] = (),
    files: Mapping[str, bytes] | None = None,
    entry_points: str = "",
    executable: Iterable[str] = (),
    record: Mapping[str, str] | None = None,
    metadata: str = "",
    hostile: Iterable[tuple[zipfile.ZipInfo | str, bytes]] = (),
) -> Path:
    """A wheel, the same bytes for the same arguments.

    Args:
        directory: where it is put, made when absent. name: as the wheel writes it. tag: Python, ABI and platform.
        requires: PEP 508. extras: that it offers. files: paths in the wheel and their content; by default one module.
        entry_points: text of ``entry_points.txt``. executable: those of the files that may be run.
        record: wrong lines of RECORD by path, "" leaves one out. metadata: more header lines.
        hostile: entries that are added unseen, after RECORD was made; their lines in RECORD are right.
    """
    info = f"{name}-{version}.dist-info"
    content = dict(files if files is not None else {f"{name}.py": f"VERSION = {version!r}\n".encode()})
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    headers += [f"Provides-Extra: {each}" for each in extras]
    headers += [f"Requires-Dist: {each}" for each in requires]
    content[f"{info}/METADATA"] = ("\n".join(headers) + f"\n{metadata}\n").encode()
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    if entry_points:
        content[f"{info}/entry_points.txt"] = entry_points.encode()
    added = [(each if isinstance(each, zipfile.ZipInfo) else _entry(each), data) for each, data in hostile]
    lines = {path: _line(path, data) for path, data in content.items()}
    lines |= {entry.filename: _line(entry.filename, data) for entry, data in added}
    lines |= {path: line and f"{line}\n" for path, line in (record or {}).items()}
    lines[f"{info}/RECORD"] = f"{info}/RECORD,,\n"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{version}-{tag}.whl"
    programs = set(executable)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, data in content.items():
            archive.writestr(_entry(each, 0o755 if each in programs else 0o644), data)
        for entry, data in added:
            archive.writestr(entry, data)
        archive.writestr(_entry(f"{info}/RECORD"), "".join(lines.values()))
    return path


def _entry(path: str, mode: int = 0o644) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(path)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o100000 | mode) << 16
    return entry


def _line(path: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    quoted = f'"{path}"' if "," in path else path
    return f"{quoted},sha256={digest},{len(data)}\n"
