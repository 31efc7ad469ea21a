"""The one error that a user is meant to read."""


class PerPcsError(Exception):
    """Something a user can put right.

    The message names the value, what was expected and the remedy; the command line
    prints it without a traceback.
    """
