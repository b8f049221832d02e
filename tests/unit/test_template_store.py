"""Built templates on disk: what a crash or a damaged file leaves is no end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.control.template_store import TemplateStore
from dsec.errors import StoreDamaged
from dsec.model.built import Built
from dsec.templates.document import parse


def built(digit: str = "a") -> Built:
    document = parse(b"name: one\nversion: 1.0.0\nruntime: {base: system}\n", source="one.yaml")
    return Built(
        digest="sha256:" + digit * 64,
        blueprint="sha256:" + "b" * 64,
        template=document.template,
        base="system",
        base_digest="sha256:" + "c" * 64,
        layers=(),
        lock="",
        unenforced=(),
        floating=(),
        built_at=1.0,
    )


def test_a_damaged_one_is_whole_again_when_it_is_built_again(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    store.put(built())
    (tmp_path / "built" / f"{'a' * 64}.json").write_text("{")
    with pytest.raises(StoreDamaged, match="no built template"):
        store.find("one")
    store.put(built())
    assert store.find("one") == built()


def test_a_tag_that_was_being_written_is_none(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    store.put(built())
    (tmp_path / "tags/one/.latest.0123abcd").write_text("sha256:" + "a" * 64)
    assert [each.tag for each in store.tags()] == ["latest"]
    assert store.remove("one")
    assert not list((tmp_path / "built").iterdir())


def test_a_line_of_the_history_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    store = TemplateStore(tmp_path)
    store.put(built())
    with (tmp_path / "history/one").open("a") as lines:
        lines.write('{"name": "on\n')
    store.put(built("d"))
    assert [each.digest[-1] for each in store.history("one")] == ["a", "d"]
