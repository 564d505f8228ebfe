"""Options: types, config files, and refusals in one line."""

from pathlib import Path
from typing import Any

import pytest
from nanocem.options import new_options
from running import ROOT

import configurator
from model import ModelConfig
from train import RECIPE, TrainConfig


def options_of(argv: list[str]) -> dict[str, Any]:
    return configurator.read_options(argv, TrainConfig, ModelConfig)


def test_later_options_win_and_types_are_the_fields(tmp_path: Path) -> None:
    config = tmp_path / 'c.py'
    config.write_text(
        '"""Doc."""\nsize = \'86m\'\nlearning_rate = 1\nattn_steps = 3\ntokens = 1_000\n'
    )
    got = options_of(
        [
            str(config),
            '--attn_steps=4',
            '--tokens=3.3B',
            '--compile',
            '--max_minutes=None',
            '--out_dir=123',
        ]
    )
    assert got == {
        'size': '86m',
        'learning_rate': 1.0,
        'attn_steps': 4,
        'tokens': 3_300_000_000,
        'compile': True,
        'max_minutes': None,
        'out_dir': '123',
    }
    assert isinstance(got['learning_rate'], float) and isinstance(got['tokens'], int)


@pytest.mark.parametrize(
    'argument, words',
    [
        ('--atn_steps=2', ['atn_steps', 'no such option', 'attn_steps']),
        ('--size', ['--size=VALUE']),
        ('--size=7b', ['size=7b', 'mini, 86m']),
        ('--attn_steps=2.5', ['attn_steps=2.5', 'a whole number']),
        ('--attn_steps=two', ['attn_steps=two']),
        ('--learning_rate=nan', ['a number']),
        ('--tensorboard=maybe', ['True or False']),
        ('config/none.py', ['config/none.py', 'No such file']),
        ('size', ['config file size']),
        ('--attn_steps=inf', ['attn_steps']),
    ],
)
def test_a_bad_option_is_one_clear_line(argument: str, words: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        options_of([argument])
    assert '\n' not in error.value.code and all(w in error.value.code for w in words), (
        error.value.code
    )


@pytest.mark.parametrize(
    'text, words',
    [
        ('import os', ['c.py:1', 'name = plain value']),
        ('learning_rate = print(1)', ['c.py:1', 'plain value']),
        ('learning_rate = open("f")', ['c.py:1']),
        ('a, b = 1, 2', ['c.py:1']),
        ('size = ', ['not Python']),
        ('size = 3', ['size = 3']),
        ('attn_steps = [1]', ['attn_steps = [1]', 'whole number']),
        ('d = {}', ['d: no such option']),
    ],
)
def test_config_files_are_read_not_run(text: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / 'c.py').write_text(text)
    with pytest.raises(SystemExit) as error:
        options_of([str(tmp_path / 'c.py')])
    assert all(w in error.value.code for w in words), error.value.code


def test_help_lists_every_option(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        options_of(['--help'])
    text = capfd.readouterr().out
    assert error.value.code == 0
    for cls in (TrainConfig, ModelConfig):
        for name in cls.__dataclass_fields__:
            assert f'  --{name}=' in text


def test_numbers_are_what_was_written(tmp_path: Path) -> None:
    """Decimal arithmetic: 2.3M is whole; 1.5 is not, and is no whole number."""
    for text, number in (('2.3M', 2_300_000), ('4.1K', 4100), ('1e3', 1000), ('3.0', 3)):
        assert options_of([f'--tokens={text}']) == {'tokens': number}
    for text in ('1.5', '0.0015K', '1e400', 'inf', 'nan', 'M', ''):
        with pytest.raises(SystemExit, match='expected a whole number'):
            options_of([f'--tokens={text}'])
    for text in ('inf', '-inf', '1e999', 'nan'):
        with pytest.raises(SystemExit, match='expected a number'):
            options_of([f'--attn_step_size={text}'])


def test_a_config_file_is_found_here_then_beside_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert options_of(['config/llama.py'])['size'] == '134m'
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config/llama.py').write_bytes(b"\xef\xbb\xbfsize = '86m'\n")  # with a mark
    assert options_of(['config/llama.py']) == {'size': '86m'}


def test_values_from_a_file_are_checked() -> None:
    given = {'compile': 'False', 'warmup': 0, 'max_minutes': None}
    checked = configurator.check_values(given, 'config.json', TrainConfig)
    assert checked == {'compile': False, 'warmup': 0.0, 'max_minutes': None}
    for wrong, words in (({'seed': '1.5'}, 'config.json: seed'), ({'new': 1}, 'no such option'),
                         ({'seed': True}, 'a whole number'), ({'data': 5}, 'expected text')):
        with pytest.raises(SystemExit, match=words):
            configurator.check_values(wrong, 'config.json', TrainConfig)


@pytest.mark.parametrize('size', ['nano', 'micro', 'mini'])
def test_small_sizes_bring_their_settings(size: str) -> None:
    given, _ = new_options({'size': size}, TrainConfig, RECIPE)
    assert given['data'] == 'data/builtin' and given['context_length'] <= 128
    given, _ = new_options({'size': size, 'tokens_per_param': 3.0}, TrainConfig, RECIPE)
    assert given['tokens'] is None
    with pytest.raises(SystemExit, match='two budgets'):
        new_options({'size': size, 'tokens_per_param': 3.0, 'tokens': 5}, TrainConfig, RECIPE)


@pytest.mark.parametrize('path', sorted((ROOT / 'config').glob('*.py')), ids=lambda p: p.name)
def test_every_config_file_makes_a_model(path: Path) -> None:
    given = options_of([str(path)])
    configurator.build(TrainConfig, given)
    for size in ('mini', '86m', '256m'):
        configurator.build(ModelConfig, {**given, 'size': size})
