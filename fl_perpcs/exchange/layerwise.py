"""Layerwise: gates first, then stage by stage the pieces that the target chose.

All batches of the target's history advance in lock-step, each with its own choice, so the result
is that of a broadcast bit for bit. It takes a round trip for each stage: two in each layer for
q, k, v and o. The server learns which pieces each target asks for, decoys among them.
"""

from flwr.app import Message, RecordDict

from fl_perpcs.exchange.offer import METHOD, Offer, send_gates, until_done, with_recipes
from fl_perpcs.messages import info_of
from fl_perpcs.phases import Phases, Setting


def layerwise(setting: Setting, offer: Offer) -> Phases:
    """Send gates, and pieces until nobody asks for more."""
    how, sites = setting.config.exchange.format, tuple(setting.spec.shapes)
    asked: dict[str, dict[str, tuple[str, ...]]] = {}
    going_on = set(setting.roles.targets)

    def collect(user: str, reply: Message) -> None:
        asked[user] = offer.request_of(user, reply, sites)
        if not info_of(reply)["more"]:
            going_on.discard(user)

    def pieces(user: str) -> RecordDict:
        return offer.pack_asked(asked[user], how)

    yield send_gates(setting, offer, collect)
    yield from until_done(going_on, "send pieces", "query.advance", collect, pieces)
    yield from with_recipes(setting, offer, METHOD, pieces, "delivered")
