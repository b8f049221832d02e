"""Checks of single fields of a template; each names the field, and says what it may be.

``check_value`` follows a type: what it says beside the type (``Annotated``) is checked too, so that a value made in Python and one read
from a file are held to the same rules.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import PurePath
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, available_timezones

from packaging.requirements import InvalidRequirement, Requirement

from dsec.errors import BadRequest
from dsec.model.checks import check_count, check_path, check_text, shown
from dsec.model.execs import check_variable

Check = Callable[[str, Any], None]

MAX_ITEMS: Final = 1000  # of one list or mapping
_LONGEST: Final = 1000  # characters of a requirement, URL and the like
_MOST_BRACKETS: Final = 32
_LONGEST_COMMAND: Final = 65_536  # bytes of one command of ``runtime.setup``
_MOST_STEPS: Final = 1_000_000
_MOST_SECONDS: Final = 10 * 365 * 86400.0
_MOST_USD: Final = 1_000_000.0

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,62}")
_USER: Final = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9+.-]+(?:=[A-Za-z0-9][A-Za-z0-9.+~:-]*)?")
_TOOL: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")
_MODEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
_ZONE: Final = re.compile(r"[A-Z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+){0,2}")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")

_PART: Final = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_BASE: Final = re.compile(
    rf"(?P<name>(?:(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:\d))(?::\d{{1,5}})?/)?{_PART}(?:/{_PART})*)"
    r"(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?"
)
_OWN_BASES: Final = ("system", "host")
_LAYOUT: Final = re.compile(r"oci:/[^\s@\0]+(?:@sha256:[0-9a-f]{64})?")
_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST: Final = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*", re.IGNORECASE)
_ENDPOINT: Final = re.compile(r"(?P<host>\[[^\[\]]+\]|[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?")


def _wrong(field: str, value: object, what: str, hint: str = "") -> BadRequest:
    return BadRequest(f"{field}: {shown(value)} is not {what}", hint=hint, field=field)


def check_name(field: str, value: str) -> None:
    """Raises: BadRequest: not the name of a template or a skill."""
    if not _NAME.fullmatch(value):
        raise _wrong(field, value, "a name", "1 to 64 of a-z, 0-9 and, within, '.', '_' and '-'")


def check_template_name(field: str, value: str) -> None:
    """Raises: BadRequest: not a name that a template can have."""
    check_name(field, value)
    if value == "base":
        raise _wrong(field, value, "a name of its own", "'base' is what every sandbox can begin with")


def check_version(field: str, value: str) -> None:
    """Raises: BadRequest: not a version."""
    if not _VERSION.fullmatch(value):
        raise _wrong(field, value, "a version", "1 to 63 of A-Z, a-z, 0-9, '.', '_', '+', '-', such as 1.0")


def check_base(field: str, value: str) -> None:
    """Its form alone: whether there is such a base is known where it is used.

    Raises:
        BadRequest: neither ``system``, ``host``, ``debian:SUITE``, ``name:tag`` or ``docker://host/name:tag`` (each also with ``@sha256:…``,
            which may stand for the tag), nor ``oci:/path``.
    """
    hint = (
        "system, host, debian:bookworm, python:3.11-slim, or a name with @sha256: and 64 hexadecimal digits"
    )
    if value in _OWN_BASES or (_LAYOUT.fullmatch(value) and len(value) <= _LONGEST):
        return
    match = _BASE.fullmatch(value.removeprefix("docker://")) if len(value) <= _LONGEST else None
    if match is None or value.startswith("oci:"):
        raise _wrong(field, value, "the name of a base", hint)
    if not (match["tag"] or match["digest"]):
        raise _wrong(field, value, "the name of a base: it has neither a tag nor a digest", hint)


def check_requirement(field: str, value: str) -> None:
    """Raises: BadRequest: not a requirement of a Python package (PEP 508)."""
    hint = "a requirement of a Python package, such as pydantic==2.9.2 or redis>=5.0.0"
    if (
        len(value) > _LONGEST or value.count("(") > _MOST_BRACKETS
    ):  # each bracket is a recursion of the parser
        what = f"a requirement of at most {_LONGEST} characters and {_MOST_BRACKETS} brackets"
        raise _wrong(field, value, what, hint)
    try:
        Requirement(value)
    except InvalidRequirement as exc:
        # The first line tells what is wrong, those after it only point into the text.
        first = str(exc).split("\n", 1)[0]
        raise BadRequest(
            f"{field}: {shown(value)} is not a requirement: {first}", hint=hint, field=field
        ) from None


def check_package(field: str, value: str) -> None:
    """Raises: BadRequest: not a Debian package, or one with a version."""
    if not _PACKAGE.fullmatch(value):
        raise _wrong(field, value, "a Debian package", "its name, such as git, or name=version")


def check_command(field: str, value: str) -> None:
    """Raises: BadRequest: empty, too long, or with a NUL."""
    if not value.strip() or "\0" in value or len(value.encode("utf-8", "replace")) > _LONGEST_COMMAND:
        raise _wrong(
            field,
            value,
            f"a command: text without NUL of at most {_LONGEST_COMMAND} bytes",
            "a line for a shell",
        )


def check_user_name(field: str, value: str) -> None:
    """Raises: BadRequest: not the name of a user."""
    if not _USER.fullmatch(value):
        raise _wrong(field, value, "the name of a user", "user or root")


def check_directory(field: str, value: str) -> None:
    """Raises: BadRequest: not an absolute path without '..' and '.'."""
    check_path(field, value)
    parts = value.split("/")[1:]
    if not value.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise _wrong(field, value, "an absolute path without '..', '.' and '//'", "such as /workspace")


def check_tool(field: str, value: str) -> None:
    """Raises: BadRequest: not the name of a tool."""
    if not _TOOL.fullmatch(value):
        raise _wrong(field, value, "the name of a tool", "1 to 128 of A-Z, a-z, 0-9, '_', '.', '/', '-'")


def check_model(field: str, value: str) -> None:
    """Raises: BadRequest: not the name of a model ("" = none is named)."""
    if value and not _MODEL.fullmatch(value):
        raise _wrong(field, value, "the name of a model", "such as gpt-4o-mini or provider/name")


def check_store(field: str, value: str) -> None:
    """Raises: BadRequest: not the URL of a store ("" = none), or one with a password, which would be stored and shown wherever the template is."""
    if not value:
        return
    hint = "such as redis://internal:6379/0 or postgres://internal:5432/name"
    if len(value) > _LONGEST or any(ord(each) <= 32 or ord(each) == 127 for each in value):
        raise _wrong(field, value, "the URL of a store", hint)
    try:
        parts = urlsplit(value)
        usable = bool(_SCHEME.fullmatch(parts.scheme) and parts.hostname) and parts.port != 0
    except ValueError:
        raise _wrong(field, value, "the URL of a store", hint) from None
    if not usable:
        raise _wrong(field, value, "the URL of a store", hint)
    if parts.password is not None:
        raise BadRequest(  # without the value: an error is shown and recorded too
            f"{field}: a template holds no password, and this URL has one",
            hint="give secrets to a sandbox when it is made, not to the template that is shared",
            field=field,
        )


def check_endpoint(field: str, value: str) -> None:
    """Raises: BadRequest: neither a host nor ``host:port``; a host is a name, ``*.`` and a name, or an address (IPv6 in brackets)."""
    match = _ENDPOINT.fullmatch(value) if len(value) <= _LONGEST else None
    if match is None or not _is_host(match["host"]) or not 0 < int(match["port"] or 443) < 65_536:
        raise _wrong(field, value, "a host or host:port", "such as pypi.org, *.example.com or 192.0.2.1:443")


def _is_host(text: str) -> bool:
    try:
        if text.startswith("["):
            ipaddress.IPv6Address(text[1:-1])
        elif re.fullmatch(r"[0-9.]+", text):
            ipaddress.IPv4Address(text)
        else:
            return len(text) <= 253 and _HOST.fullmatch(text) is not None
    except ValueError:
        return False
    return True


def check_zone(field: str, value: str) -> None:
    """Reads the zone's file, so it may block.  Raises: BadRequest: not a time zone of the IANA data base."""
    if value == "UTC":
        return
    if _ZONE.fullmatch(value) and len(value) <= 64:
        try:
            ZoneInfo(value)
        except (OSError, LookupError, ValueError):  # not there, a directory, or no such file as it should be
            pass
        else:
            return
    near = get_close_matches(value[:64], sorted(available_timezones()), n=1)
    raise _wrong(
        field, value, "a time zone", f"did you mean {near[0]}?" if near else "such as UTC or Asia/Shanghai"
    )


