"""The base LLM with its adaptation, the same for every target."""

from fl_perpcs.phases import Phases, Setting, evaluation


def base_llm(setting: Setting) -> Phases:
    """Let targets answer with the base LLM: no personalization."""
    yield evaluation(setting, "base")
