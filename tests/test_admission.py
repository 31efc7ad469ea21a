"""The guarded pool: who is refused, why, and that honest sharers are not."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_federation import federation

from fl_perpcs import client_app, users
from fl_perpcs.admission import FAR, guarded, refused
from fl_perpcs.config import RULES, ConfigError, load_config
from fl_perpcs.errors import PerPcsError
from fl_perpcs.pieces import Piece
from fl_perpcs.pool import PoolSpec, load_pool
from fl_perpcs.runs import read_lines

SITES = {f"layers.{n}.q_proj": (12, 10) for n in range(4)}
SPEC = PoolSpec(2, 4.0, SITES)
NAMES = [f"user-{n}" for n in range(10)]


pytestmark = pytest.mark.usefixtures("without_report")


def honest(seed: int) -> list[Piece]:
    """Return pieces around a common A, as sharers that start from the same one have."""
    common = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(seed + 1)
    return [
        Piece(
            site,
            torch.randn(2, 12, generator=common) + 0.1 * torch.randn(2, 12, generator=own),
            torch.randn(10, 2, generator=own),
            torch.randn(12, generator=own),
        )
        for site in SITES
    ]


def everybody() -> dict[str, list[Piece]]:
    return {name: honest(number) for number, name in enumerate(NAMES)}


def population() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    return {site: torch.randn(12, generator=generator) for site in SITES}


def test_honest_sharers_are_let_in():
    assert refused(everybody(), RULES, population()) == {}


@pytest.mark.parametrize("part", ["A", "B", "gate"])
@pytest.mark.parametrize("times", [30.0, 1 / 30])
def test_a_norm_far_from_the_others_is_refused(part, times):
    shares = everybody()
    shares["user-3"] = [replace(p, **{part: times * getattr(p, part)}) for p in shares["user-3"]]
    found = refused(shares, ["norms"])
    assert list(found) == ["user-3"]
    assert f"the norm of its {part} is" in found["user-3"]


def test_a_copy_is_refused_and_the_first_stays():
    shares = everybody()
    generator = torch.Generator().manual_seed(5)
    noise = lambda x: x + 0.05 * torch.randn(x.shape, generator=generator)  # noqa: E731
    shares["user-7"] = [replace(p, B=noise(p.B)) for p in shares["user-2"]]
    assert refused(shares, ["duplicates"]) == {"user-7": "its B is that of user-2"}


def test_copies_are_found_at_the_sites_that_both_share():
    shares = everybody()
    shares["user-7"] = shares["user-2"][1:3]
    shares["user-8"] = shares["user-4"][:1]
    assert refused(shares, ["duplicates"]).keys() == {"user-7", "user-8"}


def test_gates_built_to_win_are_refused():
    shares, wanted = everybody(), population()
    shares["user-5"] = [replace(p, gate=wanted[p.site] * 3) for p in shares["user-5"]]
    found = refused(shares, ["popularity"], wanted)
    assert list(found) == ["user-5"]
    assert "for users at large" in found["user-5"]


def test_a_fifth_of_bad_sharers_does_not_move_the_bound():
    shares = everybody()
    for name in ("user-1", "user-6"):
        shares[name] = [replace(p, B=50 * p.B) for p in shares[name]]
    assert refused(shares, RULES, population()).keys() == {"user-1", "user-6"}


@settings(deadline=None, max_examples=25)
@given(st.permutations(NAMES), st.floats(0.01, 100))
def test_it_matters_neither_who_comes_first_nor_in_which_unit(order, unit):
    shares = everybody()
    shares["user-3"] = [replace(p, B=40 * p.B) for p in shares["user-3"]]
    moved = {name: [replace(p, B=unit * p.B) for p in shares[name]] for name in order}
    assert refused(moved, RULES, population()).keys() == {"user-3"}


def test_one_sharer_is_far_from_nobody():
    assert refused({"a": honest(0)}, RULES, population()) == {}
    assert FAR > 0


def test_what_does_not_fit_the_pool_is_named_and_left_out():
    shares = everybody()
    shares["user-0"][1] = replace(shares["user-0"][1], B=torch.full((10, 2), torch.nan))
    shares["user-9"] = [replace(shares["user-9"][0], A=torch.zeros(3, 12))]
    bases = dict.fromkeys(NAMES, "base") | {"user-4": "another"}
    pool, reasons = guarded(SPEC, shares, bases, ["norms"])
    assert reasons.keys() == {"user-0", "user-4", "user-9"}
    assert "is not finite" in reasons["user-0"]
    assert "base LLM another" in reasons["user-4"]
    assert pool.pieces.keys() == set(NAMES) - reasons.keys()
    assert pool.fingerprint == "base"


def test_a_pool_of_nobody_is_an_error():
    bad = {"a": [replace(p, A=p.A * torch.nan) for p in honest(0)]}
    with pytest.raises(PerPcsError, match="refuse all 1 sharers; the first because A of site"):
        guarded(SPEC, bad, {"a": "base"}, ["norms"])


def broken(kind: str, pieces: list[Piece]) -> list[Piece]:
    if kind == "nan":
        return [replace(p, B=p.B * torch.nan) for p in pieces]
    return [replace(p, B=1000 * p.B) for p in pieces]


@pytest.mark.parametrize("kind", ["nan", "norm"])
def test_a_run_goes_on_without_a_bad_sharer_and_says_so(small_config, monkeypatch, kind):
    make, bad = users.make_pieces, []

    def spy(job):
        pieces, metrics = make(job)
        if not bad or bad[0] == job.user.id:
            bad[:] = [job.user.id]
            pieces = broken(kind, pieces)
        return pieces, metrics

    monkeypatch.setattr(users, "make_pieces", spy)
    values = {"evaluation.references": "", "evaluation.resamples": 0, "roles.candidates": 5}
    values |= {"data.users": 12, "sharers.count": 5, "sharers.selection": "random"}
    folder = federation(small_config({**values, "admission.rules": "norms, popularity"}))
    assert json.loads((folder / "refused.json").read_text()).keys() == set(bad)
    assert bad[0] not in load_pool(folder / "pool").pieces
    assert len(load_pool(folder / "pool").pieces) == 4
    told = [e for e in read_lines(folder / "events.jsonl") if e["event"] == "refused"]
    assert [e["user"] for e in told] == bad
    if kind == "nan":
        with pytest.raises(PerPcsError, match="is not finite"):
            federation(small_config(values, folder="unguarded"))
    assert client_app.app


def test_without_bad_sharers_a_guarded_pool_is_the_pool(small_config):
    values = {"evaluation.references": "", "evaluation.resamples": 0}
    plain = federation(small_config(values, folder="plain"))
    rules = {"admission.rules": "duplicates"}
    guarded_run = federation(small_config({**values, **rules}, folder="guarded"))
    for name in ("pool/manifest.json", "recipes.json", "results.json"):
        assert (plain / name).read_bytes() == (guarded_run / name).read_bytes()


def test_an_unknown_rule_is_named(small_config):
    with pytest.raises(ConfigError, match=r"admission\.rules names 'norm'; expected .*popularity"):
        load_config(small_config({"admission.rules": "norm"}))
