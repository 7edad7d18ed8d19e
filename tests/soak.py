"""Cases that only ``make soak`` runs: the suite holds the behaviour with another case."""

from typing import Any

import pytest


def soak(*values: Any) -> Any:
    """Arguments of one case of a parametrised test."""
    return pytest.param(*values, marks=pytest.mark.soak)
