import pytest


@pytest.fixture(autouse=True)
def memory(poisoned):
    """All tests here run on memory that holds nothing useful before."""
