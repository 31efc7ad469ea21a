"""One adapter per user (Tan et al., "Democratizing Large Language Models", EMNLP 2024)."""

from fl_perpcs.phases import Phases, Setting, evaluation


def oppu(setting: Setting) -> Phases:
    """Let each target train an adapter on its own history, which never leaves it.

    ``prompts.retrieve`` and ``prompts.profiles`` give OPPU with retrieval and with profiles.
    """
    yield evaluation(setting, "oppu")
