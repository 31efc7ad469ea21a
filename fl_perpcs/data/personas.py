"""Synthetic users: communities that write about different films and tag them differently."""

from dataclasses import dataclass
from random import Random

from fl_perpcs.data.film_words import (
    COMPANIONS,
    ERAS,
    FILM_KINDS,
    FIRST_SENTENCES,
    MOODS,
    SECOND_SENTENCES,
    FilmKind,
)
from fl_perpcs.data.users import Example, User
from fl_perpcs.errors import PerPcsError
from fl_perpcs.seeds import derive_seed
from fl_perpcs.tasks import load_task

FAVOURITES = 6
"""Film kinds that a community mostly writes about."""

DEALS = 2
"""How many communities share a favourite kind, when there are enough communities."""

FAVOURITE_SHARE = 0.94
"""Share of a community's descriptions that are about its favourite kinds."""

TOPIC_SHAPE = 6.0
"""Shape of the gamma factors on a user's topics; with a higher one users differ less."""

HOBBY_SHARE = 0.1
"""Share of a user's descriptions that are about its hobby, a kind of its own."""

USUAL_SHARE = 0.8
"""Chance that a community gives a kind its usual (first) tag; else one of the other tags.

Communities agree on many kinds, as people do: where they agree on none, pieces of different
communities only contradict each other and even the mean of all is worse than the base LLM.
"""

TAG_NOISE = 0.02
"""Chance that an item carries another plausible tag than its user's convention says."""

# A film may be called slow and then quiet; these name one thing and are said once.
SAID_ONCE = ("{place}", "{turn}", "{companion}")


@dataclass(frozen=True)
class Community:
    """What the users of a community have in common.

    Attributes
    ----------
    name : str
        The community's name.
    topics : tuple of float
        p(kind) for each of ``FILM_KINDS``; sums to 1.
    convention : tuple of str
        The tag that the community gives to each of ``FILM_KINDS``.
    """

    name: str
    topics: tuple[float, ...]
    convention: tuple[str, ...]


