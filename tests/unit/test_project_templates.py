"""Templates of projects: each sees its own and everybody's, and what holds the images of one is no other's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.control.named_images import NamedImages
from dsec.control.project_templates import ProjectTemplateStore
from dsec.control.template_store import TemplateStore, digest_of, owner_of
from dsec.errors import Denied, NotFound
from dsec.images.gc import collect
from dsec.images.holds import holders
from dsec.images.shelf import Shelf
from dsec.model.built import Built
from dsec.templates.document import parse
from dsec.templates.dump import digest

OLD = 1_700_000_000
BASE = "sha256:" + "c" * 64


def built(version: str = "1.0.0", name: str = "one") -> Built:
    text = f"name: {name}\nversion: {version}\nruntime: {{base: system}}\n"
    template = parse(text.encode(), source="one.yaml").template
    blueprint = digest(template)
    return Built(
        digest=digest_of(blueprint, BASE, (), ""),
        blueprint=blueprint,
        template=template,
        base="system",
        base_digest=BASE,
        layers=(),
        lock="",
        unenforced=(),
        floating=(),
        built_at=1.0,
    )


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """A store with one image that no name stands for."""
    found = Shelf(tmp_path)
    found.prepare()
    file = tmp_path / "building" / "c"
    file.write_bytes(b"c" * 1000)
    found.publish("c", "c", file, {"digest": BASE})
    (tmp_path / "names/c").unlink()
    return found


def stores(shelf: Shelf, *projects: str) -> tuple[TemplateStore, ...]:
    root = shelf.root / "templates"
    shared = TemplateStore(root, shelf)
    return (shared, *(ProjectTemplateStore(shared, root, shelf, each) for each in projects))


def age(shelf: Shelf) -> None:
    """All that is held was held long ago, and all images were asked for long ago."""
    for path in (*(shelf.root / "held").iterdir(), *(shelf.root / "images").iterdir()):
        os.utime(path, (OLD, OLD))


def test_what_is_one_projects_no_other_one_finds(shelf: Shelf) -> None:
    shared, ours, theirs = stores(shelf, "ours", "theirs")
    made = built()
    ours.put(made)
    assert ours.find("one") == ours.find(made.reference) == ours.remembered("one") == made
    for other in (shared, theirs):
        for reference in ("one", "one:latest", made.reference):
            with pytest.raises(NotFound):
                other.find(reference)
            assert other.remembered(reference) is None
        assert (other.tags(), other.history("one")) == ((), ())
        other.remove("one")
    assert ours.find("one") == made


def test_everybody_sees_what_is_shared_and_an_own_name_goes_before_it(shelf: Shelf) -> None:
    shared, ours, theirs = stores(shelf, "ours", "theirs")
    first, second = built("1.0.0"), built("2.0.0")
    shared.put(first)
    assert ours.find("one") == theirs.find("one") == ours.remembered("one") == first
    ours.put(second)
    assert ours.find("one") == ours.remembered("one") == second
    assert shared.find("one") == theirs.find("one") == theirs.remembered("one") == first
    assert [each.digest for each in ours.tags()] == [second.digest]
    assert [each.digest for each in theirs.tags()] == [first.digest]
    ours.remove("one")
    assert ours.find("one") == ours.remembered("one") == first, "what was taken away is not remembered"
    ours.remove("one")
    assert shared.find("one") == first, "what is everybody's is not a project's to remove"


def test_a_shared_one_is_tagged_as_ones_own(shelf: Shelf) -> None:
    shared, ours = stores(shelf, "ours")
    shared.put(built())
    ours.tag("one", "mine")
    assert ours.find("one:mine") == built()
    with pytest.raises(NotFound):
        shared.find("one:mine")


def test_gc_never_takes_a_projects_images(shelf: Shelf) -> None:
    _, ours, theirs = stores(shelf, "ours", "theirs")
    ours.put(built())
    theirs.put(built())  # the same digest, and a hold of its own
    age(shelf)
    collect(shelf.root, budget=0)
    assert {BASE.removeprefix("sha256:")} == set(holders(shelf.root))
    ours.remove("one")
    age(shelf)
    collect(shelf.root, budget=0)
    assert holders(shelf.root) == {BASE.removeprefix("sha256:"): (owner_of(built().digest, "theirs"),)}
    assert theirs.find("one") == built()
    theirs.remove("one")
    age(shelf)
    assert collect(shelf.root, budget=0), "the positive control: nobody needs it any more"
    assert not list((shelf.root / "images").iterdir())


def test_the_longest_name_of_a_project_can_hold_images(shelf: Shelf) -> None:
    (_, ours) = stores(shelf, "p" * 64)
    ours.put(built())
    age(shelf)
    collect(shelf.root, budget=0)
    assert list((shelf.root / "images").iterdir())


@pytest.mark.anyio
async def test_a_template_of_a_project_names_no_image_by_digest_or_path() -> None:
    images = NamedImages(None)  # type: ignore[arg-type]
    for name in (BASE, "oci:/srv/secret"):
        with pytest.raises(Denied):
            await images.get(name)
