"""reproduce.py: its tables, what it draws of results/ladder, and a tiny ladder from nothing."""
import json
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from nanocem.figures import FIGURES, Figure, draw_bars
from running import ROOT

import prepare_slimpajama
import reproduce
from model import Transformer
from nanocem.fast import flops_per_token
from reproduce import MODELS, SIZES, Run, configs, own_runs, read_result, read_runs, swept_runs

TINY = ('config/ladder.py --n_layer={} --d_model=16 --n_head=1 --d_mlp=24 --context_length=16 '
        '--tokens_per_param=0.1 --batch_size=8 --micro_batch_size=8 --eval_tokens=500 '
        '--test_tokens=500')
FIRST = Run('ladder', 's1', 'cem-2', 0.013, 1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the project's programs in it, where the ladder has two tiny sizes."""
    for path in [*ROOT.glob('*.py'), ROOT / 'config', ROOT / 'nanocem']:
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / 'data/corpus').mkdir(parents=True)
    (tmp_path / 'data/corpus/meta.json').write_text('{}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SIZES, 'ladder', {f's{n}': TINY.format(n) for n in (1, 2)})
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def pretend(run: Run, perplexity: Any = 5.0) -> None:
    """Files as a finished run leaves them."""
    os.makedirs(run.folder, exist_ok=True)
    train, model = map(asdict, configs(run.options))
    result = {'test_perplexity': perplexity, 'val_perplexity': 6.0, 'parameters': 10, 'tokens': 9,
              'flops_per_token': 8.0, 'steps': 10, 'seconds': 2.0}
    for name, content in (('result', result), ('config', {'train': train, 'model': model})):
        Path(f'{run.folder}/{name}.json').write_text(json.dumps(content))


# Its tables

def test_the_published_runs_are_what_is_planned() -> None:
    """runs.csv has every run of the ladder's plan, in the shape of today's models, and besides only
    the check of the rates and models whose figures are gone."""
    published = read_runs(ROOT / 'results/ladder/runs.csv', 'ladder')
    planned = {*own_runs('ladder'), *swept_runs('ladder')}
    assert planned <= set(published)
    others = {run.model for run in set(published) - planned if run.size != '387k'}
    assert not others & set(MODELS)
    for run in {(run.size, run.model): run for run in planned}.values():
        train, cfg = configs(run.options)
        with torch.device('meta'):
            model, llama = Transformer(cfg), Transformer(cfg.llama())
        steps = math.ceil(train.tokens_per_param * llama.num_params() / 2048)
        row = published[run]
        assert (row['parameters'], row['steps'], row['tokens']) == (
            model.num_params(), steps, 2048 * steps), run
        assert row['flops_per_token'] == pytest.approx(flops_per_token(model), rel=1e-9), run


def test_the_rates_are_those_that_the_sweeps_chose() -> None:
    chosen = json.loads((ROOT / 'results/ladder/rates.json').read_text())['rates']
    rates = {model: dict(zip(SIZES['ladder'], of, strict=False))
             for model, of in reproduce.RATES.items()}
    assert {model: rates[model] for model in chosen if model in MODELS} == {
        model: of for model, of in chosen.items() if model in MODELS}


def test_sizes_are_named_by_the_weights_of_llamas_blocks() -> None:
    """And heads are 16 wide."""
    for size, options in (SIZES['ladder'] | SIZES['gpu']).items():
        cfg = configs(f'{options} {MODELS["llama"]}')[1]
        with torch.device('meta'):
            weights = sum(p.numel() for p in Transformer(cfg).blocks.parameters())
        assert weights == pytest.approx(float(size.replace('k', 'e3').replace('m', 'e6')), rel=0.01)
        assert cfg.d_model == 16 * cfg.n_head == 16 * cfg.n_layer and cfg.context_length == 128


def test_the_papers_scale_counts_what_it_runs(here: Path, capsys: Any) -> None:
    """A command a run, each valid; together their number and hours; nothing is run."""
    reproduce.main(['all', '--scale=paper'])
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith('torchrun --nproc_per_node=8 train.py ')]
    runs = {*own_runs('paper'), *swept_runs('paper')}
    assert len(commands) == len(set(commands)) == len(runs) == 150
    assert {run.size for run in own_runs('paper')} == {'86m', '108m', '134m', '162m'}
    assert {run.size for run in swept_runs('paper')} == set(SIZES['paper'])
    hours = sum(map(reproduce.hours, runs))
    together = [cell.strip() for cell in lines[-1].split('|')]
    assert together[1:5] == ['together', '', '150', f'{hours:,.1f}'] and not os.path.exists('out')


