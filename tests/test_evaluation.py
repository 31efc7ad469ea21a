import pytest

from fl_perpcs.config import ConfigError, load_config
from fl_perpcs.data import Example
from fl_perpcs.evaluation import evaluate, generate
from fl_perpcs.prompts import Prompt, prompts_of_queries
from fl_perpcs.tasks import check_task, load_task

TASK = load_task("movie-tagging")
GOLD = "true story"


def prompts(*inputs: str) -> list[Prompt]:
    queries = [Example(f"q/{i}", text, GOLD) for i, text in enumerate(inputs)]
    return prompts_of_queries(queries, [], TASK)


@pytest.mark.parametrize("how", ["generate", "rank", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_length", [10, 21, 22, 64])
def test_a_prompt_that_does_not_fit_is_answered_with_nothing(lm, how, temperature, max_length):
    values = {"evaluation.temperature": temperature, "evaluation.answers": how}
    found = prompts("A boxer", "x" * 100, "A boxer betrays the family.")
    result = evaluate(
        lm, TASK, found, [GOLD] * 3, load_config(values).evaluation, max_length=max_length, seed=0
    )
    assert len(result.predictions) == (0 if how == "none" else 3)
    assert result.metrics["queries"] == 3
    assert result.metrics["dropped"] == (3 if max_length == 10 else 0)
    assert (result.metrics["tokens"] == 0) is (max_length == 10)
    assert ("accuracy" in result.metrics) is (how != "none")
    if how != "none" and max_length == 10:
        assert result.predictions == ["", "", ""]
        assert result.metrics["accuracy"] == 0


def test_one_query_too_long_leaves_the_others_as_they_are(lm):
    how = load_config({}).evaluation
    found = prompts("A boxer", "A mob.", "A clumsy hitman.")
    long = Prompt("long " * 80 + "{input}", "A mob.")
    mixed = [found[0], long, found[2]]
    for answers in ("generate", "rank"):
        how = load_config({"evaluation.answers": answers}).evaluation
        both = [
            evaluate(lm, TASK, p, [GOLD] * 3, how, max_length=64, seed=0) for p in (found, mixed)
        ]
        assert both[1].predictions == [both[0].predictions[0], "", both[0].predictions[2]]
        assert [result.metrics["dropped"] for result in both] == [0, 1]


def test_a_user_without_queries_has_no_metrics(lm):
    result = evaluate(lm, TASK, [], [], load_config({}).evaluation, max_length=64, seed=0)
    assert result.predictions == []
    assert result.metrics == {"loss": 0, "tokens": 0, "queries": 0, "dropped": 0}


def test_answers_do_not_depend_on_who_shares_the_batch(lm):
    found = prompts("A boxer", "A clumsy hitman betrays the family in Brooklyn.", "A mob.")
    how = load_config({"evaluation.batch-size": 8}).evaluation
    alone = load_config({"evaluation.batch-size": 1}).evaluation
    together = generate(lm, TASK, found, how, 64, seed=0)
    assert together == generate(lm, TASK, found, alone, 64, seed=0)
    assert len(set(together)) > 1


def test_answers_stop_at_the_first_line_break(lm, monkeypatch):
    monkeypatch.setattr(
        lm.tokenizer, "batch_decode", lambda ids, **options: [" comedy \n and more"] * len(ids)
    )
    how = load_config({}).evaluation
    assert generate(lm, TASK, prompts("A boxer"), how, 64, seed=0) == ["comedy"]


def test_labels_can_only_be_ranked_where_there_are_some():
    ranking = load_config({"evaluation.answers": "rank"})
    check_task(ranking, TASK)
    check_task(load_config({}), load_task("debian-synopsis"))
    with pytest.raises(ConfigError, match="'debian-synopsis' has no labels to rank"):
        check_task(ranking, load_task("debian-synopsis"))
