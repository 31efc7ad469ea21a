"""Tasks: how an example becomes text, and how an answer is scored."""

from fl_perpcs.tasks.task import DEBIAN_SYNOPSIS, MOVIE_TAGGING, Task

__all__ = ["DEBIAN_SYNOPSIS", "MOVIE_TAGGING", "Task"]
