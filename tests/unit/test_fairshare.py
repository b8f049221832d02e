"""Whose turn is next, and who may join the queue."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.fairshare import FairQueue, Ticket
from dsec.errors import BadRequest


def drained(queue: FairQueue[str]) -> list[str]:
    found = []
    while (ticket := queue.pop()) is not None:
        found.append(ticket.project)
    return found


def fill(queue: FairQueue[str], project: str, count: int, weight: float = 1.0) -> int:
    return sum(queue.push(project, project, weight=weight) is not None for _ in range(count))


def test_one_of_another_project_is_next_however_many_wait() -> None:
    queue: FairQueue[str] = FairQueue(100_000)
    assert fill(queue, "greedy", 10_000) == 10_000
    for _ in range(500):
        assert queue.pop() is not None
    fill(queue, "late", 1)
    served = [ticket.project for _ in range(2) if (ticket := queue.pop()) is not None]
    assert "late" in served


def test_a_late_project_gets_no_turns_for_the_time_it_was_away() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    fill(queue, "early", 100)
    for _ in range(50):
        queue.pop()
    fill(queue, "late", 50)
    first = Counter(drained(queue)[:40])
    assert abs(first["early"] - first["late"]) <= 1


def test_turns_follow_weights() -> None:
    queue: FairQueue[str] = FairQueue(10_000)
    fill(queue, "one", 300)
    fill(queue, "three", 300, weight=3)
    first = Counter(drained(queue)[:200])
    assert 148 <= first["three"] <= 152


def test_what_costs_more_takes_more_turns() -> None:
    queue: FairQueue[str] = FairQueue(10_000)
    for _ in range(20):
        queue.push("forks", "forks", cost=10)
    fill(queue, "single", 200)
    first = Counter(drained(queue)[:110])
    assert first["forks"] <= 11


def test_what_leaves_costs_nothing_and_is_not_served() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    tickets = [queue.push("a", str(n)) for n in range(10)]
    fill(queue, "b", 3)
    for ticket in tickets[:9]:
        assert ticket is not None
        assert queue.remove(ticket)
        assert not queue.remove(ticket)
    assert len(queue) == 4
    assert sorted(drained(queue)) == ["a", "b", "b", "b"]


def test_one_project_cannot_fill_the_queue() -> None:
    queue: FairQueue[str] = FairQueue(100)
    assert fill(queue, "greedy", 1000) == 45
    assert fill(queue, "other", 1) == 1
    for n in range(8):
        fill(queue, f"p{n}", 1000)
    assert fill(queue, "latest", 1) == 1


def test_a_heavy_project_leaves_room_too() -> None:
    queue: FairQueue[str] = FairQueue(100)
    assert fill(queue, "heavy", 1000, weight=1000) <= 90
    assert fill(queue, "other", 1) == 1


def test_nobody_waits_where_nobody_may() -> None:
    assert FairQueue[str](0).push("a", "a") is None
    with pytest.raises(BadRequest):
        FairQueue[str](-1)


def test_projects_that_are_gone_are_forgotten() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for n in range(1000):
        queue.push(f"p{n}", "x")
        queue.pop()
        queue.idle()
    assert len(queue._flows) == 0
    for n in range(1000):  # never idle, and everybody comes again
        queue.serve(f"p{n % 10}")
    assert len(queue._flows) <= 11
    ticket = queue.push("a", "a")
    for _ in range(10_000):
        assert ticket is not None
        queue.remove(ticket)
        ticket = queue.push("a", "a")
    assert len(queue._heap) < 200


acts = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(1, 4)),
        st.tuples(st.just("pop"), st.just(""), st.just(0)),
        st.tuples(st.just("remove"), st.just(""), st.integers(0, 50)),
    ),
    max_size=200,
)


@given(acts, st.integers(0, 30))
def test_nothing_is_lost_doubled_or_beyond_the_bound(plan: list[tuple[str, str, int]], bound: int) -> None:
    queue: FairQueue[int] = FairQueue(bound)
    waiting: list[Ticket[int]] = []
    for n, (act, project, number) in enumerate(plan):
        if act == "push":
            ticket = queue.push(project, n, weight=number)
            if ticket is not None:
                waiting.append(ticket)
        elif act == "pop":
            ticket = queue.pop()
            assert (ticket is None) is (not waiting)
            if ticket is not None:
                first = next(one for one in waiting if one.project == ticket.project)
                assert ticket is first  # within a project who came first is served first
                waiting.remove(ticket)
        elif waiting:
            ticket = waiting.pop(number % len(waiting))
            assert queue.remove(ticket)
        assert len(queue) == len(waiting) <= bound
        assert queue.by_project() == Counter(one.project for one in waiting)
    assert len(drained_all(queue)) == len(waiting)


def drained_all(queue: FairQueue[int]) -> list[Ticket[int]]:
    found = []
    while (ticket := queue.pop()) is not None:
        found.append(ticket)
    return found


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 8), min_size=2),
    st.integers(0, 200),
)
def test_whoever_comes_waits_one_turn_per_weight_of_others(weights: dict[str, int], served: int) -> None:
    """However long the others have waited: before the first turn of a new project each of them has its own share, once."""
    queue: FairQueue[str] = FairQueue(10**6)
    late, *others = sorted(weights)
    for project in others:
        fill(queue, project, 300, weight=weights[project])
    for _ in range(min(served, 300 * len(others) - 50)):
        queue.pop()
    fill(queue, late, 1, weight=weights[late])
    before = 0
    while (ticket := queue.pop()) is not None and ticket.project != late:
        before += 1
    assert before <= sum(weights[project] for project in others)
