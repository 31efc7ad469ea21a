"""Retrieval-augmented prompts: the items of the own history that are most like the query."""

from fl_perpcs.phases import Phases, Setting, evaluation


def rag(setting: Setting) -> Phases:
    """Let targets answer with the base LLM, ``prompts.retrieve`` items before each prompt.

    The base users' adaptation has them too. Salemi et al., "LaMP", ACL 2024.
    """
    yield evaluation(setting, "rag", action="base")
