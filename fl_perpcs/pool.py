"""The pool: pieces that sharers gave, admitted one sharer at a time and never averaged.

On disk a pool is one folder: ``manifest.json`` and one safetensors file for each sharer.
File names are numbers, never user ids. A pool folder is written whole, then renamed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fl_perpcs.errors import PerPcsError
from fl_perpcs.pieces import Piece, name_tensors, pieces_of

FORMAT = 1
"""Version of the folder's layout."""


@dataclass(frozen=True)
class PoolSpec:
    """What every piece of a pool must fit.

    Attributes
    ----------
    rank : int
        r of the pieces.
    alpha : float
        α; the update of a piece is (α/r)·B·A. With rsLoRA it is √r times the config's.
    shapes : dict of str to (int, int)
        (d_in, d_out) of every site of the base LLM, in the order of the forward pass.
    """

    rank: int
    alpha: float
    shapes: Mapping[str, tuple[int, int]]

    @property
    def scale(self) -> float:
        """α/r."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Stack:
    """All pieces of one site.

    Attributes
    ----------
    sharers : tuple of str
        Whose the n pieces are.
    A, B, gates : Tensor
        Of shape (n, r, d_in), (n, d_out, r) and (n, d_in).
    """

    sharers: tuple[str, ...]
    A: Tensor
    B: Tensor
    gates: Tensor


@dataclass
class Pool:
    """Pieces by sharer, all for one base LLM.

    Attributes
    ----------
    spec : PoolSpec
    fingerprint : str
        Of the base LLM that the pieces were trained on; set by the first sharer.
    pieces : dict of str to list of Piece
        By sharer, in the order of admission.
    """

    spec: PoolSpec
    fingerprint: str = ""
    pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def admit(self, sharer: str, pieces: Iterable[Piece], fingerprint: str) -> None:
        """Check a sharer's pieces and add them.

        Raises
        ------
        PerPcsError
            If the sharer is in the pool, shares nothing, has trained on another base LLM, or
            one of its pieces is of an unknown site, of another shape or not finite. Nothing
            is added then.
        """
        pieces = list(pieces)
        if sharer in self.pieces:
            raise PerPcsError(f"sharer {sharer!r} is in the pool already")
        if not pieces:
            raise PerPcsError(f"sharer {sharer!r} shares no piece")
        if len({piece.site for piece in pieces}) < len(pieces):
            raise PerPcsError(f"sharer {sharer!r} shares two pieces of one site")
        check_base(self.fingerprint or fingerprint, fingerprint, f"sharer {sharer!r}")
        for piece in pieces:
            _check_piece(piece, self.spec, sharer)
        self.fingerprint = fingerprint
        self.pieces[sharer] = pieces

    def stacks(self) -> dict[str, Stack]:
        """Return the pieces by site, in the order of the forward pass; sites without are left out.

        The order of sharers is that of their ids, so that it does not depend on who came first.
        """
        by_site: dict[str, list[tuple[str, Piece]]] = {site: [] for site in self.spec.shapes}
        for sharer in sorted(self.pieces):
            for piece in self.pieces[sharer]:
                by_site[piece.site].append((sharer, piece))
        return {
            site: Stack(
                tuple(sharer for sharer, _ in found),
                torch.stack([piece.A for _, piece in found]),
                torch.stack([piece.B for _, piece in found]),
                torch.stack([piece.gate for _, piece in found]),
            )
            for site, found in by_site.items()
            if found
        }


def number_name(number: int) -> str:
    """Return what a sharer is called where its id is nobody's business; sorts as the number."""
    return f"{number:06d}"


def numbered(stacks: Mapping[str, Stack], sharers: Sequence[str]) -> dict[str, Stack]:
    """Return the pool with sharers' numbers, their places in ``sharers``, in place of their ids."""
    names = {sharer: number_name(number) for number, sharer in enumerate(sharers)}
    return {
        site: replace(stack, sharers=tuple(names[sharer] for sharer in stack.sharers))
        for site, stack in stacks.items()
    }


def name_stacks(
    stacks: Mapping[str, Stack], *, gates: bool = True, factors: bool = True
) -> dict[str, Tensor]:
    """Return a pool whose sharers are numbers as tensors, or only its gates or factors.

    Named ``<site>.lora_A``, ``<site>.lora_B``, ``<site>.gates`` and ``<site>.sharers``.
    """
    tensors: dict[str, Tensor] = {}
    for site, stack in stacks.items():
        if factors:
            tensors |= {f"{site}.lora_A": stack.A, f"{site}.lora_B": stack.B}
        if gates:
            tensors[f"{site}.gates"] = stack.gates
        tensors[f"{site}.sharers"] = torch.tensor([int(sharer) for sharer in stack.sharers])
    return tensors


