"""What templates of projects may take: turns that are fair and bounded, and disk that is counted exactly, whoever builds at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.control.allowance import BuildTurns, ImageAccounts, ProjectAllowance
from dsec.control.project_templates import ProjectTemplateStore
from dsec.control.template_store import TemplateStore, digest_of
from dsec.core.quotas import BYTES_PER_MIB, Ledger
from dsec.errors import Busy, NotFound, OverQuota, StorageFull
from dsec.images.shelf import Shelf
from dsec.model.built import Built
from dsec.model.tenants import Quota
from dsec.ports.admission import QuotaSource
from dsec.templates.document import parse
from dsec.templates.dump import digest
from dsec.wiring.templates import project_stores, weigh

pytestmark = pytest.mark.anyio

BASE = "sha256:" + "b" * 64


class Quotas(QuotaSource):
    """The same for every project."""

    def __init__(self, quota: Quota) -> None:
        self.value = quota

    def quota(self, project: str) -> Quota:
        del project
        return self.value


class World:
    """An image store with images of a MiB each, and templates of projects over them."""

    def __init__(self, root: Path, quota: Quota) -> None:
        self.shelf = Shelf(root)
        self.shelf.prepare()
        self.quotas = Quotas(quota)
        self.ledger = Ledger(self.quotas.quota)
        self.turns = BuildTurns(self.quotas)
        self.accounts = ImageAccounts(self.ledger, lambda digests: weigh(root, digests))

    def make(self, letter: str, name: str = "") -> None:
        """Store one, which a name may stand for. Blocking."""
        file = self.shelf.root / "building" / letter
        with file.open("wb") as made:
            made.truncate(BYTES_PER_MIB)
        self.shelf.publish(letter, name, file, {"digest": image(letter), "name": name})
        if not name:
            (self.shelf.root / "names" / letter).unlink(missing_ok=True)

    def store(self, project: str) -> TemplateStore:
        root = self.shelf.root / "templates"
        return ProjectTemplateStore(TemplateStore(root, self.shelf), root, self.shelf, project)

    def allowance(self, project: str) -> ProjectAllowance:
        return ProjectAllowance(project, self.turns, self.accounts)

    def held(self, project: str) -> int:
        return self.ledger.held(project).disk_mib


def image(letter: str) -> str:
    """Its digest."""
    return f"sha256:{letter * 64}"


def built(name: str, *layers: str, base: str = BASE) -> Built:
    text = f"name: {name}\nversion: 1.0.0\nruntime: {{base: system}}\n"
    template = parse(text.encode(), source="one.yaml").template
    blueprint = digest(template)
    return Built(
        digest=digest_of(blueprint, base, layers, ""),
        blueprint=blueprint,
        template=template,
        base="system",
        base_digest=base,
        layers=layers,
        lock="",
        unenforced=(),
        floating=(),
        built_at=1.0,
    )


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path, Quota(disk_mib=3))
    made.make("b", "system")
    made.make("d", "docker://docker.io/library/x:1")
    for letter in "12345678":
        made.make(letter)
    return made


class TestDisk:
    async def test_each_image_counts_once_and_is_freed_with_the_last_that_needs_it(
        self, world: World
    ) -> None:
        one, two = image("1"), image("2")
        ours, store = world.allowance("ours"), world.store("ours")
        await ours.put(store, built("a", one), "latest")
        assert world.held("ours") == 1, "what everybody has by name is nobody's"
        await ours.put(store, built("b", two, one), "latest")
        assert world.held("ours") == 2
        await ours.put(store, built("b", two, one), "again")
        assert world.held("ours") == 2
        await ours.remove(store, "b")
        assert world.held("ours") == 2, "another tag means it still"
        await ours.remove(store, "b:again")
        assert world.held("ours") == 1
        await ours.remove(store, "a")
        assert (world.held("ours"), world.ledger.reserved("ours").disk_mib) == (0, 0)

    async def test_what_another_project_has_too_counts_for_both(self, world: World) -> None:
        one = image("1")
        for project in ("ours", "theirs"):
            await world.allowance(project).put(world.store(project), built("a", one), "latest")
        assert (world.held("ours"), world.held("theirs")) == (1, 1)

    async def test_an_image_of_a_registry_counts(self, world: World) -> None:
        base = image("d")
        await world.allowance("ours").put(world.store("ours"), built("a", base=base), "latest")
        assert world.held("ours") == 1

    async def test_so_many_at_once_and_no_more(self, world: World) -> None:
        layers = [image(letter) for letter in "12345678"]
        ours, store = world.allowance("ours"), world.store("ours")
        puts = [ours.put(store, built(f"t{layer[7]}", layer), "latest") for layer in layers]
        ended = await asyncio.gather(*puts, return_exceptions=True)
        refused = [each for each in ended if each is not None]
        assert len(refused) == 5
        assert all(isinstance(each, OverQuota) and each.facts["quota"] == "disk_mib" for each in refused)
        assert (world.held("ours"), world.ledger.reserved("ours").disk_mib) == (3, 0)
        assert len(await asyncio.to_thread(store.tags)) == 3
        await world.allowance("theirs").put(world.store("theirs"), built("a", layers[0]), "latest")

    async def test_no_build_begins_where_nothing_more_may_be_kept(self, world: World) -> None:
        ours, store = world.allowance("ours"), world.store("ours")
        await ours.put(store, built("a", *map(image, "123")), "latest")
        with pytest.raises(OverQuota):
            ours.turn()
        await ours.remove(store, "a")
        async with ours.turn():
            pass

    async def test_what_fails_counts_for_nothing(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, store = world.allowance("ours"), world.store("ours")
        with pytest.raises(NotFound):
            await ours.put(store, built("a", image("9")), "latest")
        one = image("1")

        def full(*_: object) -> None:
            raise StorageFull("no room")

        monkeypatch.setattr(store, "_set", full)
        with pytest.raises(StorageFull):
            await ours.put(store, built("a", one), "latest")
        assert world.held("ours") == 1, "its record is there: so are its images"
        monkeypatch.undo()
        await ours.put(store, built("a", one), "latest")
        await ours.remove(store, "a")
        assert world.held("ours") == 0

    async def test_whoever_leaves_meanwhile_changes_nothing(self, world: World) -> None:
        one = image("1")
        ours, store = world.allowance("ours"), world.store("ours")
        task = asyncio.ensure_future(ours.put(store, built("a", one), "latest"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ours.put(store, built("a", one), "again")
        assert world.held("ours") == 1
        assert await asyncio.to_thread(store.images) == {BASE, one}

    async def test_what_was_there_before_is_counted(self, world: World) -> None:
        for project, letters in (("ours", "1"), ("theirs", "23")):
            store = world.store(project)
            made = built("a", *[image(letter) for letter in letters])
            await asyncio.to_thread(store.put, made, "latest")
        found = await asyncio.to_thread(project_stores, world.shelf.root)
        for project, store in found.items():
            await world.accounts.load(project, store)
        assert {project: world.held(project) for project in found} == {"ours": 1, "theirs": 2}


class TestTurns:
    async def test_one_project_keeps_no_other_waiting(self) -> None:
        turns = BuildTurns(Quotas(Quota()), at_once=1, queue=20)
        go, order = asyncio.Event(), []

        async def build(project: str) -> None:
            async with turns.turn(project):
                order.append(project)
                await go.wait()

        tasks = [asyncio.ensure_future(build("greedy")) for _ in range(9)]
        await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(build("other"))]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*tasks)
        assert order.index("other") <= 2
        assert len(order) == 10

    async def test_beyond_the_queue_it_is_busy_at_once_and_others_have_places(self) -> None:
        turns = BuildTurns(Quotas(Quota()), at_once=1, queue=10)

        async def build(project: str) -> None:
            async with turns.turn(project):
                await asyncio.Event().wait()

        tasks = [asyncio.ensure_future(build("greedy")) for _ in range(20)]
        done, _ = await asyncio.wait(tasks, timeout=0.05)
        assert {type(task.exception()) for task in done} == {Busy}
        refused = next(iter(done)).exception()
        assert isinstance(refused, Busy)
        assert refused.facts["reason"] == "builds"
        assert refused.facts["retry_after"]
        other = asyncio.ensure_future(build("other"))
        await asyncio.sleep(0)
        assert not other.done()
        for task in (*tasks, other):
            task.cancel()
        await asyncio.wait((*tasks, other))
        async with asyncio.timeout(1), turns.turn("later"):
            pass  # who left has left no place taken

    async def test_a_place_that_is_given_while_its_owner_leaves_is_given_on(self) -> None:
        turns = BuildTurns(Quotas(Quota()), at_once=1)
        async with turns.turn("one"):
            waiting = asyncio.ensure_future(turns.turn("two").__aenter__())
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(1), turns.turn("three"):
            pass


async def test_a_share_counts() -> None:
    """Four times the weight, more of the turns."""
    order: list[str] = []

    class Weighted(QuotaSource):
        def quota(self, project: str) -> Quota:
            return Quota(share=4) if project == "heavy" else Quota()

    turns = BuildTurns(Weighted(), at_once=1)
    go = asyncio.Event()

    async def build(project: str) -> None:
        async with turns.turn(project):
            order.append(project)
            await go.wait()

    tasks = [asyncio.ensure_future(build("light"))]
    await asyncio.sleep(0)
    tasks += [asyncio.ensure_future(build(name)) for name in ("light", "heavy") for _ in range(4)]
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)
    assert order[1:6].count("heavy") >= 3
