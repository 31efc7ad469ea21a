"""Assembly: a target chooses pieces of the pool and merges them into an adapter of its own.

============  ==================================================================
scoring       queries of sites, gate scores and their variants
choosing      which scored pieces are chosen, with which weights
merging       weighted pieces to factors; recipes to adapters
passes        forward passes over the history that score and choose (published)
stages        the same passes, stopped wherever pieces are wanted
looking       a look at the history's likelihood: rerank and learned mixing
lorahub       gradient-free weights of whole adapters (LoRAHub)
assembler     all of it in order, as the config says
============  ==================================================================
"""

from fl_perpcs.assembly.assembler import make_recipe
from fl_perpcs.assembly.choosing import Choice, select
from fl_perpcs.assembly.lorahub import search_weights
from fl_perpcs.assembly.merging import (
    Recipe,
    Request,
    cook,
    merge,
    on_device,
    pick,
    recipe_bytes,
    whole,
)
from fl_perpcs.assembly.passes import (
    assemble,
    assemble_at_once,
    choose,
    choose_at,
    history_queries,
)
from fl_perpcs.assembly.scoring import gate_scores, site_query

__all__ = [
    "Choice",
    "Recipe",
    "Request",
    "assemble",
    "assemble_at_once",
    "choose",
    "choose_at",
    "cook",
    "gate_scores",
    "history_queries",
    "make_recipe",
    "merge",
    "on_device",
    "pick",
    "recipe_bytes",
    "search_weights",
    "select",
    "site_query",
    "whole",
]
