"""Tasks: how an example becomes text, and how an answer is scored."""

from fl_perpcs.tasks.task import Task, fill, load_task, task_names

__all__ = ["Task", "fill", "load_task", "task_names"]
