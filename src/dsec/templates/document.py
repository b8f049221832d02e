"""Reads a template: text in, a checked value and the place of every field out, or everything that is wrong, at once.

What may be written follows from :class:`~dsec.model.template.Template`: its fields, their types and the rules beside them.
Text is taken as it is written: ``version: 1.10`` is the text 1.10, not a number, and ``no`` is no truth value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import yaml

from dsec.errors import BadRequest, NotFound
from dsec.model.checks import local_path, shown
from dsec.model.sandbox import Limits, Volume
from dsec.model.template import (
    PROFILES,
    Isolation,
    Memory,
    Profile,
    Resources,
    Template,
    memory_faults,
    volume_faults,
)
from dsec.model.template_checks import MAX_ITEMS, check_env, check_value, expected
from dsec.model.volumes import check_volume_name
from dsec.templates.faults import MOST_SHOWN, Fault, Place, Places, refused
from dsec.templates.names import path_of, suggestion
from dsec.templates.nodes import MAX_BYTES, MAX_NODES, compose, is_nothing, kind_of, place_of

_INT: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,40})?(?:[eE][-+]?[0-9]{1,3})?")
_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value", "map", "seq")
)
VOLUME_FIELDS: Final[Mapping[str, Any]] = MappingProxyType(
    {"name": Annotated[str, check_volume_name], "source": Path, "target": str, "read_only": bool}
)
"""What each of ``volumes`` may say: ``target``, and either ``name`` or ``source``."""
_A_VOLUME: Final = (
    "such as {name: data, target: /data}, or {source: /some/path, target: /data, read_only: true}"
)
_WRONG: Final = object()  # in place of a value that could not be read


@dataclass(frozen=True, slots=True)
class Document:
    """A template as it was written.

    Attributes:
        template: what it says. places: where each field that was written stands, by its path; items as ``runtime.dependencies[0]``.
    """

    template: Template
    places: Places


def read(path: str | Path) -> Document:
    """Read a template from a file of this machine. It blocks.

    Raises:
        NotFound: there is no such file.
        TooLarge: it is larger than 1 MiB.
        BadRequest: it cannot be read, or it is no template: every error is listed with line, column and field.
    """
    file = local_path("template", path)
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(
            f"template: there is no file {shown(str(file))}", hint="give the path of a YAML file"
        ) from None
    except OSError as exc:
        raise BadRequest(
            f"template: {shown(str(file))} cannot be read: {exc.strerror}",
            hint="give the path of a YAML file",
        ) from None
    return parse(content, source=str(file))


def parse(text: str | bytes, *, source: str = "template") -> Document:
    """Read a template from YAML; ``source`` is its name in errors. It reads files of time zones, so it may block.

    Raises:
        TooLarge: it is larger than 1 MiB.
        BadRequest: it is no template. The message lists every error; ``facts["errors"]`` has ``field``, ``line``, ``column``,
            ``message`` and ``hint`` of each (of the first 100), ``facts["count"]`` says how many there are.
    """
    if not isinstance(text, str | bytes):
        raise BadRequest(f"template: {shown(text)} is neither str nor bytes", hint="the text of a YAML file")
    reader = _Reader()
    template = reader.template(compose(text, source))
    if reader.faults or template is None:
        raise refused(source, reader.faults)
    return Document(template, MappingProxyType(reader.places))


class _Spent(Exception):
    """Aliases make more of the document than the bound."""


class _Reader:
    """Walks nodes along the types of the model. A wrong field becomes a fault, and reading goes on beside it."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.places: dict[str, Place] = {}
        self._volumes: list[Volume | None] = []  # None = a wrong one
        self._nodes = 0
        self._characters = 0

    def template(self, root: yaml.Node) -> Template | None:
        try:
            value = self.value("", Template, root)
        except _Spent as exc:
            self.faults.append(
                Fault("", place_of(root.start_mark), str(exc), "write less, and fewer aliases")
            )
            return None
        return value if isinstance(value, Template) else None

    def _fault(self, field: str, node: yaml.Node, message: str, hint: str = "") -> object:
        self.faults.append(Fault(field, place_of(node.start_mark), message, hint))
        return _WRONG

    def _refused(self, field: str, node: yaml.Node, exc: BadRequest) -> object:
        """An error of the model as a fault: what it says after the name of the field."""
        message = exc.message.removeprefix(f"{field}: ")
        if message == exc.message:
            message = message.partition(": ")[2] or message
        return self._fault(field, node, message, exc.hint)

    def _wants(self, field: str, node: yaml.Node, what: str, hint: str = "") -> object:
        empty = "leave the field out instead" if is_nothing(node) else ""
        return self._fault(field, node, f"expected {what}, found {kind_of(node)}", hint or empty)

    def _seen(self, node: yaml.Node) -> None:
        self._nodes += 1
        if isinstance(node, yaml.ScalarNode):
            self._characters += len(node.value)
        if self._nodes > MAX_NODES or self._characters > MAX_BYTES:
            raise _Spent(
                f"its aliases make more of it than {MAX_NODES} values or {MAX_BYTES} characters of text"
            )

    def value(self, field: str, hint: Any, node: yaml.Node) -> Any:
        """What a node says where ``hint`` is wanted, or ``_WRONG``."""
        self._seen(node)
        if str(node.tag) not in _TAGS:
            return self._fault(
                field, node, f"the tag {shown(str(node.tag))} is not taken", "leave the tag out"
            )
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if get_origin(bare) is tuple:
            return self._list(field, get_args(bare)[0], node)
        if get_origin(bare) is Mapping:
            return self._env(field, node)
        if bare is Resources:
            return self._resources(field, node)
        if bare is Volume:
            return self._volume(field, node)
        if is_dataclass(bare):
            return self._mapping_of(field, bare, node)
        found = self._scalar(field, bare, node)
        return found if found is _WRONG else self._checked(field, hint, node, found)

    def _checked(self, field: str, hint: Any, node: yaml.Node, found: object) -> object:
        try:
            check_value(field, hint, found)
        except BadRequest as exc:
            return self._refused(field, node, exc)
        return found

    def _scalar(self, field: str, hint: Any, node: yaml.Node) -> object:
        if not isinstance(node, yaml.ScalarNode) or is_nothing(node):
            return self._wants(field, node, expected(hint))
        text = str(node.value)
        if issubclass(hint, StrEnum):
            return self._choice(field, hint, node)
        if hint is str:
            return text
        if issubclass(hint, PurePath):
            if not text.startswith("/"):
                return self._wants(field, node, "an absolute path", "such as /data, a path of this machine")
            checked = self._checked(field, str, node, text)
            return _WRONG if checked is _WRONG else hint(text)
        # Quotes make text of anything: what is within them is no number and no truth value.
        plain = node.style is None
        if hint is bool and plain and text in ("true", "false"):
            return text == "true"
        if hint is int and plain and _INT.fullmatch(text):
            return int(text)
        if hint is float and plain and _FLOAT.fullmatch(text):
            return float(text)
        bare = "without quotes" if not plain and hint is not bool else ""
        return self._wants(field, node, expected(hint), bare)

    def _choice(self, field: str, hint: type[StrEnum], node: yaml.ScalarNode) -> object:
        try:
            return hint(node.value)
        except ValueError:
            near = get_close_matches(str(node.value)[:64], list(hint), n=1)
            return self._wants(field, node, expected(hint), f"did you mean {near[0]}?" if near else "")

    def _list(self, field: str, hint: Any, node: yaml.Node) -> object:
        if not isinstance(node, yaml.SequenceNode):
            return self._wants(field, node, "a list", "begin each item with '- ', or write [a, b]")
        if len(node.value) > MAX_ITEMS:
            return self._fault(field, node, f"{len(node.value)} items are more than {MAX_ITEMS}")
        found = []
        for index, item in enumerate(node.value):
            name = f"{field}[{index}]"
            self.places[name] = place_of(item.start_mark)
            found.append(self.value(name, hint, item))
        if field == "volumes":
            self._volumes = [item if isinstance(item, Volume) else None for item in found]
        return _WRONG if any(item is _WRONG for item in found) else tuple(found)

    def _env(self, field: str, node: yaml.Node) -> object:
        if not isinstance(node, yaml.MappingNode):
            return self._wants(field, node, "a mapping of names to text", "NAME: value")
        if len(node.value) > MAX_ITEMS:
            return self._fault(field, node, f"{len(node.value)} variables are more than {MAX_ITEMS}")
        found: dict[str, str] = {}
        wrong = False
        for name, key, item in self._entries(field, node):
            path = path_of(field, name)
            text = self.value(path, str, item)
            if text is _WRONG:
                wrong = True
                continue
            try:
                check_env(path, name, text)
            except BadRequest as exc:
                self._fault(path, key, exc.message.removeprefix(f"{path}: env: "), exc.hint)
                wrong = True
            found[name] = text
        return _WRONG if wrong else found

    def _entries(self, field: str, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """Names, and the nodes of name and value; notes where each stands."""
        first: dict[str, yaml.Node] = {}
        for key, item in node.value:
            self._seen(key)
            if not isinstance(key, yaml.ScalarNode) or str(key.tag) not in _TAGS:
                self._wants(field, key, "the name of a field")
                continue
            name = str(key.value)
            path = path_of(field, name)
            if name in first:
                line = first[name].start_mark.line + 1
                self._fault(path, key, f"it is there twice, first in line {line}", "keep one of them")
                continue
            first[name] = key
            self.places[path] = place_of(key.start_mark)
            yield name, key, item

    def _given(self, field: str, hints: Mapping[str, Any], node: yaml.MappingNode) -> dict[str, Any]:
        """The fields that a mapping gives, wrong ones as ``_WRONG``; unknown ones are faults."""
        given = {}
        for name, key, item in self._entries(field, node):
            path = path_of(field, name)
            if name in hints:
                given[name] = self.value(path, hints[name], item)
            else:
                self.places.pop(path, None)
                # Suggestions take time, and only the first faults are shown.
                hint = suggestion(name, field, hints) if len(self.faults) < MOST_SHOWN else ""
                self._fault(path, key, "there is no such field", hint)
        return given

    def _mapping_of(self, field: str, cls: Any, node: yaml.Node) -> object:
        if not isinstance(node, yaml.MappingNode):
            return self._wants(field, node, "a mapping of fields")
        given = self._given(field, get_type_hints(cls, include_extras=True), node)
        wrong = any(value is _WRONG for value in given.values())
        for each in fields(cls):
            if each.default is MISSING and each.default_factory is MISSING and each.name not in given:
                self._fault(path_of(field, each.name), node, f"{each.name} is missing")
                wrong = True
        if self._against_one_another(cls, given) or wrong:
            return _WRONG
        try:
            return cls(**given)
        except BadRequest as exc:
            return self._refused(field, node, exc)

    def _volume(self, field: str, node: yaml.Node) -> object:
        """``name`` or ``source`` says what is shown: a volume of that name, or a path of the host."""
        if not isinstance(node, yaml.MappingNode):
            return self._wants(field, node, "a mapping of fields", _A_VOLUME)
        given = self._given(field, VOLUME_FIELDS, node)
        wrong = any(value is _WRONG for value in given.values())
        if "target" not in given:
            self._fault(f"{field}.target", node, "target is missing")
            wrong = True
        if len(given.keys() & {"name", "source"}) != 1:
            what = "source is missing, or name" if "name" not in given else "there is a source too"
            self._fault(
                f"{field}.source",
                node,
                what,
                "name: that of a volume, or source: a path of this machine; one of the two",
            )
            wrong = True
        if wrong:
            return _WRONG
        try:
            return Volume(
                given.get("name") or given["source"], given["target"], given.get("read_only", False)
            )
        except BadRequest as exc:
            return self._wrong_volume(field, node, exc)

    def _wrong_volume(self, field: str, node: yaml.Node, exc: BadRequest) -> object:
        """``Volume`` checks itself, and names its fields in words: ``volume target: …``."""
        name, _, told = exc.message.removeprefix("volume ").partition(": ")
        path = f"{field}.{name}"
        self.faults.append(Fault(path, self.places.get(path, place_of(node.start_mark)), told, exc.hint))
        return _WRONG

    def _against_one_another(self, cls: object, given: Mapping[str, Any]) -> bool:
        """Faults of fields that are right each by itself. What is wrong by itself is left out: it has its own fault."""
        found: Sequence[BadRequest] = ()
        if cls is Template and given.get("isolation") is not _WRONG:
            found = list(volume_faults(self._volumes, given.get("isolation", Isolation()).volumes))
        elif cls is Memory and given.get("type") is not _WRONG:
            stores = {
                name: given[name] for name in ("short_term", "long_term") if isinstance(given.get(name), str)
            }
            found = list(memory_faults(given.get("type", Memory().type), **stores))
        for exc in found:
            path = str(exc.facts["field"])
            self.faults.append(
                Fault(path, self.places[path], exc.message.removeprefix(f"{path}: "), exc.hint)
            )
        return bool(found)

    def _resources(self, field: str, node: yaml.Node) -> object:
        """``profile`` and limits beside each other: the limits override those of the profile."""
        if not isinstance(node, yaml.MappingNode):
            return self._wants(field, node, "a mapping of fields")
        given = self._given(field, {"profile": Profile, **get_type_hints(Limits)}, node)
        profile = given.pop("profile", Profile.DEFAULT)
        nodes = {str(key.value): item for key, item in reversed(node.value)}  # the first of two counts
        limits = PROFILES[Profile.DEFAULT] if profile is _WRONG else PROFILES[profile]
        wrong = profile is _WRONG
        for name, value in given.items():
            if value is _WRONG:
                wrong = True
                continue
            try:
                limits = replace(limits, **{name: value})
            except BadRequest as exc:
                self._refused(f"{field}.{name}", nodes[name], exc)
                wrong = True
        return _WRONG if wrong else Resources(profile=profile, limits=limits)