@dataclass(frozen=True)
class Personas:
    """Synthetic users in communities, made when asked for.

    Communities differ in p(x), the kinds of films that they write about, and in p(y|x): the
    same kind gets another tag in another community. Users of one community differ in their
    mix of topics and in how much they write, and each has a hobby that it tags its own way.
    User ``i`` is in community ``i % num_communities``, and user and community are functions
    of the seed and their own number alone.

    Parameters
    ----------
    num_users : int
        Users that ``user_ids`` lists, at least 1.
    num_communities : int
        Communities that the users are dealt over, at least 1.
    history : int
        Mean number of history items of a user, at least 1; users vary from 0.6 to 1.4 of it.
    queries : int
        Held-out queries of each user, at least 0.
    seed : int
        Seed of the whole population.

    Raises
    ------
    PerPcsError
        If one of the numbers is too small.
    """

    num_users: int
    num_communities: int
    history: int
    queries: int
    seed: int = 0
    task = load_task("movie-tagging")

    def __post_init__(self) -> None:
        least = {"num_users": 1, "num_communities": 1, "history": 1, "queries": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value < low:
                raise PerPcsError(f"personas: {name} = {value} is too small; use {low} or more")

    def user_ids(self) -> list[str]:
        """Return ``user-0000``, ``user-0001``, ... in this order."""
        return [_user_id(number) for number in range(self.num_users)]

    def user(self, user_id: str) -> User:
        """Return one user.

        Raises
        ------
        PerPcsError
            If there is no such user.
        """
        number = self._number(user_id)
        community = make_community(self.seed, number % self.num_communities)
        rng = Random(derive_seed(self.seed, "user", number))
        topics, convention = _own_taste(rng, community)
        num_history = max(1, round(self.history * rng.uniform(0.6, 1.4)))

        examples: list[Example] = []
        seen: set[str] = set()
        while len(examples) < num_history + self.queries:
            number_of_kind = rng.choices(range(len(FILM_KINDS)), weights=topics)[0]
            kind = FILM_KINDS[number_of_kind]
            text = describe(rng, kind)
            if text in seen:
                continue
            seen.add(text)
            noisy = rng.random() < TAG_NOISE
            tag = rng.choice(kind.tags) if noisy else convention[number_of_kind]
            examples.append(Example(f"{user_id}/{len(examples)}", text, tag))
        return User(
            id=user_id,
            history=tuple(examples[:num_history]),
            queries=tuple(examples[num_history:]),
            group=community.name,
        )

    def _number(self, user_id: str) -> int:
        _, _, digits = user_id.partition("-")
        known = digits.isdecimal() and int(digits) < self.num_users
        if not known or user_id != _user_id(int(digits)):
            last = _user_id(self.num_users - 1)
            raise PerPcsError(f"no user {user_id!r}; personas has {_user_id(0)} to {last}")
        return int(digits)


def make_community(seed: int, number: int) -> Community:
    """Return a community, a function of the seed and its number alone.

    Parameters
    ----------
    seed : int
        Seed of the population.
    number : int
        Number of the community, from 0.

    Returns
    -------
    Community
        Its name, topics and convention.
    """
    rest = 1 - FAVOURITE_SHARE
    topics = [rest / len(FILM_KINDS)] * len(FILM_KINDS)
    favourites = _dealt_kinds(seed, number)
    for kind in favourites:
        topics[kind] += FAVOURITE_SHARE / len(favourites)

    rng = Random(derive_seed(seed, "convention", number))
    convention = tuple(
        kind.tags[0] if rng.random() < USUAL_SHARE else rng.choice(kind.tags[1:])
        for kind in FILM_KINDS
    )
    return Community(f"community-{number}", tuple(topics), convention)


def describe(rng: Random, kind: FilmKind) -> str:
    """Return a description of a film of this kind, one or two sentences.

    Parameters
    ----------
    rng : random.Random
        Where the choices come from; it is advanced.
    kind : FilmKind
        What the film is about.
    """
    mood, mood2 = rng.sample(MOODS, 2)
    slots = {
        "hero": rng.choice(kind.heroes),
        "plot": rng.choice(kind.plots),
        "place": rng.choice(kind.places),
        "turn": rng.choice(kind.turns),
        "companion": rng.choice(COMPANIONS),
        "era": rng.choice(ERAS),
        "mood": mood,
        "mood2": mood2,
    }
    first = rng.choice(FIRST_SENTENCES)
    second = rng.choice([s for s in SECOND_SENTENCES if not _shares_slot(first, s)])
    sentences = [_capitalized(s.format(**slots)) for s in (first, second) if s]
    return " ".join(sentences)


def _dealt_kinds(seed: int, number: int) -> list[int]:
    """Return a community's favourite kinds, as indices into ``FILM_KINDS``.

    Kinds are dealt like cards, several rounds of them to every ``table`` communities: no two
    communities then share many favourites, and most kinds are a favourite of more than one.
    """
    hand = FAVOURITES // DEALS
    table = len(FILM_KINDS) // hand
    seat = number % table
    favourites = []
    for deal in range(DEALS):
        cards = list(range(len(FILM_KINDS)))
        Random(derive_seed(seed, "deal", deal, number // table)).shuffle(cards)
        favourites += cards[seat * hand : (seat + 1) * hand]
    return favourites


def _user_id(number: int) -> str:
    return f"user-{number:04d}"


def _own_taste(rng: Random, community: Community) -> tuple[list[float], list[str]]:
    """Return a user's topics and convention: the community's, and a hobby with a quirk.

    The hobby is not among the community's favourites: a quirk in one of those would make the
    users of a community contradict each other, and nobody could be helped by anybody.
    """
    weights = [share * rng.gammavariate(TOPIC_SHAPE, 1.0) for share in community.topics]
    topics = [(1 - HOBBY_SHARE) * weight / sum(weights) for weight in weights]
    convention = list(community.convention)

    rare = min(community.topics)
    hobby = rng.choice([k for k, share in enumerate(community.topics) if share == rare])
    topics[hobby] += HOBBY_SHARE
    others = [tag for tag in FILM_KINDS[hobby].tags if tag != convention[hobby]]
    convention[hobby] = rng.choice(others)
    return topics, convention


def _shares_slot(first: str, second: str) -> bool:
    return any(slot in first and slot in second for slot in SAID_ONCE)


def _capitalized(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
