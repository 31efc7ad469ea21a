"""No history text, token id or activation is in what is sent, logged or written."""

import json
from pathlib import Path

import numpy as np
import pytest
from fake_grid import FakeGrid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from test_strategies import changes_for

from fl_perpcs import client_app, server_app
from fl_perpcs.config import load_config
from fl_perpcs.lm import load_tokenizer
from fl_perpcs.paths import home
from fl_perpcs.runs import create_run
from fl_perpcs.text import response_ids
from strategies import REGISTRY

WORDS = ["zebra", "quagga", "okapi", "gnu", "eland", "kudu"]
"""Words of no other text; each user's history is about its own."""
PROTOCOLS = {
    "broadcast": {},
    "cached": {"exchange.cache": True},
    "layerwise": {"exchange.protocol": "layerwise"},
    "one-shot": {"exchange.protocol": "one-shot"},
    "server match": {"exchange.protocol": "server-match"},
    "by stages": {"exchange.protocol": "server-match", "exchange.match": "by-stages"},
    "by reference": {"exchange.by-reference": True},
    "private": {"privacy.epsilon": 8.0, "sharers.selection": "random"},
    "centred": {"assembly.scorer": "centred"},
}


pytestmark = pytest.mark.usefixtures("without_report")


@pytest.fixture
def federation(small_config, tmp_path):
    """Run on users whose histories hold markers, and return all that was sent, and the folder."""
    rows = []
    for user in range(11):
        for item in range(8):
            word = WORDS[user % len(WORDS)]
            # The last two items are queries, whose golds are reported: they hold no marker.
            text = f"secret{word} {word}{item}" if item < 6 else f"plain {item}"
            rows.append({"user": f"user-{user}", "input": text, "output": f"re {text}"})
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tmp_path / "task.toml"
    task.write_text(
        'name = "replies"\ntitle = "Replies"\nmax-new-tokens = 4\nmetrics = ["rouge-l"]\n'
        'template = "Reply: {input}"\n'
    )

    class Recording(FakeGrid):
        def push_messages(self, messages):
            messages = list(messages)
            sent.extend(messages)
            return super().push_messages(messages)

        def answer(self, message):
            sent.append(super().answer(message))
            return sent[-1]

    sent: list = []

    def run(changes):
        values = small_config(
            {
                "data.source": "table",
                "data.path": str(table),
                "data.task": str(task),
                "data.queries": 2,
                **changes,
            }
        )
        config = load_config(values)
        folder = create_run(config)
        server_app.run_federation(Recording(client_app.app, values, 2), config, folder)
        return config, sent, folder.folder

    return run


def check(config, sent, folder: Path) -> None:
    serialized = [o.deflate() for m in sent for o in get_all_nested_objects(m).values()]
    written = [p.read_bytes() for p in folder.rglob("*") if p.is_file()]
    for place in (home() / "clients").rglob("*"):
        if place.is_file():
            written.append(place.read_bytes())
    assert len(serialized) > 50 and len(written) > 5
    everything = b"\0".join(serialized + written)
    for word in WORDS:
        assert word.encode() not in everything
    # Token ids of the shortest marker that is in every item of somebody, as integers or floats.
    tokenizer = load_tokenizer(config)
    for word in WORDS:
        ids = response_ids(f"secret{word} {word}", tokenizer)
        for kind in (np.int64, np.int32, np.float32):
            assert np.array(ids, dtype=kind).tobytes() not in everything
    # An activation of every token has as many rows as a batch of history has tokens.
    rows = {a.shape[-2] for m in sent if m.has_content() for r in m.content.array_records.values()
            for a in r.values() if len(a.shape) > 2}  # fmt: skip
    assert rows <= {config.lora.rank, 32, 48}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_protocol_sends_or_writes_a_history(federation, protocol):
    check(*federation({**PROTOCOLS[protocol], "assembly.batch-size": 2}))


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - {"pag"}))
def test_no_strategy_sends_or_writes_a_history(federation, tmp_path, name):
    check(*federation(changes_for(name, tmp_path)))


def test_the_search_finds_what_is_there(federation):
    config, sent, folder = federation({})
    (folder / "odd.txt").write_text(WORDS[3])
    with pytest.raises(AssertionError):
        check(config, sent, folder)
