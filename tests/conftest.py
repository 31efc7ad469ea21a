"""What the tests share: a random little LM on disk, and a federation of a few seconds.

``PERPCS_HOME`` is a temporary folder for every test but the end-to-end tests, which keep the one
of the environment (or the default): the tiny LM is pre-trained there once, not anew each time.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fl_perpcs.config import Config, LoraSection, Value
from fl_perpcs.lm import LM, attach
from fl_perpcs.tiny_lm import build_tokenizer

OUTSIDE_HOME = os.environ.get("PERPCS_HOME")

SMALL: dict[str, Value] = {
    "lm.device": "cpu",
    "lm.max-length": 64,
    "data.users": 11,
    "data.communities": 2,
    "data.history": 6,
    "data.queries": 2,
    "roles.base": 3,
    "roles.candidates": 4,
    "roles.targets": 3,
    "lora.rank": 2,
    "lora.alpha": 4.0,
    "adaptation.rounds": 1,
    "adaptation.steps": 1,
    "adaptation.batch-size": 2,
    "sharers.count": 3,
    "sharers.min-history": 1,
    "adapter.steps": 2,
    "adapter.lr": 0.05,
    "adapter.batch-size": 2,
    "gates.steps": 1,
    "gates.batch-size": 2,
    "assembly.top-k": 2,
    "assembly.batch-size": 4,
    "run.timeout": 60.0,
}


@pytest.fixture(scope="session", autouse=True)
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``PERPCS_HOME`` of all tests that are not end to end."""
    return tmp_path_factory.mktemp("perpcs-home")


# A hook and not a fixture: it runs before any fixture, those of a session or module too.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("e2e") is None:
        base = item.session.config._tmp_path_factory.getbasetemp()
        os.environ["PERPCS_HOME"] = str(base / "perpcs-home")
    elif OUTSIDE_HOME is None:
        os.environ.pop("PERPCS_HOME", None)
    else:
        os.environ["PERPCS_HOME"] = OUTSIDE_HOME


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The matrices are small: threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the run."""
    from fl_perpcs import server_app

    monkeypatch.setattr(server_app, "write_report", lambda folder: None)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, no token added at either end."""
    return build_tokenizer()


def random_llama(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_folder(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder for ``lm.name``: a random Llama of width 32 with 2 layers, and its tokenizer."""
    folder = tmp_path_factory.mktemp("random-llama")
    random_llama(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_lm(tokenizer: PreTrainedTokenizerFast) -> Callable[..., LM]:
    """Make a random Llama, the one of ``tiny_folder`` by default, with a slot of rank 2."""

    def make(**lora: object) -> LM:
        options = {"rank": 2, "alpha": 4.0, "dropout": 0.0, **lora}
        return attach(random_llama(tokenizer), tokenizer, LoraSection(**options))

    return make


@pytest.fixture
def lm(make_lm: Callable[..., LM]) -> LM:
    return make_lm()


@pytest.fixture
def small_config(tiny_folder: Path, tmp_path: Path) -> Callable[..., dict[str, Value]]:
    """Make the flat run config of a federation that runs in a second or two.

    ``small_config({"assembly.merge": "delta"}, folder="other")``: keys to change, and the name
    of the run folder.
    """

    def make(changes: dict[str, Value] | None = None, folder: str = "run") -> dict[str, Value]:
        own = {"lm.name": str(tiny_folder), "run.dir": str(tmp_path / folder)}
        return {**Config().flat(), **SMALL, **own, **(changes or {})}

    return make
