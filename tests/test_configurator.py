"""Options: types, config files, --help, and the commands on the pages."""
import ast
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import configurator
from bench import BenchConfig
from configurator import PathStr, UserError, build, command_line, merge, read_options
from evaluate import EvaluateConfig
from export import ExportConfig
from model import SIZES, ModelConfig
from nanocem.prepare import PrepareConfig
from reproduce import ReproduceConfig
from running import MODEL_FILES, ROOT, SIZE_FILES
from sample import SampleConfig
from synthetic_gp import GPConfig
from train import TrainConfig

TRAIN = TrainConfig, ModelConfig
SCRIPTS = {'train': TRAIN, 'bench': (BenchConfig,), 'sample': (SampleConfig,),
           'evaluate': (EvaluateConfig,), 'export': (ExportConfig,),
           'reproduce': (ReproduceConfig,), 'prepare_slimpajama': (PrepareConfig,),
           'synthetic_gp': (GPConfig,)}


def options_of(*argv: str) -> dict[str, Any]:
    return read_options(list(argv), *TRAIN)


def test_later_options_win_and_types_are_the_fields(tmp_path: Path) -> None:
    config = tmp_path / 'c.py'
    config.write_text('"""Doc."""\nsize = \'86m\'\nlearning_rate = 1\nattn_steps = 3\n')
    got = options_of('--attn_steps=4', str(config), '--tokens=3.3b', '--compile',
                     '--stop_step=None', '--out_dir=~/123')
    assert got == {'size': '86m', 'learning_rate': 1.0, 'attn_steps': 4, 'tokens': 3_300_000_000,
                   'compile': True, 'stop_step': None, 'out_dir': str(Path.home() / '123')}
    assert isinstance(got['learning_rate'], float) and isinstance(got['tokens'], int)


def test_an_option_replaces_its_rival_of_an_earlier_level(tmp_path: Path) -> None:
    """Flags replace what files say, and later files what earlier files say; two exclusive options
    at one level are refused."""
    book = tmp_path / 'book.py'
    book.write_text("text = 'b.txt'\ntokens_per_param = 3\n")
    saved = options_of('config/mini.py')
    assert {'text', 'tokenizer', 'tokens'} <= saved.keys()
    for options in (options_of('--text=b.txt', '--tokens_per_param=3', 'config/mini.py'),
                    options_of('config/mini.py', str(book)),
                    merge(saved, {'text': 'b.txt', 'tokens_per_param': 3.0}, *TRAIN)):
        assert options['text'] == 'b.txt' and options['tokens_per_param'] == 3.0
        assert not {'data', 'tokenizer', 'tokens'} & options.keys()
    assert not {'text', 'tokenizer'} & options_of('config/mini.py', '--data=d').keys()
    with pytest.raises(UserError, match='tokens and tokens_per_param exclude each other: give one'):
        options_of('--tokens=1', '--tokens_per_param=2')
    # A size replaces the widths of an earlier file, and data replaces a text and its tokenizer
    assert options_of('config/xs.py', '--size=mini', '--n_layer=1').keys() & SIZES['mini'].keys(
        ) == {'n_layer'}
    assert options_of('config/nano.py', 'config/xs.py')['d_model'] == 48
    assert merge({'text': 'b.txt', 'tokenizer': 'byte', 'seed': 1}, {'data': 'd'}, *TRAIN) == {
        'data': 'd', 'seed': 1}
    # A prompt on the command line replaces a config file's prompt_file, and None replaces nothing
    file = tmp_path / 'prompt.py'
    file.write_text("prompt_file = 'p.txt'\ntokens = 5\n")
    assert read_options([str(file), '--prompt=a'], SampleConfig) == {'prompt': 'a', 'tokens': 5}
    file.write_text("data = 'd'\n")
    assert options_of(str(file), '--text=None')['data'] == 'd'


