"""reproduce.py: its plan, the published verdicts, and a tiny ladder from nothing."""
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import ROOT

import reproduce
from model import Transformer
from nanocem.compute import flops_per_token
from reproduce import KINDS, MODELS, SIZES, Estimate, configs, line_through, planned, verdict


def test_the_published_runs_are_those_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shape of today's models; sizes are named by the weights of Llama's blocks."""
    monkeypatch.chdir(ROOT)
    published = reproduce.read_results('ladder', anew=False)
    assert set(published) == set(planned('ladder'))
    for run in {(run.size, run.model): run for run in published}.values():
        train, cfg = configs(run.options)
        with torch.device('meta'):
            model, llama = Transformer(cfg), Transformer(cfg.llama())
        row, tokens = published[run], train.tokens_per_param * llama.num_params()
        assert (row['parameters'], row['steps']) == (model.num_params(), math.ceil(tokens / 2048))
        assert row['flops_per_token'] == pytest.approx(flops_per_token(model), rel=1e-9), run
        weights = sum(p.numel() for p in llama.blocks.parameters())
        assert weights == pytest.approx(float(run.size.replace('k', 'e3').replace('m', 'e6')), 0.01)


def test_the_published_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / 'results', 'results')
    reproduce.main([])
    for split in ('test', 'val'):
        name = f'ladder/claims_{split}.md'
        assert Path('out/results', name).read_text() == Path('results', name).read_text()
    assert len(list(Path('out/results/ladder').glob('*.png'))) == len(reproduce.FIGURES)


def test_a_line_and_what_is_said_of_it() -> None:
    line, slope = line_through([1e5, 1e5, 1e6, 1e6], [0.09, 0.11, 0.19, 0.21])
    assert line.value == pytest.approx(0.2) and slope.value == pytest.approx(0.1)
    one, _ = line_through([1e5] * 3, [0.01, 0.02, 0.03])
    assert one.interval() == pytest.approx((-0.00484, 0.04484), abs=1e-4)  # the paired t-test's
    for kind, (least, most) in KINDS.items():
        inside = max(least, -0.5) / 2 + min(most, 0.5) / 2
        assert verdict(kind, Estimate(inside, 1e-4, 9)) == 'holds'
        assert verdict(kind, Estimate(inside, 9.0, 9)) == 'within noise'
        outside = most + 0.1 if most < math.inf else least - 0.1
        assert verdict(kind, Estimate(outside, 1e-4, 9)) == 'does not hold'


def test_commands_of_all_scales(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for scale, n in (('gpu', 2 * 10), ('paper', 5 * len(MODELS))):
        lines = [reproduce.command(run) for run in planned(scale)]
        assert len(set(lines)) == n and all('--seed=1' in line for line in lines)


def test_a_ladder_from_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A printed command trains its run, and what it leaves is read."""
    monkeypatch.chdir(tmp_path)
    tiny = ('config/ladder.py --n_layer=1 --d_model=16 --n_head=1 --d_mlp=24 --context_length=16 '
            '--tokens_per_param=0.1 --data=data/builtin --eval_tokens=500 --test_tokens=500')
    monkeypatch.setitem(SIZES, 'ladder', {'s1': tiny})
    run = next(run for run in planned('ladder') if run.model == 'cem-2')
    line = reproduce.command(run).replace('python train.py', f'{sys.executable} {ROOT}/train.py')
    subprocess.run(line, shell=True, check=True, capture_output=True)
    (found,) = reproduce.read_results('ladder', anew=True).items()
    assert found[0] == run and found[1]['test_perplexity'] < 300
    assert '--init_from=resume' in reproduce.command(run)
    Path(run.folder, 'result.json').write_text(json.dumps({'test_perplexity': None}))
    assert not reproduce.read_results('ladder', anew=True)
