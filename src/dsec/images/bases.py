"""The table of bases: names such as ``python:3.11-slim`` for bases that exist here, and whose signatures images must have."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from dsec.errors import BadRequest, Denied, NotFound, StoreDamaged
from dsec.images.disk import read_small
from dsec.images.names import HINT, HOST, SYSTEM, BaseName, parse, rule_names, scopes_of
from dsec.images.signatures import Rule

_LARGEST: Final = 2**20
_ALL: Final = "*"
_ALIKE: Final = 0.75
_EXAMPLE: Final = "debian:bookworm"
_WRITTEN: Final = {
    SYSTEM: SYSTEM,
    HOST: HOST,
    "debian": "debian:SUITE",
    "oci": "oci:PATH",
    "docker": "docker://HOST/REPOSITORY[:TAG]",
}
_RULED: Final = re.compile(r"docker://[A-Za-z0-9.:\[\]-]+(/[a-z0-9._/-]+)?")


def default_table() -> Path:
    """Where it is when nobody says otherwise; it need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dsec" / "bases.toml"


def read_table(path: Path) -> Mapping[str, str]:
    """Alias to base; empty when there is no file. Every value is checked.  Raises: BadRequest."""
    table = _read(path)
    bases = table.get("bases", {})
    if not isinstance(bases, dict):
        raise _wrong(path, "bases must be a table, [bases]")
    for alias, base in bases.items():
        if not isinstance(base, str):
            raise _wrong(path, f"{alias!r} must be a string")
        if parse(alias).kind != "alias" or parse(alias).pin:
            raise _wrong(path, f"{alias!r} cannot be an alias: it has a meaning already")
        if parse(base).kind == HOST:
            raise _wrong(path, f"{alias!r} must not stand for 'host': whoever uses that says so")
        if base in bases:
            raise _wrong(path, f"{alias!r} must name a base, not another alias ({base!r})")
        if parse(base).kind == "alias":
            raise _wrong(path, f"{alias!r} must name a base, and {base!r} is none", _near(base) or HINT)
    return bases


def rule_for(rest: str, path: Path) -> Rule | None:
    """Who must have signed what follows ``docker://``: the rule for its repository, else for what contains it, else for all.

    Raises: BadRequest: the table is wrong.
    """
    rules = _read(path).get("verify", {})
    if not isinstance(rules, dict):
        raise _wrong(path, "verify must be a table, [verify]")
    read: dict[str, Rule | None] = {}
    exactly: set[str] = set()
    for name, value in rules.items():
        rule = _rule(path, name, value)
        exact, *others = (name,) if name == _ALL else rule_names(name)
        if exact in exactly:
            raise _wrong(path, f"{name!r} and another name under [verify] mean the same")
        exactly.add(exact)
        read[exact] = rule
        for other in others:
            read.setdefault(other, rule)
    for name in (*scopes_of(rest), _ALL):
        if name in read:
            return read[name]
    return None


def has_rules(path: Path) -> bool:
    """Whether any image must be signed.  Raises: BadRequest."""
    rules = _read(path).get("verify", {})
    return isinstance(rules, dict) and any(value is not False for value in rules.values())


def _read(path: Path) -> Mapping[str, Any]:
    """Empty when there is no file.  Raises: BadRequest."""
    try:
        table = tomllib.loads(read_small(path.resolve(), _LARGEST).decode())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError, Denied, StoreDamaged) as error:  # not TOML, not UTF-8, no file
        raise _wrong(path, str(error)) from error
    if set(table) - {"bases", "verify"}:
        raise _wrong(path, "it may hold two tables, [bases] and [verify]")
    return table


def _rule(path: Path, name: str, value: object) -> Rule | None:
    """None: whoever may have made it.  Raises: BadRequest."""
    if name != _ALL and not _RULED.fullmatch(name):
        raise _wrong(path, f"{name!r} under [verify] is neither docker://HOST[/REPOSITORY] nor '*'")
    if value is False:
        return None
    given = value if isinstance(value, dict) else {}
    texts = all(isinstance(each, str) and each and each.isprintable() for each in given.values())
    if not texts or set(given) not in ({"key"}, {"identity", "issuer"}):
        raise _wrong(
            path, f"{name!r} under [verify] must be {{key = ...}}, {{identity = ..., issuer = ...}} or false"
        )
    return Rule(**given)


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
            f"no image is named {asked.rest!r} (aliases in {path}: {known})",
            hint=_near(asked.rest, table) or _line_for(asked.rest, table, path),
            name=asked.rest,
        )
    used = parse(table[asked.rest])
    if asked.pin and used.pin not in ("", asked.pin):
        raise _wrong(path, f"{asked.rest!r} is pinned to {used.pin}, and {asked.pin} was asked for")
    return BaseName(kind=used.kind, rest=used.rest, pin=used.pin or asked.pin)


def _near(name: str, table: Mapping[str, str] | None = None) -> str:
    """What to do about a name that is nearly that of a base, or an alias; "": it is far from all of them."""
    if found := get_close_matches(name, table or {}, 1, _ALIKE + 0.1):
        return f"did you mean {found[0]}?"
    kind, _, rest = name.partition(":")
    if not (found := get_close_matches(kind.lower(), _WRITTEN, 1, _ALIKE)):
        return ""
    better = f"{found[0]}:{rest.lower()}"
    meant = better if parse(better).kind == "debian" else _WRITTEN[found[0]]
    return f"did you mean {meant}? {HINT}"


def _line_for(alias: str, table: Mapping[str, str], path: Path) -> str:
    """What to write where, for an alias that is missing."""
    line = f'"{alias}" = "{_EXAMPLE}"'
    if table:
        return f"to let it stand for a base, such as {_EXAMPLE}, write below [bases] in {path}:\n  {line}\n{HINT}"
    return f"to let it stand for a base, such as {_EXAMPLE}, write into {path}:\n  [bases]\n  {line}\n{HINT}"


def _wrong(path: Path, why: str, hint: str = "") -> BadRequest:
    return BadRequest(
        f"{path}: {why}",
        hint=hint
        or 'lines under [bases] read: "python:3.11-slim" = "debian:bookworm"; under [verify]: "*" = {key = "/etc/team.pub"}',
        path=str(path),
    )
