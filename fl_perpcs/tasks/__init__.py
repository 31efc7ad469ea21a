"""Tasks: how an example becomes text, and how an answer is scored."""

from fl_perpcs.tasks.task import Task, check_task, fill, load_task, task_names

__all__ = ["Task", "check_task", "fill", "load_task", "task_names"]
