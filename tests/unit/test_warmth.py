"""How many sandboxes of each kind shall be ready: arrivals in, numbers out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.warmth import (
    IDLE,
    PRESSED,
    QUIET,
    STEADY,
    Demand,
    Wish,
    pause,
    shares,
    short_of_memory,
    wanted,
)

MAKE = 0.005


def asked(*times: float) -> Demand:
    demand = Demand()
    for time in times:
        demand.ask(time)
    return demand


def every(seconds: float, *, until: float) -> Demand:
    return asked(*[step * seconds for step in range(int(until / seconds) + 1)])


def test_the_first_that_is_asked_for_has_a_second_ready_while_it_is_the_latest() -> None:
    assert wanted(asked(0.0), 1.0, MAKE, latest=True) == 1
    assert wanted(asked(0.0), 1.0, MAKE, latest=False) == 0


def test_what_comes_again_keeps_one_beside_others() -> None:
    assert wanted(asked(0.0, 100.0), 101.0, MAKE, latest=False) == 1


def test_nobody_came_for_long_enough() -> None:
    demand = every(0.05, until=10)
    assert wanted(demand, 10 + IDLE - 1, MAKE, latest=True) >= 1
    assert wanted(demand, 10 + IDLE + 1, MAKE, latest=True) == 0


@pytest.mark.parametrize("rate", [0.2, 1.0, 5.0, 20.0])
def test_a_steady_rate_is_measured(rate: float) -> None:
    demand = every(1 / rate, until=5 * STEADY)
    assert demand.rate(5 * STEADY) == pytest.approx(rate, rel=0.6)


def test_arrivals_that_become_more_are_seen_within_seconds_and_forgotten_within_minutes() -> None:
    demand = every(10.0, until=600.0)
    for step in range(200):
        demand.ask(600 + step * 0.05)
    assert demand.rate(610) > 15
    assert demand.rate(610 + 3 * STEADY) < 1


def test_the_longer_one_takes_the_more_are_ready() -> None:
    demand = every(0.2, until=60)
    few, many = (wanted(demand, 60.0, make, latest=True) for make in (0.01, 2.0))
    assert few < many
    assert many >= 2.0 * 5


def test_as_many_as_came_together_are_ready_when_they_come_again() -> None:
    demand = asked(*[0.0] * 8, *[60.0] * 8)
    assert wanted(demand, 61.0, MAKE, latest=True) == 8
    assert wanted(demand, 59.0 + IDLE, MAKE, latest=True) == 4


def test_a_burst_in_the_past_fades_while_single_ones_come() -> None:
    demand = asked(*[0.0] * 16)
    seen = []
    for minute in range(1, 31):
        demand.ask(minute * 60.0)
        seen.append(wanted(demand, minute * 60.0 + 1, MAKE, latest=True))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 1


def wish(wanted: int, saves: float, cost: int = 1, first: int = 0) -> Wish:
    return Wish(wanted=wanted, saves=saves, cost=cost, first=first)


def test_places_are_shared_by_what_they_save() -> None:
    assert shares([wish(9, 3.0), wish(9, 1.0)], 4, 100) == [3, 1]
    assert shares([wish(9, 1.0), wish(9, 1.0)], 4, 100) == [2, 2]
    assert shares([wish(1, 9.0), wish(9, 1.0)], 4, 100) == [1, 3]


def test_the_least_valuable_loses_when_memory_is_full() -> None:
    assert shares([wish(2, 5.0, 10), wish(2, 1.0, 10)], 10, 25) == [2, 0]
    assert shares([wish(1, 5.0, 40), wish(2, 1.0, 10)], 10, 25) == [0, 2], "what does not fit blocks nobody"


def test_some_go_first() -> None:
    assert shares([wish(9, 9.0), wish(3, 0.1, first=2)], 3, 100) == [1, 2]


@given(
    st.lists(
        st.builds(
            wish, st.integers(0, 50), st.floats(0, 1e6), st.integers(1, 2**30), first=st.integers(0, 50)
        ),
        max_size=32,
    ),
    st.integers(0, 200),
    st.integers(0, 2**32),
)
def test_no_bound_is_ever_exceeded(wishes: list[Wish], places: int, memory: int) -> None:
    given = shares(wishes, places, memory)
    assert sum(given) <= places
    assert sum(count * each.cost for count, each in zip(given, wishes, strict=True)) <= memory
    assert all(0 <= count <= each.wanted for count, each in zip(given, wishes, strict=True))


def test_whoever_claimed_one_has_the_processor_first() -> None:
    assert pause(0, 1) == QUIET
    assert pause(2, 4) == QUIET
    assert pause(1, 4) == PRESSED


def test_short_of_memory_until_there_is_ample() -> None:
    assert not short_of_memory(0.10, before=False)
    assert short_of_memory(0.05, before=False)
    assert short_of_memory(0.10, before=True)
    assert not short_of_memory(0.20, before=True)
