"""What the pool admits, and its folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_perpcs import pool as pool_module
from fl_perpcs.errors import PerPcsError
from fl_perpcs.pieces import Piece
from fl_perpcs.pool import Pool, PoolSpec, load_pool, save_pool

SHAPES = {"layers.0.q_proj": (6, 4), "layers.1.q_proj": (6, 4), "layers.1.o_proj": (4, 6)}
SPEC = PoolSpec(rank=2, alpha=4.0, shapes=SHAPES)
BASE = "base-1"


def piece(site: str, seed: int = 0) -> Piece:
    d_in, d_out = SHAPES[site]
    generator = torch.Generator().manual_seed(seed)
    A, B, gate = (
        torch.randn(*shape, generator=generator) for shape in ((2, d_in), (d_out, 2), (d_in,))
    )
    return Piece(site, A, B, gate)


def share(seed: int = 0) -> list[Piece]:
    return [piece(site, seed) for site in SHAPES]


def pool_of(*sharers: str) -> Pool:
    pool = Pool(SPEC)
    for sharer in sharers:
        pool.admit(sharer, share(seed=sum(map(ord, sharer))), BASE)
    return pool


def files_of(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def assert_same_stacks(first: Pool, second: Pool) -> None:
    a, b = first.stacks(), second.stacks()
    assert list(a) == list(b)
    for site, stack in a.items():
        assert stack.sharers == b[site].sharers
        for name in ("A", "B", "gates"):
            assert torch.equal(getattr(stack, name), getattr(b[site], name))


def with_bad(name: str, tensor: torch.Tensor) -> list[Piece]:
    *good, last = share()
    return [*good, replace(last, **{name: tensor})]


LAST_IN, LAST_OUT = list(SHAPES.values())[-1]
REFUSED = {
    "twice": ("a", share(), BASE, "in the pool already"),
    "nothing": ("b", [], BASE, "shares no piece"),
    "other base": ("b", share(), "base-2", "base-2.*base-1"),
    "unknown site": ("b", [*share(), replace(piece("layers.0.q_proj"), site="x.y")], BASE, "x.y"),
    "two of a site": ("b", [*share(), piece("layers.0.q_proj")], BASE, "two pieces of one site"),
    "A shape": ("b", with_bad("A", torch.zeros(3, LAST_IN)), BASE, "A of site 'layers.1.o_proj'"),
    "B shape": ("b", with_bad("B", torch.zeros(LAST_OUT, 3)), BASE, "B of site"),
    "gate shape": ("b", with_bad("gate", torch.zeros(1, LAST_IN)), BASE, "gate of site"),
    "dtype": ("b", with_bad("A", torch.zeros(2, LAST_IN).double()), BASE, "torch.float64"),
    "NaN": ("b", with_bad("B", torch.full((LAST_OUT, 2), torch.nan)), BASE, "not finite"),
    "inf": ("b", with_bad("gate", torch.full((LAST_IN,), torch.inf)), BASE, "not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_sharer_leaves_the_pool_as_it_was(case):
    sharer, pieces, fingerprint, message = REFUSED[case]
    pool = pool_of("a")
    with pytest.raises(PerPcsError, match=message):
        pool.admit(sharer, pieces, fingerprint)
    assert list(pool.pieces) == ["a"]
    assert pool.fingerprint == BASE
    assert_same_stacks(pool, pool_of("a"))


def test_a_refused_first_sharer_does_not_set_the_base():
    pool = Pool(SPEC)
    with pytest.raises(PerPcsError, match="not finite"):
        pool.admit("a", REFUSED["NaN"][1], "base-2")
    pool.admit("b", share(), BASE)
    assert pool.fingerprint == BASE


def test_stacks_are_in_the_order_of_sites_and_of_sharers_ids():
    pool = Pool(SPEC)
    pool.admit("b", list(reversed(share(1))), BASE)
    pool.admit("a", [piece("layers.1.q_proj", 2)], BASE)
    stacks = pool.stacks()
    assert list(stacks) == list(SHAPES)
    assert stacks["layers.1.q_proj"].sharers == ("a", "b")
    assert stacks["layers.0.q_proj"].sharers == ("b",)
    assert torch.equal(stacks["layers.1.q_proj"].A[0], piece("layers.1.q_proj", 2).A)
    assert torch.equal(stacks["layers.1.q_proj"].gates[1], piece("layers.1.q_proj", 1).gate)


def test_sites_without_pieces_are_left_out_of_the_stacks():
    pool = Pool(SPEC)
    pool.admit("a", [piece("layers.1.q_proj")], BASE)
    assert list(pool.stacks()) == ["layers.1.q_proj"]


def test_a_saved_pool_loads_as_it_was(tmp_path):
    pool = pool_of("b", "a", "c")
    loaded = load_pool(save_pool(pool, tmp_path / "pool"), fingerprint=BASE)
    assert loaded.spec == SPEC
    assert list(loaded.spec.shapes) == list(SHAPES)
    assert loaded.fingerprint == BASE
    assert_same_stacks(loaded, pool)


def test_a_partial_pool_loads_as_it_was(tmp_path):
    pool = Pool(SPEC)
    pool.admit("a", [piece("layers.1.q_proj")], BASE)
    pool.admit("b", share(), BASE)
    assert_same_stacks(load_pool(save_pool(pool, tmp_path / "pool")), pool)


def test_equal_pools_are_equal_bytes_whatever_the_order_of_admission(tmp_path):
    first, second = Pool(SPEC), Pool(SPEC)
    for sharer in ("a", "b", "c"):
        first.admit(sharer, share(ord(sharer)), BASE)
    for sharer in ("c", "a", "b"):
        second.admit(sharer, list(reversed(share(ord(sharer)))), BASE)
    save_pool(first, tmp_path / "first")
    save_pool(second, tmp_path / "second")
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")


def test_saving_a_loaded_pool_gives_the_same_bytes(tmp_path):
    save_pool(pool_of("a", "b"), tmp_path / "first")
    save_pool(load_pool(tmp_path / "first"), tmp_path / "second")
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")


def test_file_names_hold_no_user_ids(tmp_path):
    folder = save_pool(pool_of("alice", "../bob"), tmp_path / "pool")
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"manifest.json", "pieces-000000.safetensors", "pieces-000001.safetensors"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["pool"]


@pytest.mark.parametrize("position", [20, -1])
def test_a_damaged_file_is_found_by_its_checksum(tmp_path, position):
    folder = save_pool(pool_of("a"), tmp_path / "pool")
    path = folder / "pieces-000000.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(PerPcsError, match=r"pieces-000000.*damaged"):
        load_pool(folder)


def edit_manifest(folder: Path, change) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x", ".."])
def test_a_manifest_that_points_outside_is_refused(tmp_path, name):
    folder = save_pool(pool_of("a"), tmp_path / "pool")
    data = (folder / "pieces-000000.safetensors").read_bytes()
    (tmp_path / "outside.safetensors").write_bytes(data)
    edit_manifest(folder, lambda m: m["sharers"][0].update(file=name))
    with pytest.raises(PerPcsError, match=r"outside|not a pool"):
        load_pool(folder)


def test_a_pool_of_another_base_is_refused(tmp_path):
    folder = save_pool(pool_of("a"), tmp_path / "pool")
    with pytest.raises(PerPcsError, match=f"base LLM {BASE}, expected other"):
        load_pool(folder, fingerprint="other")


def test_a_pool_of_another_format_is_refused(tmp_path):
    folder = save_pool(pool_of("a"), tmp_path / "pool")
    edit_manifest(folder, lambda m: m.update(format=99))
    with pytest.raises(PerPcsError, match="format 99, expected 1"):
        load_pool(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("sites"),
        lambda m: m.update(sites={"a": 3}),
        lambda m: m.update(sites=[]),
        lambda m: m.update(rank="two"),
        lambda m: m["sharers"][0].pop("sha256"),
        lambda m: m["sharers"][0].update(file="gone.safetensors"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path, change):
    folder = save_pool(pool_of("a"), tmp_path / "pool")
    edit_manifest(folder, change)
    with pytest.raises(PerPcsError, match="is not a pool"):
        load_pool(folder)


def test_a_pool_whose_pieces_do_not_fit_its_manifest_is_refused(tmp_path):
    folder = save_pool(pool_of("a"), tmp_path / "pool")
    edit_manifest(folder, lambda m: m.update(rank=3))
    with pytest.raises(PerPcsError, match=r"expected torch\.float32 of shape"):
        load_pool(folder)


def test_a_folder_that_is_no_pool_is_refused(tmp_path):
    with pytest.raises(PerPcsError, match="is not a pool"):
        load_pool(tmp_path)
    with pytest.raises(PerPcsError, match="is not a pool"):
        load_pool(tmp_path / "nowhere")


def test_an_existing_folder_is_not_overwritten(tmp_path):
    folder = save_pool(pool_of("a"), tmp_path / "pool")
    before = files_of(folder)
    with pytest.raises(PerPcsError, match="exists"):
        save_pool(pool_of("b"), folder)
    assert files_of(folder) == before


def test_a_half_written_pool_is_invisible(tmp_path, monkeypatch):
    calls = []

    def fails_on_the_second(tensors):
        calls.append(tensors)
        if len(calls) == 2:
            raise OSError("disk full")
        return b""

    monkeypatch.setattr(pool_module, "save", fails_on_the_second)
    with pytest.raises(OSError, match="disk full"):
        save_pool(pool_of("a", "b"), tmp_path / "pool")
    assert not (tmp_path / "pool").exists()
    monkeypatch.undo()
    save_pool(pool_of("a", "b"), tmp_path / "pool")
    assert_same_stacks(load_pool(tmp_path / "pool"), pool_of("a", "b"))
