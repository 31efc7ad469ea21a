"""Strategies, one file each, by the name that ``strategy.name`` gives.

A strategy is a generator function: it takes a :class:`fl_perpcs.phases.Setting` and yields the
phases of a run. docs/strategies.md builds one.
"""

from strategies.base_llm import base_llm
from strategies.fedavg_lora import fedavg_lora, fedavg_lora_tuned
from strategies.fedsa_lora import fedsa_lora
from strategies.ffa_lora import ffa_lora
from strategies.flora import flora
from strategies.lorahub import lorahub
from strategies.oppu import oppu
from strategies.pag import pag
from strategies.per_pcs import per_pcs
from strategies.pool_mean import pool_mean
from strategies.rag import rag
from strategies.retrieval import retrieval

REGISTRY = {
    "base": base_llm,
    "rag": rag,
    "pag": pag,
    "oppu": oppu,
    "per-pcs": per_pcs,
    "retrieval": retrieval,
    "pool-mean": pool_mean,
    "lorahub": lorahub,
    "fedavg-lora": fedavg_lora,
    "fedavg-lora-tuned": fedavg_lora_tuned,
    "ffa-lora": ffa_lora,
    "fedsa-lora": fedsa_lora,
    "flora": flora,
}
