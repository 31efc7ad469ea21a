import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from fl_perpcs import ranking
from fl_perpcs.config import LoraSection
from fl_perpcs.errors import PerPcsError
from fl_perpcs.lm import LM, attach
from fl_perpcs.prompts import Prompt
from fl_perpcs.ranking import label_scores, rank
from fl_perpcs.tasks import load_task
from fl_perpcs.text import Encoded, collate, encode, response_ids
from fl_perpcs.training import response_loss

LABELS = load_task("movie-tagging").labels


def random_lm(family: str, tokenizer, make_lm) -> LM:
    """A random LM of a family, with a slot that changes what it says."""
    tokens = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    if family == "llama":
        found = make_lm()
    elif family == "gpt2":
        base = GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **tokens)
        )
        found = attach(base.eval(), tokenizer, LoraSection(rank=2, target_modules="c_attn"))
    else:  # a window shorter than the prompts
        config = MistralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=8,
            **tokens,
        )
        found = attach(MistralForCausalLM(config).eval(), tokenizer, LoraSection(rank=2))
    for name, parameter in found.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return found


def one_by_one(lm: LM, prompts, responses) -> torch.Tensor:
    """The whole of each prompt and response, alone, through the loss that trains."""
    return torch.tensor(
        [
            [
                -response_loss(lm.model, collate([Encoded(prompt, response)], 0))[0].item()
                for response in responses
            ]
            for prompt in prompts
        ]
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("lengths", [(7,), (3, 20, 1, 50)])
def test_scores_are_those_of_whole_examples_one_by_one(family, lengths, tokenizer, make_lm):
    lm = random_lm(family, tokenizer, make_lm)
    prompts = [tuple(torch.randint(5, 300, (n,)).tolist()) for n in lengths]
    # The last has no token but eos.
    responses = [
        *(response_ids(label, lm.tokenizer) for label in LABELS),
        (tokenizer.eos_token_id,),
    ]
    assert {len(response) for response in responses} >= {1, 2, 4}
    with torch.inference_mode():
        expected = one_by_one(lm, prompts, responses)
    found = label_scores(lm, prompts, responses)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert found.shape == (len(prompts), len(responses))
    assert found.argmax(1).tolist() == expected.argmax(1).tolist()


def test_the_score_is_a_sum_of_log_probabilities(lm):
    prompt, response = (7, 8, 9), response_ids("true story", lm.tokenizer)
    with torch.inference_mode():
        logits = lm.model(input_ids=torch.tensor([prompt + response])).logits[0]
    steps = log_softmax(logits, -1)[2:-1]
    expected = sum(float(step[token]) for step, token in zip(steps, response, strict=True))
    assert float(label_scores(lm, [prompt], [response])[0, 0]) == pytest.approx(expected, abs=1e-4)


def test_a_label_is_tokenized_as_a_trained_response(lm):
    for label in LABELS:
        (example,) = encode([Prompt("{input}", "boxer")], [label], lm.tokenizer, 64)
        assert response_ids(label, lm.tokenizer) == example.response


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_answers_are_the_likeliest_labels_whatever_the_batch(lm, batch_size):
    texts = ["A boxer", "A clumsy hitman betrays the family in Brooklyn.", "mob", "A heist."]
    prompts = [Prompt("Movie: {input} Tag:", text) for text in texts]
    found = rank(lm, LABELS, prompts, batch_size=batch_size, max_length=64)
    encoded = [encode([p], [label], lm.tokenizer, 64)[0] for p in prompts for label in LABELS]
    with torch.inference_mode():
        losses = [response_loss(lm.model, collate([e], 0))[0].item() for e in encoded]
    best = torch.tensor(losses).view(len(texts), len(LABELS)).argmin(1).tolist()
    assert found == [LABELS[index] for index in best]


def test_the_first_of_equally_likely_labels_is_the_answer(lm, monkeypatch):
    scores = torch.tensor([[-2.0, -1.0, -1.0, -3.0], [-1.0, -1.0, -1.0, -1.0]])
    monkeypatch.setattr(ranking, "label_scores", lambda *_: scores)
    prompts = [Prompt("{input}", "boxer"), Prompt("{input}", "mob")]
    found = rank(lm, ["a", "b", "c", "d"], prompts, batch_size=2, max_length=64)
    assert found == ["b", "a"]


def test_a_prompt_leaves_room_for_the_longest_label(lm, monkeypatch):
    seen = []

    def spy(lm, prompts, responses):
        seen.extend(len(ids) + max(map(len, responses)) for ids in prompts)
        return label_scores(lm, prompts, responses)

    monkeypatch.setattr(ranking, "label_scores", spy)
    prompts = [Prompt("Tag: {input}", "boxer " * n) for n in (1, 10, 100)]
    assert all(rank(lm, LABELS, prompts, batch_size=1, max_length=20))
    assert len(seen) == 3 and max(seen) == 20
    assert rank(lm, LABELS, prompts, batch_size=4, max_length=3) == ["", "", ""]


def test_without_labels_there_is_nothing_to_rank(lm):
    with pytest.raises(PerPcsError, match="no labels to rank"):
        rank(lm, [], [Prompt("{input}", "boxer")], batch_size=1, max_length=64)
