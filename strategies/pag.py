"""Profile-augmented prompts: a short text about the user, beside retrieved items if wanted."""

from fl_perpcs.errors import PerPcsError
from fl_perpcs.phases import Phases, Setting, evaluation


def pag(setting: Setting) -> Phases:
    """Let targets answer with the base LLM, their profile before each prompt.

    Richardson et al., "Integrating Summarization and Retrieval for Enhanced Personalization via
    Large Language Models", 2023.

    Raises
    ------
    PerPcsError
        If ``prompts.profiles`` names no file.
    """
    if not setting.config.prompts.profiles:
        raise PerPcsError(
            'strategy.name = "pag" needs prompts.profiles, a file that'
            " `perpcs data profiles` writes"
        )
    yield evaluation(setting, "pag", action="base")
