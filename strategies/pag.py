"""Profile-augmented prompts: a short text about the user, beside retrieved items if wanted."""

from fl_perpcs.phases import Phases, Setting, evaluation


def pag(setting: Setting) -> Phases:
    """Let targets answer with the base LLM, their profile of ``prompts.profiles`` before it.

    Richardson et al., "Integrating Summarization and Retrieval for Enhanced Personalization via
    Large Language Models", 2023.
    """
    yield evaluation(setting, "pag", action="base")
