import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fl_perpcs import tiny_lm
from fl_perpcs.data.personas import Personas
from fl_perpcs.tasks import load_task
from fl_perpcs.tiny_lm import Recipe, build_tokenizer, ensure_tiny_lm

MOVIE_TAGGING = load_task("movie-tagging")
SMALL = Recipe(hidden=16, intermediate=32, layers=2, heads=2, users=8, items=8, steps=5, batch=4)


@pytest.fixture(autouse=True)
def perpcs_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PERPCS_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tag", MOVIE_TAGGING.labels)
def test_tags_round_trip(tokenizer, tag):
    encoded = ids(tokenizer, f" {tag}")
    assert len(encoded) < MOVIE_TAGGING.max_new_tokens
    padded = [tokenizer.pad_token_id, *encoded, tokenizer.eos_token_id]
    assert tokenizer.decode(padded, skip_special_tokens=True) == f" {tag}"


def test_prompt_and_response_concatenate(tokenizer):
    for example in Personas(1, 1, 100, 0, 5).user("user-0000").history:
        prompt, response = MOVIE_TAGGING.prompt(example.input), f" {example.output}"
        apart = ids(tokenizer, prompt) + ids(tokenizer, response)
        assert apart == ids(tokenizer, prompt + response)
        assert tokenizer.decode(apart) == prompt + response


def test_the_generator_is_spelled_in_whole_words(tokenizer):
    for example in Personas(20, 20, 20, 0, 6).user("user-0003").history:
        pieces = tokenizer.convert_ids_to_tokens(ids(tokenizer, f" {example.input}"))
        assert len([piece for piece in pieces if piece.startswith("Ġ")]) == len(
            example.input.split()
        )


@pytest.mark.parametrize("text", ["Zebra crossing, 42", "naïve 漢字\n\n  two  spaces", "'tis"])
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_padding_on_either_side(tokenizer):
    pad = tokenizer.pad_token_id
    for side, column in (("left", 0), ("right", -1)):
        padded = tokenizer([" a film", " film"], padding=True, padding_side=side)
        assert padded["input_ids"][1][column] == pad
        assert padded["attention_mask"][1][column] == 0


def test_loads_and_generates():
    folder = ensure_tiny_lm(show_progress=False, recipe=SMALL)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    prompts = [MOVIE_TAGGING.prompt("A slow film."), MOVIE_TAGGING.prompt("Long ago, a film.")]
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    out = model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert out.shape[1] <= batch["input_ids"].shape[1] + 3
    assert not list(folder.glob("*.bin"))


def test_deterministic_and_torch_state_is_put_back():
    tokenizer = build_tokenizer()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first, second = (tiny_lm.pretrain(SMALL, tokenizer, False).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_training_lowers_the_loss():
    tokenizer = build_tokenizer()
    items = [tiny_lm._encode(tokenizer, *pair) for pair in SMALL.texts()]
    losses = []
    for steps in (1, 60):
        recipe = Recipe(**{**vars(SMALL), "steps": steps})
        model = tiny_lm.pretrain(recipe, tokenizer, False)
        with torch.no_grad():
            losses.append(tiny_lm._loss(model, items, 1.0).item())
    assert losses[1] < losses[0] - 1


def test_second_call_does_not_train(monkeypatch):
    folder = ensure_tiny_lm(show_progress=False, recipe=SMALL)

    def must_not_train(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(tiny_lm, "pretrain", must_not_train)
    assert ensure_tiny_lm(recipe=SMALL) == folder


def test_each_recipe_has_its_own_folder():
    assert Recipe().digest() == Recipe().digest()
    assert len({Recipe().digest(), Recipe(steps=7).digest(), Recipe(seed=1).digest()}) == 3


def test_half_a_model_is_never_visible(monkeypatch, perpcs_home):
    def interrupted(*args):
        assert not list((perpcs_home / "cache").glob("tiny-lm-*/"))
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_lm, "pretrain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_tiny_lm(recipe=SMALL)
    assert not [path for path in (perpcs_home / "cache").iterdir() if path.is_dir()]


def test_only_one_of_many_trains(monkeypatch):
    calls = []
    pretrain = tiny_lm.pretrain
    monkeypatch.setattr(tiny_lm, "pretrain", lambda *args: calls.append(1) or pretrain(*args))
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(ensure_tiny_lm(False, SMALL)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1 and len(folders) == 3
    assert len(calls) == 1


def test_progress_goes_to_stderr(capsys):
    ensure_tiny_lm(show_progress=True, recipe=SMALL)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Pre-training" in err
