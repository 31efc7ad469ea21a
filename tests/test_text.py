"""From examples to token ids: responses stay whole, whatever the prompt's length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from fl_perpcs.data import Example
from fl_perpcs.prompts import Prompt, history_prompt, query_prompt
from fl_perpcs.tasks import load_task
from fl_perpcs.text import IGNORE, Batch, Encoded, collate, encode, encode_prompt, in_batches
from fl_perpcs.tiny_lm import build_tokenizer

TOKENIZER = build_tokenizer()
MOVIE_TAGGING, DEBIAN_SYNOPSIS = load_task("movie-tagging"), load_task("debian-synopsis")
FEWEST = len(TOKENIZER(MOVIE_TAGGING.prompt(""))["input_ids"])
DESCRIPTION = "A clumsy hitman betrays the family in Brooklyn. It ends with a botched hit."

inputs = st.lists(
    st.sampled_from(["a", "boxer", "family", "Brooklyn", ".", "qqq", "é", "😀", "\n", "  "]),
    max_size=30,
).map(" ".join)


def with_bos() -> PreTrainedTokenizerFast:
    """As Llama's: the tokenizer itself puts a token at the beginning."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    return tokenizer


def example(text: str, output: str = "true story") -> Example:
    return Example("user/0", text, output)


def encode_all(examples, task, tokenizer, max_length) -> list[Encoded]:
    prompts = [query_prompt(e, task) for e in examples]
    return encode(prompts, [e.output for e in examples], tokenizer, max_length)


def prompt_ids(text, task, tokenizer, budget) -> tuple[int, ...]:
    return encode_prompt(Prompt(task.template, text), tokenizer, budget)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_prompt_and_response_are_the_ids_of_the_whole_text_and_eos():
    (encoded,) = encode_all([example(DESCRIPTION)], MOVIE_TAGGING, TOKENIZER, 128)
    whole = ids(f"{MOVIE_TAGGING.prompt(DESCRIPTION)} true story")
    assert encoded.prompt + encoded.response == (*whole, TOKENIZER.eos_token_id)
    assert encoded.response == (*ids(" true story"), TOKENIZER.eos_token_id)


@settings(deadline=None, max_examples=60)
@given(inputs, st.sampled_from(["comedy", "true story", "x" * 9, "é😀"]), st.integers(1, 60))
def test_the_response_is_whole_and_the_length_is_kept_at_any_limit(text, output, max_length):
    for encoded in encode_all([example(text, output)], MOVIE_TAGGING, TOKENIZER, max_length):
        assert encoded.response == (*ids(f" {output}"), TOKENIZER.eos_token_id)
        assert encoded.prompt
        assert len(encoded.prompt) + len(encoded.response) <= max_length


@settings(deadline=None, max_examples=60)
@given(inputs, st.integers(1, 60))
def test_a_shortened_prompt_is_the_template_around_a_beginning_of_the_input(text, budget):
    prompt = prompt_ids(text, MOVIE_TAGGING, TOKENIZER, budget)
    if len(ids(MOVIE_TAGGING.prompt(text))) <= budget:
        assert prompt == ids(MOVIE_TAGGING.prompt(text))
    elif prompt:
        before, after = MOVIE_TAGGING.template.split("{input}")
        decoded = TOKENIZER.decode(prompt)
        assert decoded.startswith(before)
        assert decoded.endswith(after)
        assert text.startswith(decoded[len(before) : len(decoded) - len(after)].rstrip())


def test_a_long_input_is_shortened_at_its_end_and_no_more_than_needed():
    whole = encode_all([example(DESCRIPTION)], MOVIE_TAGGING, TOKENIZER, 128)[0]
    length = len(whole.prompt) + len(whole.response)
    shorter = encode_all([example(DESCRIPTION)], MOVIE_TAGGING, TOKENIZER, length - 3)[0]
    assert len(shorter.prompt) == len(whole.prompt) - 3
    text = TOKENIZER.decode(shorter.prompt)
    assert "A clumsy hitman betrays the family in Brooklyn." in text
    assert "botched" not in text
    assert text.endswith(" Tag:")


def test_an_example_without_room_for_any_input_is_left_out():
    # One word of input takes the place of the second of two spaces in an empty template.
    room = FEWEST + len(ids(" true story")) + 1
    examples = [example("A boxer", "true story"), example("A boxer", "x" * 40)]
    (kept,) = encode_all(examples, MOVIE_TAGGING, TOKENIZER, room)
    assert kept.response[:-1] == ids(" true story")
    assert encode_all(examples, MOVIE_TAGGING, TOKENIZER, room - 1) == []


def test_a_response_longer_than_the_limit_leaves_the_example_out():
    assert encode_all([example("A boxer", "x" * 40)], MOVIE_TAGGING, TOKENIZER, 20) == []


def test_a_prompt_that_does_not_fit_at_all_is_empty():
    assert prompt_ids(DESCRIPTION, MOVIE_TAGGING, TOKENIZER, FEWEST - 1) == ()
    assert prompt_ids(DESCRIPTION, MOVIE_TAGGING, TOKENIZER, 0) == ()
    assert prompt_ids(DESCRIPTION, MOVIE_TAGGING, TOKENIZER, -5) == ()


def test_an_input_that_holds_the_template_s_words_is_shortened_too():
    text = "{input} Tag: " * 20
    prompt = prompt_ids(text, DEBIAN_SYNOPSIS, TOKENIZER, 60)
    assert 0 < len(prompt) <= 60
    assert TOKENIZER.decode(prompt).endswith("\nSynopsis:")