def test_the_configurator_names_no_option_of_a_script() -> None:
    """EXCLUSIVE and RESETS stand in the classes, and name options that these have."""
    fields = {name for classes in SCRIPTS.values() for cls in classes
              for name in cls.__dataclass_fields__}
    strings = {node.value for node in ast.walk(ast.parse(Path(configurator.__file__).read_text()))
               if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # text is the word for a str, and ELSEWHERE says what other people's names are here
    assert strings & fields <= {'text', *configurator.ELSEWHERE.values()}
    for classes in SCRIPTS.values():
        for cls in classes:
            for group in (*getattr(cls, 'EXCLUSIVE', ()), *getattr(cls, 'RESETS', ())):
                assert {*group} <= cls.__dataclass_fields__.keys()


def test_a_text_a_path_or_a_list_that_is_given_twice_is_refused() -> None:
    """As a shell writes --text={a,b}.txt: the first would not be read. A number overrides one."""
    for script, options in (
            ('train', '--text=a.txt --text=b.txt'), ('train', '--suffixes=.md --suffixes=.org'),
            ('train', '--separator=a --seed=1 --separator=b'), ('evaluate', '--steps=1 --steps=2'),
            ('evaluate', '--compare=a --compare=b'),
            ('sample', '--prompt=a --prompt=b'), ('prepare_slimpajama', '--input=a --input=b')):
        with pytest.raises(UserError, match=r'^--[a-z]+ is given twice: expected one'):
            read_options(options.split(), *SCRIPTS[script])
    options = '--tokens=5 --device=cpu --compile --tokens=6 --device=cuda --compile=False'
    assert options_of(*options.split()) == {'tokens': 6, 'device': 'cuda', 'compile': False}


def test_a_size_of_ones_own_has_its_width_of_the_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, '134m', SIZES['134m'] | {'d_mlp': 1024})
    assert (ModelConfig().d_mlp, ModelConfig(d_model=96).d_mlp) == (1024, 256)


def test_what_a_width_decides() -> None:
    """Heads no narrower than the size's 64, an MLP of 8/3 D, the next even number, and
    weights as wide as those of 768."""
    for d_model, n_head, d_mlp in ((768, 12, 2048), (130, 2, 348), (97, 1, 260), (1536, 24, 4096)):
        cfg = ModelConfig(d_model=d_model, positions='alibi')
        assert (cfg.n_head, cfg.d_mlp) == (n_head, d_mlp)
        assert cfg.init_std == pytest.approx(0.02 * (768 / d_model) ** 0.5)
    cfg = ModelConfig(size='nano', attn_steps=2, mlp_steps=4)
    assert (cfg.attn_step_size, cfg.mlp_step_size) == (0.5, 0.25)
    assert (cfg.positions, cfg.score_scale) == ('alibi', 'model')
    llama = ModelConfig(size='nano', attn='llama')
    assert (llama.positions, llama.score_scale) == ('rope', 'head')
    odd = ModelConfig(d_model=9, n_head=3, n_layer=1).llama()
    assert (odd.positions, odd.attn, odd.mlp, odd.n_head) == ('alibi', 'llama', 'llama', 3)


@pytest.mark.parametrize('options, words', [
    ('attn=llama attn_steps=3', 'only for attn=cem'),
    ('attn=llama exact_update=True', 'only for attn=cem'),
    ('attn=llama positions=alibi score_scale=model', 'only for attn=cem'), ('tie=kv', 'attn=llama'),
    ('mlp=llama mlp_steps=3', 'only for mlp=cem'), ('mlp=llama mlp_match=params', 'for mlp=cem'),
    ('mlp=llama attn=llama residual=normed', 'only for attn=cem or mlp=cem'),
    ('mlp=llama attn=llama preconditioner=diag', 'only for attn=cem or mlp=cem'),
    ('attn_rank=3', 'only for preconditioner=diag_lowrank'),
    ('mlp_rank=3', 'only for preconditioner=diag_lowrank'),
    ('mlp=llama preconditioner=diag_lowrank mlp_rank=3', 'only for mlp=cem'),
    ('rope_theta=7', 'only for positions=rope'), ('d_model=6 n_head=2 key_shift=half', 'is odd'),
    ('value_shift=half', 'only for attn=llama'),
    ('attn=llama tie=kv value_shift=half', 'the values are the keys'),
    ('d_model=6 n_head=2 positions=rope', 'is odd')])
