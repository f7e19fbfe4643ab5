"""Fixture for the process that forks runs. The process starts when it is first used."""

import pytest
from forks import Forks


@pytest.fixture(scope="session")
def forks():
    """See tests/end_to_end/forks.py."""
    started = Forks()
    yield started
    started.close()