def test_a_bos_token_comes_first_where_the_tokenizer_puts_one_and_only_there():
    tokenizer = with_bos()
    (encoded,) = encode_all([example(DESCRIPTION)], MOVIE_TAGGING, tokenizer, 128)
    assert encoded.prompt[0] == tokenizer.bos_token_id
    assert (encoded.prompt + encoded.response).count(tokenizer.bos_token_id) == 1
    (plain,) = encode_all([example(DESCRIPTION)], MOVIE_TAGGING, TOKENIZER, 128)
    assert encoded.prompt[1:] == plain.prompt
    assert encoded.response == plain.response


def test_a_bos_token_that_the_tokenizer_does_not_put_is_not_put():
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    (encoded,) = encode_all([example(DESCRIPTION)], MOVIE_TAGGING, tokenizer, 128)
    assert tokenizer.bos_token_id not in encoded.prompt + encoded.response


def test_a_bos_token_counts_for_the_length():
    tokenizer = with_bos()
    whole = prompt_ids(DESCRIPTION, MOVIE_TAGGING, tokenizer, 128)
    shorter = prompt_ids(DESCRIPTION, MOVIE_TAGGING, tokenizer, len(whole) - 1)
    assert len(shorter) == len(whole) - 1
    assert shorter[0] == tokenizer.bos_token_id


ITEMS = [
    Example("0", "A boxer in Brooklyn. " * 6, "violence"),
    Example("1", "A family in Brooklyn.", "true story"),
]


def augmented(budget: int, profile: str = "a boxer") -> str:
    prompt = query_prompt(Example("q", DESCRIPTION, ""), MOVIE_TAGGING, ITEMS, profile)
    return TOKENIZER.decode(encode_prompt(prompt, TOKENIZER, budget))


def test_the_longest_text_is_shortened_first_and_outputs_stay():
    whole = augmented(500)
    assert whole.count("A boxer in Brooklyn.") == 6
    shorter = augmented(len(ids(whole)) - 8)
    assert len(ids(shorter)) == len(ids(whole)) - 8
    assert shorter.count("A boxer in Brooklyn.") == 4
    for part in ("Tag: violence", "A family in Brooklyn. Tag: true story", DESCRIPTION, "a boxer"):
        assert part in shorter


def test_items_go_before_the_profile_and_the_input_never_goes():
    found = [augmented(budget) for budget in range(1, len(ids(augmented(500))) + 1)]
    assert found[0] == ""
    texts = [text for text in found if text]
    assert all(text.endswith(" Tag:") and "Description: A" in text for text in texts)
    # The least relevant item, then the other, then the profile.
    stages = [(t.count("Tag: true story"), t.count("violence"), "Profile" in t) for t in texts]
    assert stages == sorted(stages)
    assert {(0, 0, False), (0, 0, True), (0, 1, True), (1, 1, True)} == set(stages)


@settings(deadline=None, max_examples=60)
@given(inputs, inputs, inputs, st.integers(1, 90))
def test_an_augmented_prompt_fits_its_budget_or_is_empty(text, profile, retrieved, budget):
    items = [Example("0", retrieved, "comedy"), Example("1", "", retrieved or "x")]
    prompt = query_prompt(Example("q", text, ""), MOVIE_TAGGING, items, profile)
    assert len(encode_prompt(prompt, TOKENIZER, budget)) <= budget


def test_plain_text_trains_whole_or_not_at_all():
    task, tweet = load_task("lamp-7"), Example("t", "", "A boxer in Brooklyn.")
    prompt = history_prompt(tweet, task, ITEMS, "a profile")
    (encoded,) = encode([prompt], [tweet.output], TOKENIZER, 60)
    assert TOKENIZER.decode(encoded.prompt) == "Tweet:"
    assert encoded.response == (*ids(" A boxer in Brooklyn."), TOKENIZER.eos_token_id)
    length = len(encoded.prompt) + len(encoded.response)
    assert encode([prompt], [tweet.output], TOKENIZER, length) == [encoded]
    assert encode([prompt], [tweet.output], TOKENIZER, length - 1) == []


def test_batches_are_padded_on_the_right_and_padding_has_no_label():
    batch = collate([Encoded((5, 6, 7), (8, 1)), Encoded((9,), (3, 4, 1))], pad=0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 1], [9, 3, 4, 1, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.labels.tolist() == [
        [IGNORE, IGNORE, IGNORE, 8, 1],
        [IGNORE, 3, 4, 1, IGNORE],
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6))
def test_the_positions_that_predict_a_response_are_those_before_its_tokens(lengths):
    encoded = [Encoded((7,) * prompt, (8,) * response) for prompt, response in lengths]
    predicts = collate(encoded, pad=0).predicts_response
    for row, (prompt, response) in enumerate(lengths):
        positions = predicts[row].nonzero().flatten().tolist()
        assert positions == list(range(prompt - 1, prompt + response - 1))


def test_the_last_position_predicts_nothing():
    labels = torch.tensor([[3, 4, 5]])
    batch = Batch(labels, torch.ones_like(labels), labels)
    assert batch.predicts_response.tolist() == [[True, True, False]]


def test_a_pad_token_that_is_also_eos_is_a_response_token_only_at_the_end():
    batch = collate([Encoded((5,), (8, 1)), Encoded((5, 6, 7), (8, 1))], pad=1)
    assert batch.predicts_response.sum(dim=1).tolist() == [2, 2]


@pytest.mark.parametrize(("count", "sizes"), [(5, [2, 2, 1]), (4, [2, 2]), (1, [1]), (0, [])])
def test_in_batches_keeps_every_example_in_order(count, sizes):
    encoded = [Encoded((10 + i,), (1,)) for i in range(count)]
    batches = in_batches(encoded, 2, pad=0)
    assert [len(batch.input_ids) for batch in batches] == sizes
    firsts = [int(row[0]) for batch in batches for row in batch.input_ids]
    assert firsts == [10 + i for i in range(count)]
