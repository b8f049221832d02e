"""The soak's own rules: what its plan depends on, what its ledger takes for certain, and how its total grows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dsec.model.sandbox import State
from dsec.testing.soak import plan
from dsec.testing.soak.house import Told
from dsec.testing.soak.ledger import ALIVE, AWAKE, Command, Known, Ledger, Traces
from dsec.testing.soak.run import LEVELS, Wish

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import soak

PAUSED = frozenset({State.PAUSED})


def known() -> tuple[Ledger, Known]:
    ledger = Ledger()
    one = ledger.sandboxes["a"] = Known("a", "p", "container", states=AWAKE)
    return ledger, one


def test_a_plan_is_of_its_seed_and_number_alone() -> None:
    first = [plan.strike(7, number, LEVELS["both"]) for number in range(300)]
    assert first == [plan.strike(7, number, LEVELS["both"]) for number in range(300)]
    assert first != [plan.strike(8, number, LEVELS["both"]) for number in range(300)]
    assert {one.kind for one in first} == set(plan.KINDS)
    assert {one.spawners for one in first} == {True, False}


def test_a_level_without_layers_is_killed_only_where_it_comes() -> None:
    names = {plan.strike(1, number, LEVELS["process"]).failpoint.partition(":")[0] for number in range(500)}
    assert names - {""}
    assert not [
        name for name in names if name.startswith(("snapshot", "fork", "rollback", "wake", "hibernate"))
    ]


def test_one_act_alone_leaves_its_own_state() -> None:
    ledger, one = known()
    with ledger.moving(one, PAUSED):
        assert one.states == ALIVE
    assert one.states == PAUSED


def test_acts_that_meet_leave_any_state() -> None:
    ledger, one = known()
    with ledger.moving(one, PAUSED), ledger.moving(one, AWAKE):
        pass
    assert one.states == ALIVE
    with ledger.touching(one), ledger.moving(one, PAUSED):
        pass
    assert one.states == ALIVE
    with pytest.raises(OSError, match="nobody"), ledger.moving(one, PAUSED):
        raise OSError("nobody knows")
    assert one.states == ALIVE


def test_what_wakes_a_dormant_one_may_have_woken_it() -> None:
    ledger, one = known()
    one.states = frozenset({State.HIBERNATED})
    with ledger.touching(one):
        pass
    assert one.states == {State.HIBERNATED, State.RUNNING}


def test_an_act_that_ends_processes_leaves_ends_unknown() -> None:
    ledger, one = known()
    ledger.commands["t"] = command = Command("ex", "script", "a")
    with ledger.moving(one, PAUSED):
        assert command.sure
    with ledger.moving(one, AWAKE, ends=True):
        assert not command.sure
        assert one.enders == 1
    assert one.enders == 0


def test_what_goes_back_takes_along_what_came_later() -> None:
    _, one = known()
    one.done("early", one.to_come("early"))
    kept = one.kept(one.ran.copy(), one.rolls)
    assert kept == Traces({"early"}, {"early"})
    one.done("late", one.to_come("late"))
    before = one.to_come("meanwhile")
    one.roll(kept)
    during = one.to_come("during")
    one.done("meanwhile", before)
    one.rolled(kept)
    one.done("during", during)
    assert one.ran.must == {"early"}
    assert one.ran.may >= {"early", "late", "meanwhile", "during"}


def test_a_copy_made_while_files_went_back_promises_nothing() -> None:
    _, one = known()
    one.done("early", one.to_come("early"))
    before, rolls = one.ran.copy(), one.rolls
    one.roll(Traces())
    one.rolled(Traces())
    assert one.kept(before, rolls).must == set()


def test_every_run_adds_to_the_total(tmp_path: Path) -> None:
    total = tmp_path / "results" / "soak.json"
    wish = Wish(seed=5, database="postgresql", level="process")
    right = Told(rounds=3, seconds=9.6, restarts=[0.5, 2.0, 1.0])
    right.kills["failpoint"], right.failpoints["create.made"], right.acts["exec"] = 2, 2, 40
    soak.publish(total, wish, right)
    wrong = Told(rounds=1, seconds=1.0, restarts=[3.0], wrong=["round 0: something"])
    wrong.kills["failpoint"] = 1
    soak.publish(total, wish, wrong)
    found = json.loads(total.read_text())
    sums = found["sums"]
    assert (sums["runs"], sums["rounds"], sums["seconds"], sums["violations"]) == (2, 4, 11, 1)
    assert (sums["restarts"], sums["restart_most_s"]) == (4, 3.0)
    assert (sums["kills"], sums["failpoints"], sums["acts"]) == (
        {"failpoint": 3},
        {"create.made": 2},
        {"exec": 40},
    )
    assert [(run["restart_p50_s"], run["violations"]) for run in found["runs"]] == [(1.0, 0), (3.0, 1)]
    assert found["violations"][0]["what"] == "round 0: something"
    assert [path.name for path in total.parent.iterdir()] == ["soak.json"]


def test_a_run_can_be_asked_for_again() -> None:
    wish, total = soak.wish_of(["--seed", "3", "--first", "9", "--rounds", "1", "--no-total"])
    assert (wish.seed, wish.first, wish.rounds, total) == (3, 9, 1, None)
    assert soak.wish_of([])[0].seed != soak.wish_of([])[0].seed
