"""Tasks as data: the built-in files, a file of one's own, and files that are wrong."""

import re

import pytest

from fl_perpcs.errors import PerPcsError
from fl_perpcs.tasks import fill, load_task, task_names

OWN = """
name = "reviews"
template = "Stars? {input} Stars:"
metrics = ["mae", "accuracy"]
max-new-tokens = 3
labels = ["1", "2", "3"]
"""


@pytest.mark.parametrize("name", task_names())
def test_a_built_in_task_is_whole(name):
    task = load_task(name)
    assert task.name == name
    assert task.title
    assert task.prompt("an input").count("an input") == 1
    if task.lamp:
        assert all(item.input or task.text_template for item in task.lamp.items)
        assert task.profile_template


def test_all_of_lamp_is_there():
    lamp = {load_task(name).lamp.id for name in task_names() if load_task(name).lamp}
    assert lamp == {f"LaMP_{i}" for i in (1, 2, 3, 4, 5, 6, 7)} | {"LaMP_2N"}


def test_the_label_sets_are_those_of_lamp():
    counts = {name: len(load_task(f"lamp-{name}").labels) for name in ("1", "2m", "2n", "3", "4")}
    assert counts == {"1": 2, "2m": 15, "2n": 15, "3": 5, "4": 0}
    for name in ("lamp-2m", "lamp-2n"):
        task = load_task(name)
        (listed,) = re.findall(r": \[([^\]]*)\]", task.template)
        assert sorted(listed.split(", ")) == sorted(task.labels)


def test_a_task_of_one_s_own(tmp_path):
    path = tmp_path / "reviews.toml"
    path.write_text(OWN)
    task = load_task(str(path))
    assert task.prompt("fine {input}") == "Stars? fine {input} Stars:"
    assert task.labels == ("1", "2", "3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{input} Stars:", "Stars:"), "template has no {input}"),
        (('"mae"', '"bleu"'), "'bleu' is not one of accuracy, f1"),
        (('labels = ["1", "2", "3"]', ""), "'mae' needs labels"),
        (('["1", "2", "3"]', '["1", "1"]'), "a label twice"),
        (('["1", "2", "3"]', '["1", "many"]'), "'many' is no number"),
        (("max-new-tokens = 3", "max-new-tokens = 0"), "max-new-tokens"),
        (('name = "reviews"', 'name = "My Reviews"'), "name"),
        (("metrics =", "metric ="), "metrics: Field required"),
        (("[", "("), "is not TOML"),
        (("labels", 'profile-template = "Who?"\nlabels'), "profile-template has no {history}"),
        (
            ("labels", 'lamp = {id = "x", question = "(", items = []}\nlabels'),
            "lamp.question: Value error, not a regular expression",
        ),
        (
            ("labels", 'lamp = {id = "x", question = "(?P<text>.*)", items = []}\nlabels'),
            "lamp: Value error, input: {input} is no group of question",
        ),
    ],
)
def test_a_wrong_file_is_named_with_the_field(tmp_path, change, message):
    path = tmp_path / "reviews.toml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(PerPcsError) as caught:
        load_task(str(path))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_an_unknown_task_and_a_missing_file():
    with pytest.raises(PerPcsError, match=r"'lamp-9' is not known; use one of .*lamp-2m"):
        load_task("lamp-9")
    with pytest.raises(PerPcsError, match=r"/none/mine\.toml cannot be read: No such file"):
        load_task("/none/mine.toml")


def test_fill_leaves_other_braces_alone():
    assert fill("{a} {b} {} {c", a="{b}", b="2") == "{b} 2 {} {c"
