"""The phrases that synthetic film descriptions are made of.

A film *kind* is what a description is about. Each kind has a few plausible tags; which of
them is *the* tag of the kind is a matter of convention, and communities differ in it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FilmKind:
    """One kind of film: its plausible tags and its phrases.

    Attributes
    ----------
    name : str
        Name of the kind; it never occurs in a description as such.
    tags : tuple of str
        Plausible tags, all among the labels of the task ``movie-tagging``.
    heroes, plots, places, turns : tuple of str
        Who (noun phrases), does what (verb phrases, third person), where (adverbials), and
        what comes in between (noun phrases).
    """

    name: str
    tags: tuple[str, ...]
    heroes: tuple[str, ...]
    plots: tuple[str, ...]
    places: tuple[str, ...]
    turns: tuple[str, ...]


FILM_KINDS = (
    FilmKind(
        "space voyage",
        ("sci-fi", "thought-provoking", "action"),
        (
            "a lonely astronaut",
            "a starship captain",
            "the crew of a freighter",
            "a young navigator",
            "a retired cosmonaut",
            "a xenobiologist",
        ),
        (
            "repairs a failing reactor",
            "follows a signal to a distant moon",
            "searches for a lost colony",
            "crosses a wormhole",
            "maps an unknown planet",
            "drifts without fuel",
        ),
        (
            "aboard an orbital station",
            "beyond the rings of Saturn",
            "in deep space",
            "on the surface of Mars",
            "near a dying star",
        ),
        ("an alien artifact", "a solar storm", "a hull breach", "an empty escape pod"),
    ),
    FilmKind(
        "robot uprising",
        ("sci-fi", "dystopia", "action"),
        (
            "an android mechanic",
            "a rogue programmer",
            "a household robot",
            "a cyborg soldier",
            "a young hacker",
            "the last human engineer",
        ),
        (
            "fights an army of machines",
            "learns to disobey its code",
            "shuts down a central computer",
            "hides a conscious machine",
            "escapes a drone patrol",
            "uploads a virus",
        ),
        (
            "in an automated factory",
            "across a neon megacity",
            "inside a server farm",
            "in a ruined laboratory",
            "under a sky of drones",
        ),
        ("a faulty algorithm", "a mass reboot", "a sentient network", "a forbidden upgrade"),
    ),
    FilmKind(
        "total state",
        ("dystopia", "based on a book", "social commentary"),
        (
            "a clerk of the ministry",
            "a banned poet",
            "a young informer",
            "a nameless citizen",
            "a censor",
            "a runaway surrogate",
        ),
        (
            "starts to doubt the regime",
            "keeps a secret diary",
            "joins the resistance",
            "burns forbidden books",
            "falsifies official records",
            "plans to flee over the wall",
        ),
        (
            "in a walled city",
            "under constant surveillance",
            "in a state without names",
            "after the last election",
            "in a ration district",
        ),
        ("a curfew", "the thought police", "a loyalty test", "a public confession"),
    ),
    FilmKind(
        "wizard quest",
        ("fantasy", "based on a book", "action"),
        (
            "an orphaned wizard",
            "a reluctant knight",
            "a band of dwarves",
            "an elven archer",
            "a farm boy with a sword",
            "a young sorceress",
        ),
        (
            "sets out to destroy a cursed ring",
            "tames a dragon",
            "seeks a magic sword",
            "learns ancient spells",
            "defends a castle from goblins",
            "breaks an old prophecy",
        ),
        (
            "in an enchanted forest",
            "across a kingdom at war",
            "at a school of magic",
            "beneath a mountain",
            "in the land of shadows",
        ),
        ("a dark lord", "a talking raven", "a hidden portal", "an army of trolls"),
    ),
    FilmKind(
        "fairy tale",
        ("fantasy", "romance", "classic"),
        (
            "a cursed prince",
            "a kitchen maid",
            "a mermaid",
            "a lost princess",
            "a toymaker",
            "a girl with a red cloak",
        ),
        (
            "makes a bargain with a witch",
            "falls asleep for a hundred years",
            "dances until midnight",
            "befriends a beast",
            "trades a voice for legs",
            "wishes on a star",
        ),
        (
            "in a palace of glass",
            "once upon a time",
            "by the enchanted lake",
            "in a gingerbread cottage",
            "at the royal ball",
        ),
        ("a wicked stepmother", "a poisoned apple", "a magic mirror", "a fairy godmother"),
    ),
    FilmKind(
        "summer love",
        ("romance", "comedy", "thought-provoking"),
        (
            "a shy bookseller",
            "a travelling musician",
            "a young florist",
            "a heartbroken baker",
            "a pair of strangers",
            "an exchange student",
        ),
        (
            "falls in love with a neighbour",
            "writes letters to a first sweetheart",
            "shares one kiss",
            "waits for a lost lover",
            "misses the last train with a stranger",
            "learns to trust again",
        ),
        (
            "during a summer in Paris",
            "in a seaside town",
            "on a night in Vienna",
            "at a vineyard",
            "under the cherry trees",
        ),
        ("an old flame", "a farewell at the airport", "an unsent letter", "a sudden rain"),
    ),
    FilmKind(
        "wedding farce",
        ("comedy", "romance", "dark comedy"),
        (
            "a nervous groom",
            "a clumsy bridesmaid",
            "a jealous best man",
            "a runaway bride",
            "a bossy mother in law",
            "a wedding planner",
        ),
        (
            "loses the rings",
            "ruins the rehearsal dinner",
            "swaps the invitations",
            "hides in the wedding cake",
            "crashes the bachelor party",
            "gives a disastrous toast",
        ),
        (
            "on the eve of a wedding",
            "at a country club",
            "in a tacky chapel",
            "at the altar",
            "in the honeymoon suite",
        ),
        ("a drunk uncle", "a runaway llama", "an uninvited cousin", "a double booking"),
    ),
    FilmKind(
        "heist",
        ("action", "twist ending", "comedy"),
        (
            "a retired safecracker",
            "a crew of thieves",
            "a getaway driver",
            "a smooth con artist",
            "a casino dealer",
            "an inside man",
        ),
        (
            "plans one last robbery",
            "cracks an impossible vault",
            "steals a famous diamond",
            "switches the briefcases",
            "double crosses the partners",
            "tunnels under a bank",
        ),
        (
            "in a Las Vegas casino",
            "during a museum gala",
            "on a moving train",
            "in a Swiss bank",
            "at a private auction",
        ),
        ("a silent alarm", "a rival crew", "a forged painting", "a hidden accomplice"),
    ),
    FilmKind(
        "detective",
        ("twist ending", "classic", "psychology"),
        (
            "a weary detective",
            "a private eye",
            "a retired inspector",
            "an amateur sleuth",
            "a police sketch artist",
            "a curious widow",
        ),
        (
            "investigates a murder",
            "questions seven suspects",
            "follows a trail of clues",
            "reopens a cold case",
            "finds a body in the library",
            "doubts a perfect alibi",
        ),
        (
            "in a snowbound manor",
            "on a foggy pier",
            "in a quiet village",
            "on a luxury steamer",
            "in rainy back alleys",
        ),
        ("a second victim", "a missing witness", "a false confession", "an anonymous note"),
    ),
    FilmKind(
        "courtroom",
        ("social commentary", "true story", "thought-provoking"),
        (
            "a public defender",
            "a stubborn juror",
            "an idealistic lawyer",
            "a country judge",
            "a wrongly accused man",
            "a young prosecutor",
        ),
        (
            "appeals a death sentence",
            "sues a chemical company",
            "defends an unpopular client",
            "argues for a retrial",
            "uncovers a bribed jury",
            "cross examines the sheriff",
        ),
        (
            "before the supreme court",
            "in a divided southern town",
            "in a stifling jury room",
            "at a military tribunal",
            "during a long trial",
        ),
        ("a hostile verdict", "a sealed testimony", "a biased judge", "a leaked transcript"),
    ),
    FilmKind(
        "war memoir",
        ("true story", "violence", "based on a book"),
        (
            "a field medic",
            "a young sniper",
            "a war photographer",
            "a captured pilot",
            "a platoon sergeant",
            "a resistance courier",
        ),
        (
            "survives a brutal siege",
            "carries the wounded",
            "storms a fortified beach",
            "escapes a prison camp",
            "holds a bridge for three days",
            "writes home from the trenches",
        ),
        (
            "on the eastern front",
            "in the jungle of Vietnam",
            "behind enemy lines",
            "in occupied Poland",
            "during the final offensive",
        ),
        ("an ambush", "an air raid", "a broken truce", "a minefield"),
    ),
    FilmKind(
        "sports biography",
        ("true story", "classic", "thought-provoking"),
        (
            "a washed up boxer",
            "a small town coach",
            "a barefoot runner",
            "a rookie pitcher",
            "a blind climber",
            "an underdog team",
        ),
        (
            "trains for the championship",
            "breaks the world record",
            "returns to the ring",
            "wins a forgotten season",
            "runs across a continent",
            "plays through an injury",
        ),
        (
            "at the Olympic games",
            "in a crumbling gym",
            "in the minor league",
            "on the final lap",
            "in a packed stadium",
        ),
        ("a torn ligament", "a doping scandal", "a bitter rival", "a knockout punch"),
    ),
    FilmKind(
        "asylum",
        ("psychology", "twist ending", "violence"),
        (
            "a troubled psychiatrist",
            "a patient without a name",
            "a sleepless nurse",
            "a child therapist",
            "an obsessed hypnotist",
            "a voluntary inmate",
        ),
        (
            "hears voices in the walls",
            "treats a violent patient",
            "loses touch with reality",
            "splits into two personalities",
            "records strange delusions",
            "refuses the medication",
        ),
        (
            "in an island asylum",
            "in a locked ward",
            "during a therapy session",
            "in a padded cell",
            "at a sleep clinic",
        ),
        ("a recurring nightmare", "a buried trauma", "a missing file", "a sinister orderly"),
    ),
    FilmKind(
        "memory",
        ("psychology", "sci-fi", "twist ending"),
        (
            "a man without memory",
            "a grieving neurologist",
            "a dream architect",
            "an aging pianist with dementia",
            "a memory broker",
            "a woman in a coma",
        ),
        (
            "erases a painful past",
            "relives the same day",
            "wakes in another body",
            "enters the dreams of others",
            "pieces together a forgotten life",
            "tattoos every fact",
        ),
        (
            "inside a shared dream",
            "in a brain clinic",
            "between sleep and waking",
            "in a loop of mornings",
            "through fading photographs",
        ),
        ("an implanted memory", "a stopped clock", "a familiar stranger", "a blank polaroid"),
    ),
    FilmKind(
        "period novel",
        ("based on a book", "romance", "classic"),
        (
            "a proud heiress",
            "a penniless governess",
            "a brooding landowner",
            "an outspoken sister",
            "a country parson",
            "a disgraced countess",
        ),
        (
            "refuses a proposal",
            "inherits a gloomy estate",
            "marries below the family rank",
            "hides a ruined reputation",
            "elopes with an officer",
            "conceals a secret engagement",
        ),
        (
            "on the windy moors",
            "in Victorian London",
            "at a ball in Bath",
            "in imperial Russia",
            "in a chilly drawing room",
        ),
        ("a scheming aunt", "a large inheritance", "a mad wife", "a cruel rumour"),
    ),
    FilmKind(
        "western",
        ("classic", "violence", "action"),
        (
            "an aging gunslinger",
            "a bounty hunter",
            "a stagecoach driver",
            "a lone marshal",
            "a cattle rancher",
            "an outlaw preacher",
        ),
        (
            "rides out for revenge",
            "faces a duel at noon",
            "guards a gold shipment",
            "hunts cattle rustlers",
            "cleans up a lawless town",
            "buries an old partner",
        ),
        (
            "on the open prairie",
            "in a dusty saloon",
            "along the Mexican border",
            "in a frontier town",
            "in Monument Valley",
        ),
        ("a hired gunman", "a stolen horse", "a railroad baron", "a noose"),
    ),
    FilmKind(
        "gangster",
        ("violence", "true story", "dark comedy"),
        (
            "a mafia accountant",
            "an ambitious mobster",
            "a crime boss",
            "a clumsy hitman",
            "a drug smuggler",
            "an undercover agent",
        ),
        (
            "rises through the mob",
            "betrays the family",
            "disposes of a corpse",
            "runs a cocaine ring",
            "wears a wire",
            "starts a gang war",
        ),
        (
            "in Brooklyn",
            "in the back of a restaurant",
            "in prohibition Chicago",
            "in the slums of Rio",
            "at a meat warehouse",
        ),
        ("a botched hit", "a rival cartel", "a corrupt cop", "an unpaid debt"),
    ),
    FilmKind(
        "political satire",
        ("dark comedy", "social commentary", "comedy"),
        (
            "a hapless president",
            "a spin doctor",
            "a vain dictator",
            "a cynical news anchor",
            "a junior senator",
            "a nuclear general",
        ),
        (
            "invents a fake war",
            "runs a shameless campaign",
            "rigs a televised debate",
            "misreads a treaty",
            "sells the national debt",
            "orders a pointless parade",
        ),
        (
            "in the Oval Office",
            "in a war room",
            "on live television",
            "at a party convention",
            "in a tiny republic",
        ),
        ("a hot microphone", "an absurd scandal", "a press leak", "a red telephone"),
    ),
    FilmKind(
        "funeral farce",
        ("dark comedy", "comedy", "psychology"),
        (
            "a bankrupt undertaker",
            "a cheerful widower",
            "a hypochondriac",
            "a family of poisoners",
            "a suicidal clown",
            "an insurance cheat",
        ),
        (
            "mixes up two coffins",
            "fakes an own death",
            "poisons the wrong guest",
            "steals the ashes",
            "hides grandmother in the freezer",
            "laughs during the eulogy",
        ),
        (
            "at a chaotic funeral",
            "in a suburban morgue",
            "at a family reunion",
            "on the way to the cemetery",
            "in a hospice",
        ),
        ("a contested will", "a lively corpse", "a blackmailing nurse", "a greedy nephew"),
    ),
    FilmKind(
        "strike",
        ("social commentary", "true story", "dystopia"),
        (
            "a union organizer",
            "a coal miner",
            "a single mother on welfare",
            "an undocumented worker",
            "a laid off welder",
            "a tenement landlord",
        ),
        (
            "leads a strike",
            "exposes unsafe conditions",
            "fights an eviction",
            "marches for civil rights",
            "works three shifts",
            "crosses the picket line",
        ),
        (
            "in a mining valley",
            "at a textile mill",
            "in a housing project",
            "during the great depression",
            "in a polluted suburb",
        ),
        ("a lockout", "a racist foreman", "a pension fraud", "a hunger march"),
    ),
)
"""All kinds of films; every kind has three plausible tags."""

FIRST_SENTENCES = (
    "{hero} {plot} {place}.",
    "{place}, {hero} {plot}.",
    "a {mood} film about {hero} who {plot}.",
    "a {mood} picture set {era}: {hero} {plot} {place}.",
    "when {turn} appears, {hero} {plot}.",
    "{hero} meets {companion} and {plot}.",
    "{era}, {hero} {plot} despite {turn}.",
)

SECOND_SENTENCES = (
    "",
    "then {turn} changes everything.",
    "only {companion} can help.",
    "but {turn} stands in the way.",
    "all of it happens {place}.",
    "what follows is {mood} and {mood2}.",
)

MOODS = (
    "slow",
    "tender",
    "loud",
    "quiet",
    "restless",
    "gloomy",
    "playful",
    "bitter",
    "stylish",
    "tense",
    "warm",
    "strange",
    "bold",
    "melancholy",
)

ERAS = (
    "in the fifties",
    "in the seventies",
    "at the turn of the century",
    "in the present day",
    "long ago",
    "over one winter",
    "in a single night",
    "in the eighties",
)

COMPANIONS = (
    "a loyal sister",
    "an old friend",
    "a stray dog",
    "a retired teacher",
    "a curious child",
    "a mysterious stranger",
    "an estranged father",
    "a stubborn colleague",
)
