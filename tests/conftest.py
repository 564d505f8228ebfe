"""Fixtures of several test files."""
from pathlib import Path

import pytest

from running import straight_and_stopped, write_data


@pytest.fixture(scope='session')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of random token shards."""
    return write_data(tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='session')
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return straight_and_stopped(tmp_path_factory.mktemp('halves'))