def check_steps(field: str, value: int) -> None:
    """Raises: BadRequest: not a number of steps."""
    check_count(field, value, 1, _MOST_STEPS)


def check_duration(field: str, value: float) -> None:
    """Raises: BadRequest: not a positive number of seconds up to ten years."""
    if not 0 < value <= _MOST_SECONDS:
        raise _wrong(field, value, "a positive number of seconds up to ten years", "such as 600")


def check_cost(field: str, value: float) -> None:
    """Raises: BadRequest: not an amount of US dollars."""
    if not 0 <= value <= _MOST_USD:
        raise _wrong(field, value, "a number of US dollars from 0 to 1,000,000", "0 is no ceiling")


def expected(hint: Any) -> str:
    """What a value of this type is called in a message."""
    hint = _bare(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return "one of " + ", ".join(hint) if len(hint) > 1 else f"{next(iter(hint)).value!r}"
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", tuple: "a list"}
    return words.get(get_origin(hint) or hint, "text" if _is_path(hint) else "a mapping")


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _is_path(hint: object) -> bool:
    return isinstance(hint, type) and issubclass(hint, PurePath)


def check_value(field: str, hint: Any, value: Any) -> None:
    """Check a value, and what is in it, against a type and what the type says beside it.

    Raises:
        BadRequest: the message begins with the field, which ``facts`` hold too.
    """
    if get_origin(hint) is Annotated:
        inner, *checks = get_args(hint)
        check_value(field, inner, value)
        for check in checks:
            check(field, value)
    elif get_origin(hint) is tuple:
        _check_list(field, get_args(hint)[0], value)
    elif get_origin(hint) is Mapping:
        _check_env(field, value)
    elif not _is_a(value, hint):
        raise _wrong_type(field, value, hint)
    elif hint is str:
        check_plain_text(field, value)


def _wrong_type(field: str, value: object, hint: type) -> BadRequest:
    if issubclass(hint, StrEnum):
        return _wrong(field, value, expected(hint), f"{hint.__name__}.{next(iter(hint)).name}")
    if is_dataclass(hint):
        return _wrong(field, value, f"of type {hint.__name__}", f"{hint.__name__}(...)")
    return _wrong(field, value, expected(hint), f"a value of type {hint.__name__}")


def check_plain_text(field: str, value: str) -> None:
    """Raises: BadRequest: a str that is no UTF-8 (it holds lone surrogates)."""
    check_text(field, value)
    if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        raise _wrong(field, value, "text that UTF-8 can hold")


def _is_a(value: object, hint: type) -> bool:
    if hint is bool:
        return value is True or value is False
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _check_list(field: str, hint: Any, value: object) -> None:
    if not isinstance(value, tuple):
        raise _wrong(field, value, "a tuple", "a tuple in Python, a list in YAML")
    if len(value) > MAX_ITEMS:
        raise BadRequest(f"{field}: {len(value)} items are more than {MAX_ITEMS}", field=field)
    for index, item in enumerate(value):
        check_value(f"{field}[{index}]", hint, item)


def _check_env(field: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(field, value, "a mapping of names to text", '{"NAME": "value"}')
    if len(value) > MAX_ITEMS:
        raise BadRequest(f"{field}: {len(value)} variables are more than {MAX_ITEMS}", field=field)
    for key, text in value.items():
        check_env(f"{field}.{key}" if isinstance(key, str) else field, key, text)


def check_env(field: str, name: object, value: object) -> None:
    """As a sandbox's own variables are checked.  Raises: BadRequest."""
    try:
        check_variable(name, value)
        for text in (name, value):
            check_plain_text("env", str(text))
    except BadRequest as exc:
        raise BadRequest(f"{field}: {exc.message}", hint=exc.hint, field=field) from None


def check_fields(section: str, value: object) -> None:
    """Check every field of a dataclass; ``section`` is its path, "" for the whole.  Raises: BadRequest."""
    for name, hint in get_type_hints(type(value), include_extras=True).items():
        check_value(f"{section}.{name}" if section else name, hint, getattr(value, name))
