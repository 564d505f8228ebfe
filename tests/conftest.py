"""Fixtures of several rooms."""

from pathlib import Path

import pytest
from running import write_data


@pytest.fixture(scope='session')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random token shards."""
    return write_data(tmp_path_factory.mktemp('data'))