def stacks_of(tensors: Mapping[str, Tensor]) -> dict[str, Stack]:
    """Return a pool from named tensors; what is not among them is empty, (n, 0)."""
    stacks = {}
    for name, numbers in tensors.items():
        if name.endswith(".sharers"):
            site = name.removesuffix(".sharers")
            A, B, gates = (
                tensors.get(f"{site}.{part}", torch.empty(len(numbers), 0))
                for part in ("lora_A", "lora_B", "gates")
            )
            sharers = tuple(number_name(number) for number in numbers.tolist())
            stacks[site] = Stack(sharers, A, B, gates)
    return stacks


def check_base(expected: str, found: str, who: str) -> None:
    """Refuse pieces of another base LLM.

    Raises
    ------
    PerPcsError
        If the fingerprints differ.
    """
    if expected != found:
        raise PerPcsError(
            f"the pieces of {who} were trained on base LLM {found}, expected {expected};"
            " pieces only fit the base LLM (with its adaptation) that they were trained on"
        )


def save_pool(pool: Pool, folder: Path) -> Path:
    """Write a pool; equal pools give equal bytes.

    Raises
    ------
    PerPcsError
        If the folder exists.
    """
    if folder.exists():
        raise PerPcsError(f"{folder} exists; name a new folder for the pool")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    sharers = []
    for number, sharer in enumerate(sorted(pool.pieces)):
        name = f"pieces-{number:06d}.safetensors"
        data = save({n: x.contiguous() for n, x in name_tensors(pool.pieces[sharer]).items()})
        (temporary / name).write_bytes(data)
        sharers.append({"sharer": sharer, "file": name, "sha256": hashlib.sha256(data).hexdigest()})
    manifest = {
        "format": FORMAT,
        "base": pool.fingerprint,
        "rank": pool.spec.rank,
        "alpha": pool.spec.alpha,
        "sites": {site: list(shape) for site, shape in pool.spec.shapes.items()},
        "sharers": sharers,
    }
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    temporary.replace(folder)
    return folder


def load_pool(folder: Path, fingerprint: str | None = None) -> Pool:
    """Read a pool, every checksum and shape checked.

    Parameters
    ----------
    folder : Path
    fingerprint : str, optional
        Of the base LLM that the pool is meant for.

    Raises
    ------
    PerPcsError
        If the folder is no pool, a file is missing or damaged, or the pool is of another base
        LLM.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise PerPcsError(
                f"{folder} is a pool of format {manifest['format']}, expected {FORMAT}; run again"
            )
        shapes = {site: (int(i), int(o)) for site, (i, o) in manifest["sites"].items()}
        spec = PoolSpec(int(manifest["rank"]), float(manifest["alpha"]), shapes)
        pool = Pool(spec, manifest["base"])
        if fingerprint is not None:
            check_base(fingerprint, pool.fingerprint, f"the pool {folder}")
        for entry in manifest["sharers"]:
            pool.admit(entry["sharer"], _read_pieces(folder, entry), pool.fingerprint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PerPcsError(f"{folder} is not a pool: {error!r}; expected manifest.json") from None
    return pool


def _read_pieces(folder: Path, entry: Mapping[str, Any]) -> list[Piece]:
    name = entry["file"]
    if Path(name).name != name:
        raise PerPcsError(f"{folder}/manifest.json names the file {name!r} outside the pool")
    data = (folder / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise PerPcsError(f"{folder / name} is damaged: its checksum differs from the manifest's")
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise PerPcsError(f"{folder / name} is not a safetensors file: {error}") from None
    return pieces_of(tensors)


def _check_piece(piece: Piece, spec: PoolSpec, sharer: str) -> None:
    if piece.site not in spec.shapes:
        raise PerPcsError(f"sharer {sharer!r} shares a piece of the unknown site {piece.site!r}")
    d_in, d_out = spec.shapes[piece.site]
    for name, tensor, shape in (
        ("A", piece.A, (spec.rank, d_in)),
        ("B", piece.B, (d_out, spec.rank)),
        ("gate", piece.gate, (d_in,)),
    ):
        where = f"{name} of site {piece.site!r} from sharer {sharer!r}"
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise PerPcsError(
                f"{where} is {tensor.dtype} of shape {tuple(tensor.shape)},"
                f" expected torch.float32 of shape {shape}"
            )
        if not torch.isfinite(tensor).all():
            raise PerPcsError(f"{where} is not finite")
