"""What the end-to-end tests share: a federation that is small, but real."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
SMALL = {
    "data.users": 14,
    "data.history": 16,
    "data.queries": 6,
    "roles.base": 2,
    "roles.candidates": 8,
    "roles.targets": 4,
    "sharers.count": 4,
    "sharers.min-history": 4,
    "adaptation.rounds": 1,
    "adaptation.steps": 3,
    "adapter.steps": 6,
    "gates.steps": 6,
}
