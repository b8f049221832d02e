"""The alias table: names such as ``python:3.11-slim`` for bases that exist here."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from dsec.errors import BadRequest, NotFound
from dsec.images.names import HINT, BaseName, parse

_LARGEST = 2**20


def default_table() -> Path:
    """Where it is when nobody says otherwise; it need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dsec" / "bases.toml"


def read_table(path: Path) -> Mapping[str, str]:
    """Alias to base; empty when there is no file. Every value is checked.  Raises: BadRequest."""
    try:
        if path.stat().st_size > _LARGEST:
            raise _wrong(path, f"it is larger than {_LARGEST} bytes")
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # not TOML, not UTF-8
        raise _wrong(path, str(error)) from error
    bases = table.get("bases", {})
    if set(table) - {"bases"} or not isinstance(bases, dict):
        raise _wrong(path, "it may hold one table, [bases]")
    for alias, base in bases.items():
        if not isinstance(base, str):
            raise _wrong(path, f"{alias!r} must be a string")
        if parse(alias).kind != "alias" or parse(alias).pin:
            raise _wrong(path, f"{alias!r} cannot be an alias: it has a meaning already")
        if parse(base).kind == "alias":
            raise _wrong(path, f"{alias!r} must name a base, not another alias ({base!r})")
    return bases


def resolve(asked: BaseName, path: Path) -> BaseName:
    """What a name stands for: itself, unless it is an alias. A pin of what was asked holds for what is used.

    Raises:
        NotFound: it is no alias of the table.
        BadRequest: the table is wrong, or both it and the name pin, differently.
    """
    if asked.kind != "alias":
        return asked
    table = read_table(path)
    if asked.rest not in table:
        known = ", ".join(sorted(table)[:10]) or "none"
        raise NotFound(
            f"no image is named {asked.rest!r} (aliases in {path}: {known})", hint=HINT, name=asked.rest
        )
    used = parse(table[asked.rest])
    if asked.pin and used.pin not in ("", asked.pin):
        raise _wrong(path, f"{asked.rest!r} is pinned to {used.pin}, and {asked.pin} was asked for")
    return BaseName(kind=used.kind, rest=used.rest, pin=used.pin or asked.pin)


def _wrong(path: Path, why: str) -> BadRequest:
    return BadRequest(
        f"{path}: {why}",
        hint='lines under [bases] read: "python:3.11-slim" = "debian:bookworm"',
        path=str(path),
    )
