"""Prompts: what is retrieved for whom, and that no item is its own example."""

from hypothesis import given
from hypothesis import strategies as st

from fl_perpcs.data import Example
from fl_perpcs.prompts import (
    Preamble,
    history_prompt,
    profile_prompt,
    prompts_of_history,
    prompts_of_queries,
    query_prompt,
)
from fl_perpcs.retrieval import rank_bm25
from fl_perpcs.tasks import load_task

MOVIES, TITLES, TWEETS = load_task("lamp-2m"), load_task("lamp-5"), load_task("lamp-7")
HISTORY = [
    Example("0", "a boxer fights in Brooklyn", "violence"),
    Example("1", "a robot dreams of Mars", "sci-fi"),
    Example("2", "a boxer falls in love", "romance"),
    Example("3", "another robot lands on Mars", "sci-fi"),
]


def test_the_published_prompt_with_history_and_profile():
    query = Example("q", "a robot", "")
    assert query_prompt(query, TITLES, [HISTORY[0]], "likes robots").render() == (
        "### User Profile:\nlikes robots\n\n"
        "### User History:\nabstract: a boxer fights in Brooklyn title: violence\n\n\n"
        "### User Instruction:\nGenerate a title for the following abstract of a paper.\n"
        "Abstract: a robot Title:"
    )


def test_a_query_gets_the_most_relevant_items_best_first():
    prompts = prompts_of_queries(
        [Example("q", "the robot on Mars", "")], HISTORY, MOVIES, Preamble(rank_bm25, 2)
    )
    assert prompts[0].retrieved == (HISTORY[3].input, HISTORY[1].input)
    assert "another robot lands on Mars Tag: sci-fi\nDescription:" in prompts[0].render()


def test_an_item_is_shown_earlier_items_only():
    prompts = prompts_of_history(HISTORY, MOVIES, Preamble(rank_bm25, 3))
    assert [len(p.retrieved) for p in prompts] == [0, 1, 2, 3]
    assert prompts[2].retrieved[0] == HISTORY[0].input
    assert prompts[3].retrieved[0] == HISTORY[1].input


@given(st.lists(st.sampled_from(["a boxer", "Mars", "love", "é"]), max_size=8), st.integers(0, 4))
def test_no_item_is_its_own_example(texts, k):
    history = [Example(str(i), f"{text} number{i}", "comedy") for i, text in enumerate(texts)]
    prompts = prompts_of_history(history, MOVIES, Preamble(rank_bm25, k))
    for i, prompt in enumerate(prompts):
        assert len(prompt.retrieved) == min(k, i)
        assert set(prompt.retrieved) <= {item.input for item in history[:i]}


def test_an_output_that_looks_like_a_template_stays_as_it_is():
    item = Example("0", "{output} of {input}", "{input} {history}")
    text = query_prompt(Example("q", "{input}{x}", ""), MOVIES, [item], "{history}").render()
    assert "Description: {output} of {input} Tag: {input} {history}\n" in text
    assert text.endswith("Description: {input}{x} Tag:")
    assert text.startswith("### User Profile:\n{history}\n")


def test_a_tweet_is_shown_as_a_tweet_and_asked_nothing():
    tweet = Example("0", "", "so tired lol")
    assert "### User History:\nTweet: so tired lol\n" in (
        query_prompt(Example("q", "I am tired", ""), TWEETS, [tweet]).render()
    )
    assert history_prompt(tweet, TWEETS, [tweet], "profile").render() == "Tweet:"


def test_a_history_item_has_the_published_wording_of_history():
    item = Example("0", "an abstract", "a title")
    assert history_prompt(item, TITLES).render() == (
        "Generate a title for the following abstract of a paper.\n abstract: an abstract title:"
    )


def test_the_profile_prompt_holds_the_items_where_the_task_says():
    text = profile_prompt(HISTORY[:2], MOVIES).render()
    assert text.startswith("Look at the following past movies")
    assert "User History: Description: a boxer fights in Brooklyn Tag: violence\n" in text
    assert text.endswith("Answer:")


def test_no_history_and_no_query():
    assert prompts_of_history([], MOVIES, Preamble(rank_bm25, 2)) == []
    assert prompts_of_queries([], HISTORY, MOVIES, Preamble(rank_bm25, 2)) == []
    (prompt,) = prompts_of_queries([Example("q", "x", "")], [], MOVIES, Preamble(rank_bm25, 2))
    assert prompt.retrieved == ()
