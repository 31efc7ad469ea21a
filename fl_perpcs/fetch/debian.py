"""Real users: Debian maintainers, and the descriptions of their packages.

A real counterpart of LaMP-5: a user is a maintainer, an item pairs the long description of
a package with its one-line synopsis. The texts come from the machine's own package lists
and carry their packages' licences: they are built where they are needed and never
committed.
"""

import hashlib
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fl_perpcs.data.debian import default_folder
from fl_perpcs.errors import PerPcsError
from fl_perpcs.fetch.apt import AptLists, download_lists
from fl_perpcs.fetch.output import console, is_complete, new_folder, step
from fl_perpcs.fetch.stanzas import Stanza, read_stanzas, split_description

ORPHANED = "debian qa group"
"""Stands in for a maintainer where a package has none: no one's topics, no one's style."""

ADDRESS = re.compile(r"<?\b[\w.+~-]+@[\w-]+(?:\.[\w-]+)+>?")
MAINTAINER = re.compile(
    r"^\s*\"?(?P<name>[^<\"(]*?)\"?\s*(?:\([^<]*\)\"?\s*)?<(?P<address>[^<>\s]+@[^<>\s]+)>"
)
"""Name, perhaps in quotes; a remark in parentheses, dropped; address."""

NOTICE = (
    "Descriptions of Debian packages. Each text carries the licence of its package: "
    "do not publish or commit this folder without clearing that."
)


class Package(NamedTuple):
    """What is needed of a binary package to choose one per source."""

    source: str
    name: str
    description: str  # MD5 of the description, or the description itself
    maintainer: str  # name as it stands in the list
    address: str


class Maintainer(NamedTuple):
    """One user: a person or a team, under all addresses and spellings."""

    id: str
    names: frozenset[str]


def fetch_debian_synopsis(
    dest: Path | None = None, *, download: Callable[[Path], AptLists] = download_lists
) -> Path:
    """Build the users from the package lists of this machine's apt sources.

    The texts carry their packages' licences: never commit them. Ids of users are
    pseudonyms: they keep names out of reports, but whoever has a list of maintainers can
    find out who is who.

    Parameters
    ----------
    dest : Path, optional
        The folder to write; ``$PERPCS_HOME/data/debian-synopsis`` by default. If it is
        there and complete, nothing is done.
    download : callable
        Downloads the lists into an empty folder.

    Returns
    -------
    Path
        The folder, with ``users.jsonl`` (one user a line, sorted: ``{"id", "items": [{"id",
        "input", "output"}]}``) and ``manifest.json`` (releases, counts, SHA-256 of
        ``users.jsonl``). It appears whole or not at all.

    Raises
    ------
    PerPcsError
        If there is no apt on this machine, or the lists cannot be downloaded.
    """
    dest = dest or default_folder()
    if is_complete(dest, "manifest.json"):
        return dest
    with (
        tempfile.TemporaryDirectory(prefix="perpcs-apt-") as scratch,
        new_folder(dest, "manifest.json") as folder,
    ):
        try:
            with step("downloading package lists"):
                lists = download(Path(scratch).resolve())
        except PerPcsError as error:
            raise PerPcsError(
                f"{error}\nOr copy the folder of a Debian machine on which "
                f"`perpcs fetch debian-synopsis` ran to {dest}."
            ) from error
        with step("reading descriptions"):
            users = build_users(lists)
        manifest = _write(users, lists, folder)
    console.print(f"{dest}: {manifest['users']} users, {manifest['items']} items")
    return dest


def build_users(lists: AptLists) -> dict[str, list[dict[str, str]]]:
    """Return the items of each user, by user id.

    One package per source (its siblings share the text), no package without a long
    description, no transitional packages (section oldlibs), no orphaned ones, and no
    description that, digits and punctuation apart, another package has too: what is in a
    query must be in no history, be it another user's. E-mail addresses and the user's own
    names are blotted out. Items are ordered by a hash of the package name, so that neither
    the alphabet nor time separates queries from history.
    """
    packages = _one_per_source(_packages(lists.packages))
    long = _translations(lists.translations, {package.description for package in packages})
    maintainers = _maintainers(packages)
    users: dict[str, list[dict[str, str]]] = defaultdict(list)
    seen: set[str] = set()
    for package in sorted(packages, key=lambda package: _digest(package.name)):
        maintainer = maintainers[package.address]
        description = long.get(package.description, package.description)
        output, text = (scrub(t, maintainer.names) for t in split_description(description))
        letters = "".join(filter(str.isalpha, text.casefold()))
        if not output or not letters or letters in seen:
            continue
        seen.add(letters)
        users[maintainer.id].append({"id": package.name, "input": text, "output": output})
    return dict(sorted(users.items()))


