"""The life of a sandbox, walked completely, and the arithmetic of its deadlines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.deadlines import Moment, deadline_boot, expiry_wall, next_end
from dsec.core.machine import _TABLE, ENDED, LIVE, Command, Event, decide
from dsec.errors import Conflict
from dsec.model.ids import new_sandbox_id
from dsec.model.sandbox import SandboxInfo, SandboxSpec, State


def reachable(start: State, events: tuple[Event, ...] = tuple(Event)) -> set[State]:
    """Every state that some sequence of events leads to."""
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for event in events:
            try:
                to, _ = decide(state, event)
            except Conflict:
                continue
            if to not in seen:
                seen.add(to)
                todo.append(to)
    return seen


def test_every_state_can_be_reached() -> None:
    assert reachable(State.PENDING) | reachable(State.COLD) == set(State)
    assert State.COLD not in reachable(State.PENDING)  # what was made is never taken for what was not


@pytest.mark.parametrize("state", State)
def test_no_state_traps_a_sandbox(state: State) -> None:
    asked, _ = decide(state, Event.DESTROY_ASKED)
    gone, commands = decide(asked, Event.REMOVED)
    assert gone is State.GONE
    assert commands == ()


@pytest.mark.parametrize("state", [state for state in State if state is not State.GONE])
def test_asking_to_destroy_what_lives_leads_to_a_removal(state: State) -> None:
    to, commands = decide(state, Event.DESTROY_ASKED)
    assert to is State.STOPPING
    assert commands == (() if state is State.STOPPING else (Command.REMOVE,))


@pytest.mark.parametrize(("state", "event"), [*itertools.product(LIVE, (Event.INIT_DIED, Event.MISSING))])
def test_death_is_never_an_impossible_event(state: State, event: Event) -> None:
    to, commands = decide(state, event)
    assert to in (State.FAILED, State.LOST, State.STOPPING)
    assert (commands == (Command.REMOVE,)) == (state is not State.STOPPING)


POSSIBLE = [(state, event) for state in State for event in Event if (state, event) in _TABLE]


def test_what_cannot_happen_is_a_conflict_that_says_so() -> None:
    with pytest.raises(Conflict) as refused:
        decide(State.GONE, Event.STARTED)
    assert refused.value.facts == {"state": "gone", "event": "started"}


@pytest.mark.parametrize(("state", "event"), POSSIBLE)
def test_nothing_revives_what_has_ended(state: State, event: Event) -> None:
    to, _ = decide(state, event)
    if state in ENDED or state is State.STOPPING:
        assert to in (*ENDED, State.STOPPING)


@pytest.mark.parametrize(("state", "event"), [*itertools.product(State, Event)])
def test_every_step_is_repeatable_once_taken(state: State, event: Event) -> None:
    """A crash between record and act repeats the event: asking again changes nothing."""
    if event in (Event.STARTED, Event.FREEZE_FAILED, Event.CREATE_FAILED):
        return
    try:
        to, _ = decide(state, event)
    except Conflict:
        return
    assert decide(to, event)[0] is to


def info(ttl: float, wall: float, boot: float) -> SandboxInfo:
    created = Moment(wall, boot, "b")
    return SandboxInfo(
        id=new_sandbox_id(),
        state=State.RUNNING,
        spec=SandboxSpec(ttl=ttl),
        flags=frozenset(),
        created_at=wall,
        expires_at=expiry_wall(created, created, ttl),
        boot_id="b",
        created_boot=boot,
    )


seconds = st.floats(0.001, 1e7)


@given(ttl=seconds, passed=seconds, step=st.floats(-1e8, 1e8))
def test_a_step_of_the_wall_clock_moves_no_deadline(ttl: float, passed: float, step: float) -> None:
    row = info(ttl, 1e9, 500.0)
    later = Moment(1e9 + passed + step, 500.0 + passed, "b")
    assert deadline_boot(row, later) == pytest.approx(500.0 + ttl, abs=1e-4)


@given(passed=seconds, step=st.floats(-1e8, 1e8), ttl=seconds)
def test_extending_after_a_step_counts_from_now(passed: float, step: float, ttl: float) -> None:
    created, now = Moment(1e9, 500.0, "b"), Moment(1e9 + passed + step, 500.0 + passed, "b")
    at = expiry_wall(created, now, ttl)
    assert at - created.wall == pytest.approx(passed + ttl, abs=1e-4)


def test_after_another_boot_the_wall_clock_counts_and_grants_no_more() -> None:
    row = info(100.0, 1e9, 500.0)
    assert deadline_boot(row, Moment(1e9 + 40, 10.0, "other")) == pytest.approx(70.0)
    assert deadline_boot(row, Moment(1e9 - 9999, 10.0, "other")) == pytest.approx(110.0)
    assert deadline_boot(row, Moment(1e9 + 9999, 10.0, "other")) == pytest.approx(10.0)


def test_no_ttl_is_no_deadline() -> None:
    row = info(0.0, 1e9, 500.0)
    assert row.expires_at == 0.0
    assert deadline_boot(row, Moment(1e9, 500.0, "b")) == 0.0


def test_idleness_never_ends_a_busy_one() -> None:
    assert next_end(0.0, 5.0, 100.0, busy=True) == 0.0
    assert next_end(0.0, 5.0, 100.0, busy=False) == 105.0
    assert next_end(103.0, 5.0, 100.0, busy=True) == 103.0
    assert next_end(103.0, 5.0, 100.0, busy=False) == 103.0
    assert next_end(0.0, 0.0, 100.0, busy=False) == 0.0
