"""What travels between server and clients."""

import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_perpcs import messages as messages_module
from fl_perpcs.errors import PerPcsError
from fl_perpcs.messages import (
    ADAPTATION,
    ENVELOPE,
    answer,
    arrays_of,
    envelope,
    info_of,
    numbers_of,
    open_envelope,
    pack_adapter,
    pack_pieces,
    pack_pool,
    pack_recipe,
    pack_request,
    unpack_adapter,
    unpack_pieces,
    unpack_pool,
    unpack_recipe,
    unpack_request,
)
from fl_perpcs.pieces import Factors, Piece
from fl_perpcs.pool import Pool, PoolSpec, numbered

SITES = ("layers.0.q_proj", "layers.10.q_proj", "layers.2.o_proj")


@pytest.fixture(autouse=True)
def server():
    # Flower sets these when it starts a ServerApp; messages cannot be made without.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def message(**records) -> Message:
    return Message(RecordDict(records), 7, "train.share")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def share(seed: int = 0) -> list[Piece]:
    return [
        Piece(site, randn(2, 5, seed=seed), randn(3, 2, seed=seed + 1), randn(5, seed=seed + 2))
        for site in SITES
    ]


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_an_envelope_tells_user_and_phase(user, phase):
    assert open_envelope(message(**{ENVELOPE: envelope(user, phase)})) == (user, phase)


def test_another_source_is_an_error_with_both_digests_and_the_remedy(monkeypatch):
    sent = message(**{ENVELOPE: envelope("u", "p")})
    here = messages_module.source_digest()
    monkeypatch.setattr(messages_module, "source_digest", lambda: "other-source")
    with pytest.raises(PerPcsError, match=f"source is other-source, the server's is {here}") as e:
        open_envelope(sent)
    assert "SuperLink" in str(e.value)


def test_a_message_without_envelope_is_refused():
    with pytest.raises(PerPcsError, match="no envelope"):
        open_envelope(message())


def test_an_adapter_comes_back_bit_for_bit_in_its_order():
    adapter = {site: Factors(randn(2, 5), randn(3, 2)) for site in SITES}
    adapter[SITES[0]].A[0, 0] = torch.nan
    back = unpack_adapter(pack_adapter(adapter))
    assert list(back) == list(SITES)
    for site, factors in adapter.items():
        for before, after in zip(factors, back[site], strict=True):
            assert before.numpy().tobytes() == after.numpy().tobytes()


def test_an_empty_adapter_comes_back():
    assert unpack_adapter(pack_adapter({})) == {}
    assert not pack_adapter({})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_travels_as_float32_without_loss(dtype):
    A = randn(2, 5).to(dtype)
    back = unpack_adapter(pack_adapter({"s": Factors(A, A.T)}))["s"].A
    assert back.dtype == torch.float32
    assert torch.equal(back, A.float())


def test_what_is_unpacked_can_be_written_to():
    record = pack_adapter({"s": Factors(randn(2, 5), randn(3, 2))})
    unpack_adapter(record)["s"].A.zero_()
    assert unpack_adapter(record)["s"].A.any()


def test_pieces_come_back_bit_for_bit():
    back = unpack_pieces(pack_pieces(share()))
    assert [piece.site for piece in back] == list(SITES)
    for before, after in zip(share(), back, strict=True):
        for name in ("A", "B", "gate"):
            assert torch.equal(getattr(before, name), getattr(after, name))


def test_a_piece_without_a_factor_is_refused():
    record = pack_pieces(share())
    del record[f"{SITES[1]}.lora_B"]
    with pytest.raises(PerPcsError, match=r"layers\.10\.q_proj\.lora_B"):
        unpack_pieces(record)


def pool_of_two() -> Pool:
    pool = Pool(PoolSpec(2, 4.0, dict.fromkeys(SITES, (5, 3))))
    pool.admit("ann", share(1), "base")
    pool.admit('b"ö', share(2)[:2], "base")
    return pool


