"""What an exchange costs, in closed form: shapes in, bytes and round trips out.

With L sites s of widths (dᵢₙ, dₒᵤₜ), rank r, n pieces at each site, b batches of history, k pieces
chosen by each and u ≤ min(n, k·b) pieces that a target asks for at a site, in float32:

==============================  ==============================================================
broadcast, down                 Σ n·(r·(dᵢₙ + dₒᵤₜ) + dᵢₙ)·4
layerwise, one-shot, down       Σ (n·dᵢₙ + u·r·(dᵢₙ + dₒᵤₜ))·4
layerwise, one-shot, up         Σ (u + 1)·4: which pieces
server match at once, up        Σ b·dᵢₙ·4: queries
server match at once, down      Σ r·(dᵢₙ + dₒᵤₜ)·4: one adapter
server match by stages, down    Σ (b + 1)·r·(dᵢₙ + dₒᵤₜ)·4: what each batch merges, one adapter
==============================  ==============================================================

Each array adds 128 bytes, NumPy's header, and whose each piece is takes 4 bytes. The ledger's
column ``arrays`` is the sum of these to the byte; names, envelopes and Flower's own framing come on
top and are in the ledger alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fl_perpcs.wire import encoded_bytes, row_axis

HEADER = 128
"""Bytes before the data of each array."""
INT = 4

Shapes = Mapping[str, tuple[int, int]]
"""(d_in, d_out) of each site."""
Counts = Mapping[str, float]
"""How many pieces at each site; sites without any are left out."""


@dataclass(frozen=True)
class Cost:
    """Bytes to and from a target, and round trips."""

    down: float
    up: float
    round_trips: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.down + other.down, self.up + other.up, self.round_trips + other.round_trips
        )


@dataclass(frozen=True)
class Sizes:
    """What a cost depends on.

    Attributes
    ----------
    shapes : mapping of str to (int, int)
        (d_in, d_out) of every site of the base LLM.
    rank : int
    how : str
        The wire format.
    """

    shapes: Shapes
    rank: int
    how: str = "float32"

    def factors(self, sites: Shapes, which: str = "AB") -> float:
        """Return the bytes of single factors at some sites."""
        return sum(self._array(self._shape(s, part)) for s in sites for part in which)

    def adapter(self) -> float:
        """Return the bytes of one adapter."""
        return self.factors(self.shapes)

    def share(self, sites: float) -> float:
        """Return the bytes of what a sharer sends if it shares so many of its pieces."""
        whole = self.adapter() + sum(self._array(((d_in,), -1)) for d_in, _ in self.shapes.values())
        return whole * sites / len(self.shapes)

    def pieces(self, counts: Counts, *, gates: bool = True, factors: bool = True) -> float:
        """Return the bytes of stacked pieces, or of their gates or factors alone."""
        parts = ("A", "B") * factors + ("gate",) * gates
        total = 0.0
        for site, n in counts.items():
            total += sum(n * self._data(self._shape(site, p)) + self._headers for p in parts)
            total += n * INT + HEADER
        return total

    def request(self, counts: Counts) -> float:
        """Return the bytes of a request for pieces."""
        return INT * len(self.shapes) + INT * sum(counts.values()) + 2 * HEADER

    def queries(self, rows: float = 1) -> float:
        """Return the bytes of so many queries of every site."""
        one = [self._data(((d_in,), -1)) for d_in, _ in self.shapes.values()]
        return rows * sum(one) + self._headers * len(one)

    def _shape(self, site: str, part: str) -> tuple[tuple[int, ...], int]:
        """Return the shape of a piece's A, B or gate, and the axis of its rows."""
        d_in, d_out = self.shapes[site]
        shapes = {"A": (self.rank, d_in), "B": (d_out, self.rank), "gate": (d_in,)}
        return shapes[part], row_axis(f"lora_{part}")

    @property
    def _headers(self) -> int:
        return HEADER * (2 if self.how == "int8" else 1)

    def _data(self, shape: tuple[tuple[int, ...], int]) -> int:
        return encoded_bytes(shape[0], self.how, shape[1])

    def _array(self, shape: tuple[tuple[int, ...], int]) -> int:
        return self._data(shape) + self._headers


def broadcast(sizes: Sizes, pool: Counts, *, centred: bool = False) -> Cost:
    """Return the cost of the whole pool for one target."""
    return Cost(sizes.pieces(pool) + centred * sizes.queries(), 0, 1)


def cached(sizes: Sizes, pool: Counts, lacking: Counts, *, centred: bool = False) -> Cost:
    """Return the cost of a broadcast to a target that lacks some pieces of the pool."""
    digests = sum(INT * n + HEADER + 16 * n + HEADER for n in pool.values())
    sent = sizes.pieces(lacking) + centred * Sizes(sizes.shapes, sizes.rank).queries()
    return Cost(digests + sent, sizes.request(lacking), 2)


def one_shot(sizes: Sizes, pool: Counts, asked: Counts, *, centred: bool = False) -> Cost:
    """Return the cost of gates and one request."""
    gates = sizes.pieces(pool, factors=False) + centred * sizes.queries()
    return Cost(gates + sizes.pieces(asked, gates=False), sizes.request(asked), 2)


def layerwise(
    sizes: Sizes, pool: Counts, asked: Counts, stages: int, *, centred: bool = False
) -> Cost:
    """Return the cost of gates and a request at each stage."""
    all_at_once = one_shot(sizes, pool, asked, centred=centred)
    empty = sizes.request({}) * (stages - 1)
    return Cost(all_at_once.down, all_at_once.up + empty, stages + 1)


def server_match(sizes: Sizes, batches: float) -> Cost:
    """Return the cost of queries from the base LLM, and one adapter."""
    return Cost(sizes.adapter(), sizes.queries(batches), 2)


def server_match_by_stages(sizes: Sizes, pool: Counts, batches: float, stages: int) -> Cost:
    """Return the cost of queries stage by stage, what each batch merges there, and one adapter.

    Nothing is sent back for the last stage but the adapter.
    """
    last = stages_of(sizes.shapes)[-1]
    shared = {site: sizes.shapes[site] for site in pool}
    merged = {site: shape for site, shape in shared.items() if site not in last}
    down = batches * sizes.factors(merged) + sizes.factors(shared)
    return Cost(down, sizes.queries(batches), stages + 1)


def stages_of(shapes: Shapes) -> list[list[str]]:
    """Return the sites of each stage: those that read the same tensor.

    Known by their modules' names for decoders of the Llama family: q, k and v of a layer read one
    tensor, gate and up another.
    """
    together = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"}
    together |= {"gate_proj": "gate, up", "up_proj": "gate, up"}
    stages: dict[str, list[str]] = {}
    for site in shapes:
        parent, _, module = site.rpartition(".")
        stages.setdefault(f"{parent}.{together.get(module, module)}", []).append(site)
    return list(stages.values())
