"""Users' profiles: short texts about them that go before every prompt."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fl_perpcs.errors import PerPcsError


def profile_of(user_id: str, path: str) -> str:
    """Return a user's profile; "" without a file.

    Raises
    ------
    PerPcsError
        If the file has no profile of this user, or is malformed.
    """
    if not path:
        return ""
    profiles = read_profiles(path)
    if user_id not in profiles:
        raise PerPcsError(
            f"{path} has no profile of user {user_id!r}; add it, or write the file anew with"
            " perpcs data profiles"
        )
    return profiles[user_id]


@cache
def read_profiles(path: str) -> Mapping[str, str]:
    """Read profiles by user id, as in the published ``profile-id2text.json``.

    Raises
    ------
    PerPcsError
        If the file is missing or is not a JSON object of texts; names the file and the user.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PerPcsError(
            f"prompts.profiles = {path!r} cannot be read: {error.strerror}; write it with"
            " perpcs data profiles"
        ) from None
    except ValueError as error:
        raise PerPcsError(f"prompts.profiles = {path!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise PerPcsError(f"{path} holds a {type(found).__name__}; expected an object of texts")
    for user, text in found.items():
        if not isinstance(text, str):
            raise PerPcsError(f"{path}, user {user!r}: {text!r} is not a text")
    return {user: text.strip() for user, text in found.items()}