def test_a_pool_comes_back_bit_for_bit():
    stacks = numbered(pool_of_two().stacks(), ("ann", 'b"ö'))
    back = unpack_pool(message(**pack_pool(stacks, "base")), "base")
    assert list(back) == list(stacks)
    for site, stack in stacks.items():
        assert back[site].sharers == stack.sharers
        for name in ("A", "B", "gates"):
            assert torch.equal(getattr(back[site], name), getattr(stack, name))
    assert back[SITES[0]].sharers == ("000000", "000001")
    assert back[SITES[2]].sharers == ("000000",)


def test_a_pool_of_another_base_is_refused():
    packed = pack_pool(numbered(pool_of_two().stacks(), ("ann", 'b"ö')), "base")
    with pytest.raises(PerPcsError, match="base LLM base, expected other"):
        unpack_pool(message(**packed), "other")


def test_missing_arrays_are_named_with_what_there_is():
    with pytest.raises(PerPcsError, match=f"no arrays 'pool'.*{ADAPTATION}"):
        arrays_of(message(**{ADAPTATION: pack_adapter({})}), "pool")


def test_a_reply_carries_numbers_arrays_and_any_json():
    info = {"text": 'ä "quoted"\n', "list": [1, 2.5, None, True], "nested": {"a": []}}
    reply = answer(
        message(),
        metrics={"loss": 0.5, "num-examples": 3},
        arrays=pack_adapter({"s": Factors(randn(2, 5), randn(3, 2))}),
        info=info,
        worker={"pid": 12},
    )
    assert info_of(reply) == info
    assert numbers_of(reply, "metrics") == {"loss": 0.5, "num-examples": 3}
    assert numbers_of(reply, "worker") == {"pid": 12}
    assert list(unpack_adapter(arrays_of(reply))) == ["s"]
    assert reply.metadata.dst_node_id == message().metadata.src_node_id


def test_a_reply_has_no_record_that_was_not_given():
    reply = answer(message(), metrics={})
    assert list(reply.content) == ["metrics"]
    assert numbers_of(reply, "worker") == {}
    assert numbers_of(reply, "metrics") == {}


def test_a_recipe_comes_back_in_its_order_with_weights_of_32_bits():
    recipe = {SITES[0]: {"000007": 0.25, "000002": 0.75}, SITES[2]: {"000002": 1 / 3}}
    record = pack_recipe(recipe, SITES)
    back = unpack_recipe(message(recipe=record), SITES)
    assert {site: list(weights) for site, weights in back.items()} == {
        site: list(weights) for site, weights in recipe.items()
    }
    assert back[SITES[0]] == recipe[SITES[0]]
    assert back[SITES[2]]["000002"] == pytest.approx(1 / 3, rel=2**-24)
    assert sum(array.numpy().nbytes for array in record.values()) == 4 * len(SITES) + 8 * 3


@given(
    st.fixed_dictionaries(
        {site: st.lists(st.integers(0, 999_999), max_size=4, unique=True) for site in SITES}
    )
)
def test_a_request_comes_back(numbers):
    request = {site: tuple(f"{n:06d}" for n in found) for site, found in numbers.items() if found}
    assert unpack_request(message(request=pack_request(request, SITES)), SITES) == request


@pytest.mark.parametrize("key", ["counts", "sharers"])
def test_a_request_that_does_not_add_up_is_refused(key):
    record = pack_request({SITES[0]: ("000001", "000002"), SITES[2]: ("000001",)}, SITES)
    record[key] = Array(record[key].numpy()[:-1].copy())
    with pytest.raises(PerPcsError, match=r"names \d sharers for \d sites, expected"):
        unpack_request(message(request=record), SITES)


def test_numbers_of_a_config_record_are_read_too():
    sent = message(config=ConfigRecord({"proximal-mu": 0.25}))
    assert numbers_of(sent, "config") == {"proximal-mu": 0.25}
