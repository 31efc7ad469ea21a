"""The exchange: how a target gets at the pool's pieces.

============  ===============================================================================
broadcast     the whole pool goes to each target; a cache makes the second time cheap
layerwise     gates, then layer by layer the pieces that the target chose: the same result
one_shot      gates, then at once the pieces chosen by the base LLM's activations
server_match  the target sends queries, the server chooses, merges and returns factors
------------  -------------------------------------------------------------------------------
offer         the pool as the server hands it out
asking        the target's side of layerwise and one-shot
matching      the target's side of server match
caching       the target's side of a broadcast with a cache
saved_front   how far a target has come, on its disk
costs         bytes and round trips of each protocol, in closed form
============  ===============================================================================

Each protocol is a generator of phases, up to and with the one in which targets answer queries.
"""

from collections.abc import Callable

from fl_perpcs.config import Config
from fl_perpcs.exchange.broadcast import broadcast
from fl_perpcs.exchange.layerwise import layerwise
from fl_perpcs.exchange.offer import Offer, offered, with_recipes
from fl_perpcs.exchange.one_shot import one_shot
from fl_perpcs.exchange.server_match import server_match
from fl_perpcs.phases import Phases, Setting

__all__ = ["PROTOCOLS", "Offer", "Protocol", "find_protocol", "offered", "with_recipes"]

Protocol = Callable[[Setting, Offer], Phases]

PROTOCOLS: dict[str, Protocol] = {
    "broadcast": broadcast,
    "layerwise": layerwise,
    "one-shot": one_shot,
    "server-match": server_match,
}


def find_protocol(config: Config) -> Protocol:
    """Return the protocol that ``exchange.protocol`` names."""
    return PROTOCOLS[config.exchange.protocol]