def scrub(text: str, names: Iterable[str]) -> str:
    """Blot out e-mail addresses, and the given names wherever they stand as whole words."""
    text = ADDRESS.sub("(address)", text)
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "(name)", text, flags=re.IGNORECASE)
    return text


def _packages(paths: Iterable[Path]) -> Iterator[Package]:
    for stanza in _stanzas(paths):
        match = MAINTAINER.match(stanza.get("maintainer", ""))
        description = stanza.get("description-md5") or stanza.get("description", "")
        if "package" not in stanza or match is None or not description:
            continue
        maintainer = " ".join(match["name"].split())
        if maintainer.casefold() == ORPHANED or stanza.get("section", "").endswith("oldlibs"):
            continue
        name = stanza["package"]
        source = (stanza.get("source", "").split() or [name])[0]
        yield Package(source, name, description, maintainer, match["address"].lower())


def _one_per_source(packages: Iterable[Package]) -> list[Package]:
    """Keep the package that is called like its source, else the one with the shortest name."""

    def rank(package: Package) -> tuple:
        return (package.name != package.source, len(package.name), package)

    chosen: dict[str, Package] = {}
    for package in packages:
        best = chosen.get(package.source)
        if best is None or rank(package) < rank(best):
            chosen[package.source] = package
    return list(chosen.values())


def _translations(paths: Iterable[Path], wanted: set[str]) -> dict[str, str]:
    """Return the wanted descriptions by their MD5."""
    return {
        stanza["description-md5"]: stanza["description-en"]
        for stanza in _stanzas(paths)
        if stanza.get("description-md5") in wanted and "description-en" in stanza
    }


def _maintainers(packages: list[Package]) -> dict[str, Maintainer]:
    """Return who is behind each address.

    Teams move to new mailing lists and keep their names. Addresses that are mostly used
    with the same name are one user, or the same hand would be found among sharers and
    targets. The address with most packages gives the id.
    """
    names: dict[str, Counter[str]] = defaultdict(Counter)
    for package in packages:
        names[package.address][package.maintainer] += 1
    groups: dict[str, list[str]] = defaultdict(list)
    for address, counts in sorted(names.items()):
        name = min(counts, key=lambda name: (-counts[name], name))
        groups[name.casefold() or address].append(address)
    found = {}
    for addresses in groups.values():
        main = max(addresses, key=lambda address: names[address].total())
        spellings = frozenset(name for address in addresses for name in names[address] if name)
        maintainer = Maintainer(f"maintainer-{_digest(main)[:10]}", spellings)
        found.update(dict.fromkeys(addresses, maintainer))
    return found


def _write(
    users: dict[str, list[dict[str, str]]], lists: AptLists, folder: Path
) -> dict[str, object]:
    """Write ``users.jsonl`` and ``manifest.json``; return the manifest."""
    digest = hashlib.sha256()
    with (folder / "users.jsonl").open("wb") as file:
        for user_id, items in users.items():
            line = json.dumps({"id": user_id, "items": items}, ensure_ascii=False) + "\n"
            digest.update(line.encode())
            file.write(line.encode())
    manifest: dict[str, object] = {
        "about": NOTICE,
        "releases": list(lists.releases),
        "users": len(users),
        "users_with_20_items": sum(len(items) >= 20 for items in users.values()),
        "items": sum(map(len, users.values())),
        "sha256": digest.hexdigest(),
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    return manifest


def _stanzas(paths: Iterable[Path]) -> Iterator[Stanza]:
    for path in paths:
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from read_stanzas(lines)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