def test_the_claims_on_a_gpu(here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every main model and the control at both sizes; not without a GPU, unless told to."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(SystemExit, match='torch finds no GPU'):
        reproduce.main(['all', '--scale=gpu'])
    perplexities = dict(val_perplexity=5.0, parameters=9, tokens=9, flops_per_token=9.0, steps=9)
    monkeypatch.setattr(reproduce, 'train_all', lambda runs, jobs: {
        run: {**perplexities, 'test_perplexity': 5.0 + run.model.startswith('cem')}
        for run in runs})
    monkeypatch.setattr(reproduce, 'draw', lambda *of: None)
    reproduce.main(['all', '--scale=gpu', '--run'])
    assert '| +20.0%' in capsys.readouterr().out
    assert {(run.size, run.model) for run in own_runs('gpu')} == {
        (size, model) for size in ('3.06m', '10.4m') for model in reproduce.EVERY_SIZE}


@pytest.mark.parametrize('bad', [
    'fig_none', '--seeds=', '--sizes=86m', '--jobs=0', '--scale=huge',
    'fig_attn --scale=gpu'])
def test_bad_options(bad: str, here: Path) -> None:
    with pytest.raises(SystemExit) as error:
        reproduce.main(['fig_attn', *bad.split()])
    assert error.value.code not in (0, None) and '\n' not in str(error.value)


# What is drawn

def test_tables_of_the_published_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fresh clone figures and claims are there at once, and are those in results/ladder, which
    has of tables of figures fig_gap's alone."""
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / 'results', 'results')
    os.mkdir('data')
    monkeypatch.setattr(reproduce.subprocess, 'Popen', None)  # nothing is trained
    names = ['fig_gap', 'fig_attn', 'fig_lr', 'fig_kq_diag']
    reproduce.main([*names, 'claims'])
    written = {path.name for path in Path('out/results/ladder').iterdir()}
    assert written == {f'{name}.{end}' for name in names for end in ('md', 'png')} | {
        'claims.md', 'claims_validation.md'}
    for name in written - {f'{name}.md' for name in names[1:]}:
        new, old = (Path(of, 'ladder', name).read_bytes() for of in ('out/results', 'results'))
        if name.endswith('.png'):
            assert new[:4] == old[:4] == b'\x89PNG'
        else:
            assert new == old, name


# Its runs

def test_a_figure_from_nothing(here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny run that is really trained. The second time nothing is trained and the files are the
    same; a run that was cut off goes on."""
    shutil.rmtree('data')
    os.mkdir('data')
    text = '\n'.join(json.dumps({'text': f'{n} ' * 40}) for n in range(600))
    Path('data/text.jsonl').write_text(text)
    monkeypatch.setattr(sys, 'argv', ['reproduce.py'])
    prepare_slimpajama.main(['--input=data/text.jsonl', '--out_dir=data/corpus',
                             '--tokenizer=byte', '--held_out=0.01'])
    words = ['fig_tiny', '--sizes=s1', '--seeds=1', '--jobs=1']
    monkeypatch.setitem(FIGURES, 'fig_tiny', Figure('Tiny', draw_bars, {'': {'CEM': 'cem-2'}}))
    reproduce.main(words)

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path('out/results/ladder').iterdir()}

    first = files()
    assert set(first) == {'fig_tiny.md', 'fig_tiny.png'}
    result = read_result(FIRST)

    with monkeypatch.context() as patch:
        patch.setattr(reproduce.subprocess, 'Popen', None)
        reproduce.main(words)
    assert files() == first
    os.remove(f'{FIRST.folder}/result.json')
    capsys.readouterr()
    reproduce.main(words)
    assert f'1/1 {FIRST.folder}: test perplexity ' in capsys.readouterr().out
    assert read_result(FIRST) | {'seconds': 0} == result | {'seconds': 0} and files() == first


def test_failed_runs_are_named_and_the_rest_goes_on(
    here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(run: Run) -> list[str]:
        if 'none' in run.model:
            return [sys.executable, '-c', 'raise SystemExit("the disk is on fire")']
        pretend(run)
        return [sys.executable, '-c', '']

    monkeypatch.setattr(reproduce, 'command', command)
    for runs in (6, 2):  # the second time only those that failed are tried
        with pytest.raises(SystemExit, match='2 runs failed; they are named above'):
            reproduce.main(['fig_attn', '--seeds=1', '--jobs=2'])
        printed = capsys.readouterr().out
        assert printed.count('FAILED: the disk is on fire') == 2 and f'\n{runs}/{runs} ' in printed
        assert 'fig_attn: 4 of 6 cells' in printed and 'ladder/fig_attn.md' in printed


def test_a_finished_run(here: Path) -> None:
    """Counts if it has all numbers, and was made with today's options."""
    assert read_result(FIRST) is None
    for value in (None, 5.0):  # where every step was skipped it is null
        pretend(FIRST, value)
        assert (read_result(FIRST) is None) == (value is None)
    config = Path(FIRST.folder, 'config.json')
    config.write_text(config.read_text().replace('"batch_size": 8', '"batch_size": 4'))
    with pytest.raises(SystemExit, match='another batch_size: remove it'):
        reproduce.main(['claims'])
    for name in ('result.json', 'config.json'):
        pretend(FIRST)
        Path(FIRST.folder, name).write_text('{"half')
        with pytest.raises(SystemExit, match=name) as error:
            reproduce.main(['claims'])
        assert '\n' not in str(error.value)


def test_asked_to_stop_it_asks_its_runs_to(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM: its run ends with its checkpoint, which takes a while, and then it says so."""
    child = ('import pathlib, signal, sys, time\n'
             'def stop(*of):\n    time.sleep(0.5)\n    pathlib.Path("written").touch()\n'
             '    sys.exit(75)\n'
             'signal.signal(signal.SIGTERM, stop)\npathlib.Path("begun").touch()\ntime.sleep(60)')
    monkeypatch.setattr(reproduce, 'command', lambda run: [sys.executable, '-c', child])

    def ask() -> None:
        while not os.path.exists('begun'):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    with pytest.raises(SystemExit, match='stopped; the same command goes on'):
        reproduce.main(['fig_kq_diag', '--sizes=s1', '--seeds=1,2,3', '--jobs=1'])
    assert os.path.exists('written')
