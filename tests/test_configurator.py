"""Options: types, config files, and refusals in one line."""
import re
from pathlib import Path
from typing import Any

import pytest
from running import ROOT

from bench import BenchConfig
from configurator import build, check_values, read_options
from evaluate import EvaluateConfig
from model import ModelConfig
from nanocem.runs import new_options
from prepare_slimpajama import PrepareConfig
from reproduce import ReproduceConfig
from sample import SampleConfig
from synthetic_gp import Options
from train import TrainConfig


def options_of(*argv: str) -> dict[str, Any]:
    return read_options(list(argv), TrainConfig, ModelConfig)


def test_later_options_win_and_types_are_the_fields(tmp_path: Path) -> None:
    config = tmp_path / 'c.py'
    config.write_text('"""Doc."""\nsize = \'86m\'\nlearning_rate = 1\nattn_steps = 3\n')
    got = options_of(str(config), '--attn_steps=4', '--tokens=3.3b', '--compile',
                     '--stop_step=None', '--out_dir=123')
    assert got == {'size': '86m', 'learning_rate': 1.0, 'attn_steps': 4, 'tokens': 3_300_000_000,
                   'compile': True, 'stop_step': None, 'out_dir': '123'}
    assert isinstance(got['learning_rate'], float) and isinstance(got['tokens'], int)


@pytest.mark.parametrize('argument, words', [
    ('--atn_steps=2', ['atn_steps', 'no such option', 'attn_steps']),
    ('--size', ['--size=VALUE']),
    ('--size=7b', ['size=7b', 'mini, 86m']),
    ('--attn_steps=2.5', ['attn_steps=2.5', 'a whole number']),
    ('--learning_rate=nan', ['a number']),
    ('--tensorboard=maybe', ['True or False']),
    ('config/none.py', ['config/none.py', 'No such file']),
    ('import os', ['c.py:1', 'name = plain value']),
    ('size = ', ['not Python']),
    ('attn_steps = [1]', ['attn_steps = [1]', 'whole number']),
    ('d = {}', ['d: no such option']),
])
def test_a_bad_option_or_config_file_is_one_clear_line(
    argument: str, words: list[str], tmp_path: Path
) -> None:
    """Config files are read, not run."""
    if ' ' in argument:
        (tmp_path / 'c.py').write_text(argument)
        argument = str(tmp_path / 'c.py')
    with pytest.raises(SystemExit) as error:
        options_of(argument)
    assert '\n' not in error.value.code
    assert all(w in error.value.code for w in words), error.value.code


@pytest.mark.parametrize('classes', [
    (TrainConfig, ModelConfig), (BenchConfig,), (EvaluateConfig,), (PrepareConfig,),
    (ReproduceConfig,), (SampleConfig,), (Options,)], ids=lambda classes: classes[0].__name__)
def test_help_has_a_line_for_every_option(
        classes: tuple[type, ...], capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        read_options(['--help'], *classes)
    names = [name for cls in classes for name in cls.__dataclass_fields__]
    assert error.value.code == 0
    assert re.findall(r'^  --(\w+)=', capfd.readouterr().out, re.M) == names


def test_numbers_are_what_was_written() -> None:
    """Decimal arithmetic: 2.3M is whole; 1.5 is not, and is no whole number."""
    for text, number in (('2.3M', 2_300_000), ('4.1K', 4100), ('1e3', 1000), ('3.0', 3)):
        assert options_of(f'--tokens={text}') == {'tokens': number}
    for text in ('1.5', '0.0015K', '1e400', 'inf', 'nan', 'M', ''):
        with pytest.raises(SystemExit, match='expected a whole number'):
            options_of(f'--tokens={text}')
    for text in ('inf', '-inf', '1e999', 'nan'):
        with pytest.raises(SystemExit, match='expected a number'):
            options_of(f'--attn_step_size={text}')


def test_a_config_file_is_found_here_then_beside_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert options_of('config/llama.py')['size'] == '134m'
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config/llama.py').write_bytes(b"\xef\xbb\xbfsize = '86m'\n")  # with a mark
    assert options_of('config/llama.py') == {'size': '86m'}


def test_values_from_a_file_are_checked() -> None:
    given = {'compile': 'False', 'warmup': 0, 'stop_step': None}
    checked = check_values(given, 'config.json', TrainConfig)
    assert checked == {'compile': False, 'warmup': 0.0, 'stop_step': None}
    for wrong, words in (({'seed': '1.5'}, 'config.json: seed'), ({'new': 1}, 'no such option'),
                         ({'seed': True}, 'a whole number'), ({'data': 5}, 'expected text')):
        with pytest.raises(SystemExit, match=words):
            check_values(wrong, 'config.json', TrainConfig)


@pytest.mark.parametrize('wrong, words', [
    (dict(seed='1337'), 'seed=1337: expected a whole number'), (dict(seed=None), 'seed=None'),
    (dict(tokens=1.0), 'tokens=1.0: expected a whole number, or None'),
    (dict(seed=True), 'seed=True'), (dict(tensorboard=1), 'tensorboard=1: expected True or False'),
    (dict(beta1='1'), 'beta1=1: expected a number'), (dict(data=1), 'data=1: expected text'),
    (dict(device='tpu'), 'one of auto, cpu'), (dict(text=''), 'text= is empty'),
    (dict(batch_size=0), 'batch_size=0: expected 1 to 1,000,000')], ids=str)
def test_values_from_python_are_checked(wrong: dict[str, Any], words: str) -> None:
    TrainConfig(beta1=0, text=None)  # a whole number is a number, None what it may be
    with pytest.raises(ValueError, match=words):
        TrainConfig(**wrong)


@pytest.mark.parametrize('size', ['nano', 'micro', 'mini'])
def test_small_sizes_bring_their_settings(size: str) -> None:
    given = new_options({'size': size}, TrainConfig)
    assert given['data'] == 'data/builtin' and given['context_length'] <= 128
    given = new_options({'size': size, 'tokens_per_param': 3.0}, TrainConfig)
    assert given['tokens'] is None
    with pytest.raises(SystemExit, match='two budgets'):
        new_options({'size': size, 'tokens_per_param': 3.0, 'tokens': 5}, TrainConfig)


@pytest.mark.parametrize('path', sorted((ROOT / 'config').glob('*.py')), ids=lambda p: p.name)
def test_every_config_file_makes_a_model(path: Path) -> None:
    given = options_of(str(path))
    build(TrainConfig, given)
    for size in ('mini', '86m', '256m'):
        build(ModelConfig, {**given, 'size': size})
