"""Fixtures of several test files."""
from pathlib import Path

import pytest
from running import Run, steps, write_data

import train


@pytest.fixture(scope='session')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of random token shards."""
    return write_data(tmp_path_factory.mktemp('data'))


def straight_and_stopped(tmp: Path, *options: str) -> tuple[Path, Path]:
    """Return two folders of the same run, one after 12 steps and one stopped after 6. The data is
    beside them, and its vocabulary holds all bytes, so that both can be sampled."""
    data = write_data(tmp / 'data', vocab_size=257)
    common = [f'--data={data}', steps(12), '--eval_interval=4', '--checkpoint_interval=3', *options]
    straight = Run(tmp, *common, f'--out_dir={tmp / "straight"}')
    stopped = Run(tmp, *common, f'--out_dir={tmp / "stopped"}', '--stop_step=6')
    codes = straight.wait().codes, stopped.wait().codes
    assert codes == ([0], [train.STOPPED]), straight.text + stopped.text
    return tmp / 'straight', tmp / 'stopped'


@pytest.fixture(scope='session')
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return straight_and_stopped(tmp_path_factory.mktemp('halves'))


@pytest.fixture(scope='session')
def muon_halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return straight_and_stopped(tmp_path_factory.mktemp('muon'), '--optimizer=muon')