def test_an_option_without_a_part_is_refused(options: str, words: str) -> None:
    """And one with a part is taken: the same beside what it is for."""
    given = parse_flags(options)
    with pytest.raises(UserError, match=words):
        build(ModelConfig, given)


@pytest.mark.parametrize('options', [
    'attn=llama residual=normed', 'mlp=llama residual=normed', 'mlp=llama preconditioner=diag',
    'preconditioner=diag_lowrank attn_rank=3 mlp_rank=3', 'positions=rope rope_theta=7',
    'attn=llama tie=kv', 'attn=llama rope_theta=7', 'd_model=6 n_head=2'])
def test_an_option_with_a_part_is_taken(options: str) -> None:
    cfg = build(ModelConfig, parse_flags(options))
    assert all(getattr(cfg, name) == value for name, value in parse_flags(options).items())


def parse_flags(options: str) -> dict[str, Any]:
    return read_options([f'--{option}' for option in options.split()], ModelConfig)


def test_a_path_begins_at_the_home_folder_and_is_not_empty() -> None:
    """Also as an item."""
    @dataclass
    class Config:
        """One option of each kind."""
        one: PathStr = 'a'  # a path
        some: tuple[PathStr, ...] = ()  # paths

    home = str(Path.home())
    assert read_options(['--one=~/b', '--some=~/b,c'], Config) == {
        'one': f'{home}/b', 'some': (f'{home}/b', 'c')}
    for name in ('one', 'some'):
        with pytest.raises(UserError, match=f'--{name}=: expected .*a name or path'):
            read_options([f'--{name}='], Config)


@pytest.mark.parametrize('script', SCRIPTS)
def test_help_has_a_line_for_every_option(script: str, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as error:
        read_options(['--help=all'], *SCRIPTS[script])
    names = [name for cls in SCRIPTS[script] for name in cls.__dataclass_fields__]
    assert error.value.code == 0
    assert sorted(re.findall(r'^  --(\w+)=', capfd.readouterr().out, re.M)) == sorted(names)


def test_numbers_are_what_was_written() -> None:
    """2.3M is a whole number, though 2.3 * 10**6 is not in floating point; 1.5 is none."""
    for text, number in (('2.3M', 2_300_000), ('4.1K', 4100), ('1e3', 1000), ('3.0', 3),
                         ('30M', 30_000_000), ('20k', 20_000), ('1B', 10**9), ('-3', -3),
                         ('0.0023b', 2_300_000), (f'{2**63 - 1}', 2**63 - 1),
                         (f'{2**53 + 1}K', (2**53 + 1) * 1000)):
        assert options_of(f'--tokens={text}') == {'tokens': number}
    for rate in (2e-3, 1e-9, 0.1 + 0.2):
        assert options_of(f'--learning_rate={rate}') == {'learning_rate': rate}
    for text in ('1.5', '0.0015K', 'inf', 'nan', 'M', '', '1e1000000', '1e1000000M', '9' * 5000,
                 '1e3M', 'infK'):
        with pytest.raises(UserError, match='expected a whole number'):
            options_of(f'--tokens={text}')
    for text in ('inf', '-inf', 'nan', '1e400', '9' * 400, '1e1000000', 'e3', 'x'):
        with pytest.raises(UserError, match='expected a number'):
            options_of(f'--attn_step_size={text}')


def test_a_config_file_is_found_here_then_beside_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert options_of('config/llama.py')['attn'] == 'llama'
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config/llama.py').write_text("size = '86m'\n")
    assert options_of('config/llama.py') == {'size': '86m'}


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match='batch_size=0: expected 1'):
        TrainConfig(batch_size=0)


