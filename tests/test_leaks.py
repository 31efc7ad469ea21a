"""Leaks: history items that give a query away are found, and removed, kept or refused."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_perpcs.data import Example, User
from fl_perpcs.data.leaks import LeakChecked, find_leaks
from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import Task, load_task

MOVIES, TITLES, TWEETS = load_task("lamp-2m"), load_task("lamp-5"), load_task("lamp-7")
CITATION = load_task("lamp-1")


@dataclass(frozen=True)
class One:
    """A source of one user."""

    task: Task
    only: User

    def user_ids(self) -> list[str]:
        return [self.only.id]

    def user(self, user_id: str) -> User:
        return self.only


def user_of(query: tuple[str, str], *history: tuple[str, str]) -> User:
    items = tuple(Example(f"h{i}", *pair) for i, pair in enumerate(history))
    return User("u", items, (Example("q", *query),))


def leaks(task: Task, query: tuple[str, str], *history: tuple[str, str]) -> list[str]:
    return [item.id for item in find_leaks(user_of(query, *history), task)]


def test_the_same_input_leaks_whatever_its_case_and_spacing():
    assert leaks(MOVIES, ("A Boxer  wins", "comedy"), ("a boxer wins ", "action")) == ["h0"]
    assert leaks(MOVIES, ("A boxer wins", "comedy"), ("a boxer won", "action")) == []


def test_a_gold_leaks_where_it_is_no_label():
    assert leaks(TITLES, ("abstract", "My Title"), ("other", "my title"), ("x", "y")) == ["h0"]
    assert leaks(MOVIES, ("a film", "comedy"), ("another", "comedy")) == []


def test_plain_text_leaks_as_gold_or_as_input():
    assert leaks(TWEETS, ("I am tired", "so tired"), ("", "So tired"), ("", "I am  TIRED")) == [
        "h0",
        "h1",
    ]


def test_the_title_of_a_citation_query_leaks():
    query = ("On Graphs\nReference: [1] - A [2] - B", "[1]")
    assert leaks(CITATION, query, ("", "on graphs"), ("", "On trees")) == ["h0"]


def test_leaks_are_removed_kept_or_stop_the_run():
    user = user_of(("a film", "x"), ("A film", "comedy"), ("b", "action"))
    assert [i.id for i in LeakChecked(One(MOVIES, user), "remove").user("u").history] == ["h1"]
    assert LeakChecked(One(MOVIES, user), "keep").user("u") == user
    with pytest.raises(PerPcsError, match="history item 'h0' of user 'u' gives one of its quer"):
        LeakChecked(One(MOVIES, user), "stop").user("u")
    clean = user_of(("a film", "x"), ("b", "action"))
    assert LeakChecked(One(MOVIES, clean), "stop").user("u") == clean


words = st.sampled_from(["a", "A ", "b", "a\nb", "c", ""])


@given(
    st.sampled_from([MOVIES, TITLES, TWEETS]),
    st.tuples(words, words),
    st.lists(st.tuples(words, words), max_size=5),
)
def test_nothing_leaks_after_removal_and_nothing_else_is_gone(task, query, history):
    user = user_of(query, *history)
    found = find_leaks(user, task)
    cleaned = LeakChecked(One(task, user), "remove").user("u")
    assert find_leaks(cleaned, task) == []
    assert len(cleaned.history) == len(user.history) - len(found)
    assert cleaned.queries == user.queries
