"""From text to a tree of YAML nodes that know where they stand. Nothing is constructed, so nothing in a document can run.

The text is untrusted: its size, its depth, and its nodes are bounded before anything walks them. An alias stands for the same node again,
so a reader that follows aliases counts what it reads (:data:`MAX_NODES`, :data:`MAX_BYTES`).
"""

from __future__ import annotations

from typing import Final

import yaml

from dsec.errors import TooLarge
from dsec.model.checks import shown
from dsec.templates.faults import NOWHERE, Fault, Place, refused

MAX_BYTES: Final = 2**20
MAX_NODES: Final = 20_000
MAX_DEPTH: Final = 16
_SHOWN: Final = 200  # characters of what PyYAML says, which may hold any part of the document


class _TooMany(yaml.MarkedYAMLError):
    """The document is deeper, or has more nodes, than the bound."""


class _Loader(yaml.SafeLoader):
    """Composes nodes with lines and columns, and stops at the bounds."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._count += 1
        self._depth += 1
        if self._depth > MAX_DEPTH or self._count > MAX_NODES:
            bound = (
                f"{MAX_DEPTH} levels within one another"
                if self._depth > MAX_DEPTH
                else f"{MAX_NODES} values in all"
            )
            here = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _TooMany(problem=f"there are more than {bound}", problem_mark=here)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def compose(text: str | bytes, source: str) -> yaml.Node:
    """The root node of the one document in ``text``; ``source`` is its name in errors.

    Raises:
        TooLarge: it is larger than ``MAX_BYTES``.
        BadRequest: it is no UTF-8, no YAML, empty, several documents, or beyond a bound.
    """
    decoded = _decoded(text, source)
    try:
        loader = _Loader(decoded)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        raise refused(source, [_fault_of(exc)]) from None
    except yaml.reader.ReaderError as exc:
        place = place_in(decoded, exc.position)
        raise refused(
            source, [Fault("", place, f"the character {chr(exc.character)!a} has no place in YAML")]
        ) from None
    except (ValueError, OverflowError):
        # PyYAML makes a character of any number that an escape writes: it tells neither which nor where.
        raise refused(
            source,
            [Fault("", NOWHERE, r"an escape such as \U00110000 is no character", "correct the escape")],
        ) from None
    if node is None:
        raise refused(
            source, [Fault("", Place(1, 1), "it is empty", "a template has at least name and version")]
        )
    return node


def _decoded(text: str | bytes, source: str) -> str:
    size = len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode("utf-8", "replace"))
    if size > MAX_BYTES:
        raise TooLarge(
            f"{source}: {size} bytes are more than {MAX_BYTES}",
            hint="a template names files and packages, it does not hold them",
            bytes=size,
            limit=MAX_BYTES,
        )
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        before = text[: exc.start].decode("utf-8-sig", "replace")
        raise refused(
            source, [Fault("", place_in(before, len(before)), "it is not UTF-8", "save it as UTF-8")]
        ) from None


def _fault_of(exc: yaml.MarkedYAMLError) -> Fault:
    mark = exc.problem_mark or exc.context_mark
    place = place_of(mark) if mark is not None else NOWHERE
    told = ", ".join(part for part in (exc.context, exc.problem) if part) or "it is not YAML"
    return Fault("", place, told if len(told) <= _SHOWN else f"{told[:_SHOWN]}…", exc.note or "")


def place_of(mark: yaml.Mark | yaml.error.Mark) -> Place:
    """Where a mark of PyYAML stands."""
    return Place(mark.line + 1, mark.column + 1)


def place_in(text: str, position: int) -> Place:
    """Where the character at ``position`` stands."""
    before = text[:position]
    return Place(before.count("\n") + 1, position - before.rfind("\n"))


def kind_of(node: yaml.Node) -> str:
    """What a node is called in a message, with its value where that is short."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if is_nothing(node):
        return "nothing"
    return shown(node.value)


def is_nothing(node: yaml.Node) -> bool:
    """A key without a value, ``null`` or ``~``."""
    return isinstance(node, yaml.ScalarNode) and str(node.tag) == "tag:yaml.org,2002:null"
