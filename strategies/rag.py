"""Retrieval-augmented prompts: the items of the own history that are most like the query."""

from fl_perpcs.errors import PerPcsError
from fl_perpcs.phases import Phases, Setting, evaluation


def rag(setting: Setting) -> Phases:
    """Let targets answer with the base LLM, retrieved history items before each prompt.

    The base users' adaptation has them too. Salemi et al., "LaMP", ACL 2024.

    Raises
    ------
    PerPcsError
        If ``prompts.retrieve`` is 0.
    """
    if not setting.config.prompts.retrieve:
        raise PerPcsError('strategy.name = "rag" needs prompts.retrieve > 0, for example 2')
    yield evaluation(setting, "rag", action="base")
