"""Debian's control files: stanzas of ``Field: value`` lines, parted by blank lines."""

from collections.abc import Iterable, Iterator

Stanza = dict[str, str]


def read_stanzas(lines: Iterable[str]) -> Iterator[Stanza]:
    r"""Yield the stanzas of a control file, one at a time.

    Parameters
    ----------
    lines : iterable of str
        For example an open file.

    Yields
    ------
    dict
        Field name (lower case) to value. The lines of a value that goes on over several
        lines are parted by ``\n``, and each keeps its indent.

    References
    ----------
    Debian Policy Manual, section 5.1.
    """
    stanza: Stanza = {}
    field = ""
    for line in lines:
        line = line.rstrip()
        if not line:
            if stanza:
                yield stanza
            stanza, field = {}, ""
        elif line[0] in " \t":
            if field:
                stanza[field] += "\n" + line
        elif line[0] != "#":
            name, colon, value = line.partition(":")
            field = name.strip().lower() if colon else ""
            if field:
                stanza[field] = value.strip()
    if stanza:
        yield stanza


def split_description(value: str) -> tuple[str, str]:
    r"""Split a package description into its synopsis and its long description.

    Parameters
    ----------
    value : str
        The field as :func:`read_stanzas` gives it.

    Returns
    -------
    synopsis : str
        The first line.
    long : str
        Paragraphs parted by ``\n``, wrapped lines joined. Lines with an indent of their
        own (lists, examples) stay on lines of their own. Empty if there is no more than a
        synopsis.

    References
    ----------
    Debian Policy Manual, section 5.6.13.
    """
    synopsis, *rest = value.split("\n")
    paragraphs: list[str] = []
    wraps = False
    for line in rest:
        text = " ".join(line.split())
        if text == ".":
            wraps = False
        elif line[1:2] in (" ", "\t"):
            paragraphs.append(text)
            wraps = False
        elif wraps:
            paragraphs[-1] += " " + text
        else:
            paragraphs.append(text)
            wraps = True
    return " ".join(synopsis.split()), "\n".join(paragraphs)
