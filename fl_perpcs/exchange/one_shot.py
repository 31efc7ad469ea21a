"""One-shot: gates first, then one request for all pieces that the target wants.

Queries are of the base LLM's activations at all sites, so deeper sites do not see what was chosen
above: an approximation. With rerank the target asks for the whole adapters of its shortlist. The
server learns which pieces each target asks for, decoys among them.
"""

from flwr.app import Message

from fl_perpcs.exchange.offer import METHOD, Offer, send_gates, with_recipes
from fl_perpcs.phases import Phases, Setting


def one_shot(setting: Setting, offer: Offer) -> Phases:
    """Send gates, then what was asked for."""
    how, sites = setting.config.exchange.format, tuple(setting.spec.shapes)
    asked: dict[str, dict[str, tuple[str, ...]]] = {}

    def collect(user: str, reply: Message) -> None:
        asked[user] = offer.request_of(user, reply, sites)

    yield send_gates(setting, offer, collect)
    yield from with_recipes(
        setting, offer, METHOD, lambda user: offer.pack_asked(asked[user], how), "delivered"
    )
