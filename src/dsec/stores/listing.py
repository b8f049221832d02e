"""Long lists of sandboxes: the query of a page, and its rows as values. The same for every database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dsec.errors import StoreDamaged
from dsec.model.paging import Page, check_limit, check_place
from dsec.model.sandbox import Level, SandboxInfo, State
from dsec.ports.journal import Standing
from dsec.stores import journal_sql as sql
from dsec.stores.sandbox_codec import class_of

Rows = Sequence[Sequence[Any]]


def classes_of(states: Iterable[State]) -> tuple[list[str], list[str]]:
    """The classes in which states are, `live` first where it is among them; and the states."""
    wanted = list(dict.fromkeys(states))
    classes = sorted({class_of(state) for state in wanted}, key=lambda name: (name != "live", name))
    return classes, [state.value for state in wanted]


def chosen(states: Sequence[State]) -> Sequence[State]:
    """These or, where none is named, all that are not gone."""
    return states or [state for state in State if state is not State.GONE]


def query_of(states: Sequence[State], project: str, after: str, limit: int) -> tuple[str, dict[str, Any]]:
    """What to ask SQLite for a page and one row more.  Raises: BadRequest."""
    check_limit(limit)
    classes, wanted = classes_of(chosen(states))
    live = classes[:1] == ["live"]
    values: dict[str, Any] = {f"c{n}": name for n, name in enumerate(classes)}
    values |= {"after": check_place(after), "limit": limit + 1}
    if project:
        values["project"] = project
    if live:
        values["states"] = json.dumps(wanted)
    return sql.page(len(classes), of_project=bool(project), live=live), values


def page_of(rows: Rows, limit: int, info: Callable[[Any], SandboxInfo]) -> Page[SandboxInfo]:
    """Of rows that begin with the number of the chain; a row more than ``limit`` says that there is another page."""
    items = tuple([info(row) for row in rows[:limit]])
    return Page(items=items, next=str(rows[limit - 1][0]) if len(rows) > limit else "")


def standing_of(rows: Iterable[Sequence[Any]]) -> frozenset[Standing]:
    """From level, digest of the base, and layers as JSON.  Raises: StoreDamaged."""
    try:
        return frozenset(
            Standing(Level(level), base, tuple(map(str, json.loads(layers)))) for level, base, layers in rows
        )
    except (ValueError, TypeError) as exc:
        raise StoreDamaged(f"a stored sandbox specification cannot be read: {exc}") from exc