@pytest.mark.parametrize('wrong, words', [
    (dict(n_layer='3'), 'n_layer=3: expected a whole number from 1'), (dict(n_head=2.0), 'whole'),
    (dict(attn=None), 'attn=None: expected one of llama, cem'), (dict(exact_update=1), 'True or'),
    (dict(n_layer=True), 'n_layer=True: expected a whole number from 1'),
    (dict(init_std=True), 'init_std=True: expected a number above 0'),
    (dict(n_layer=np.float64(2)), 'whole'), (dict(n_layer=np.int64(0)), 'n_layer=0: expected'),
    (dict(init_std=float('nan')), 'init_std=nan: expected a number above 0')])
def test_a_model_refuses_values_of_other_types(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**wrong)
    with pytest.raises(UserError, match=words):
        build(ModelConfig, wrong)


def test_a_model_is_described_by_json() -> None:
    """Where 5.0 may be 5. Numbers of numpy become Python's, which JSON and checkpoints hold."""
    cfg = ModelConfig(size='nano', n_layer=np.int64(3), positions='rope', rope_theta=np.int32(5),
                      init_std=np.float32(0.5), d_mlp=None, attn=np.str_('cem'),
                      kq_diag='shared', exact_update=np.True_)
    assert cfg.exact_update is True and type(cfg.attn) is str
    assert type(cfg.n_layer) is int and type(cfg.rope_theta) is type(cfg.init_std) is float
    assert (cfg.n_layer, cfg.rope_theta, cfg.d_mlp) == (3, 5.0, 86)
    assert ModelConfig(**json.loads(json.dumps(vars(cfg)))) == cfg


def test_a_script_ends_with_one_line() -> None:
    """Errors of the user, of the machine and Ctrl-C; any other error is Python's own."""
    def main(argv: list[str]) -> None:
        raise argv[0]
    for error, line in ((UserError('no\ndata'), 'no data'), (KeyboardInterrupt(), 'stopped'),
                        (FileNotFoundError(2, 'No such file', 'a.txt'), ".*No such file: 'a.txt'"),
                        (torch.OutOfMemoryError('a page'), 'out of memory: a smaller batch.*'),
                        (RuntimeError("[...] can't allocate memory: you"), 'out of memory: .*')):
        with pytest.raises(SystemExit, match=f'^[^:]*: {line}$'):
            command_line(main)([error])
    for error in ZeroDivisionError(), RuntimeError('another'):
        with pytest.raises(type(error)):
            command_line(main)([error])


@pytest.mark.parametrize('model', MODEL_FILES)
def test_model_files_and_size_files_commute(model: str) -> None:
    build(ModelConfig, options_of(model, '--size=256m'))
    for size in SIZE_FILES:
        options = options_of(model, size)
        assert options == options_of(size, model) and options.get('size', '') in size
        build(TrainConfig, options)
        build(ModelConfig, options)


def page_commands() -> list[tuple[str, str]]:
    """Return script and options of each command in code that is indented or fenced."""
    found = []
    for page in (ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))):
        text = page.read_text(encoding='utf-8').replace('\\\n', ' ')
        code = re.findall(r'^    .*$', text, re.M)
        code += '\n'.join(re.findall(r'^```\w*\n(.*?)^```', text, re.M | re.S)).splitlines()
        command = r'(?:^ *|&& )(?:\w+=\S+ )*(?:python|torchrun)(?: +--\S+)* +(\w+)\.py\b([^|;&>#]*)'
        found += [match for line in code for match in re.findall(command, line)]
    return found


def test_every_command_on_the_pages_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(page_commands()) >= 20
    for script, options in page_commands():
        if script == 'microcem':  # it has no options
            assert not options.strip()
            continue
        given = read_options(shlex.split(options), *SCRIPTS[script])
        for cls in SCRIPTS[script]:
            build(cls, given)
