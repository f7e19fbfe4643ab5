"""Fixture for the process that forks runs; it starts at first use."""

import pytest
from forks import Forks


@pytest.fixture(scope="session")
def forks():
    """See tests/end_to_end/forks.py."""
    started = Forks()
    yield started
    started.close()
