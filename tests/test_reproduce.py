"""reproduce.py: its tables of runs, its plan, and a tiny ladder from nothing. Seeds: 1."""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

import reproduce
from nanocem import corpus, ladder, records
from nanocem.figures import FIGURES, look_inside
from nanocem.ladder import FAMILIES, MODELS, SCALES, Task, canonical
from reproduce import cells_of, choose_rates, cost, finished, stages, sweep, wanted

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TINY = ('config/ladder.py --n_layer={n} --d_model=16 --n_head=1 --d_mlp=24 --context_length=16 '
        '--tokens_per_param=0.1 --batch_size=8 --micro_batch_size=8 --eval_tokens=500 '
        '--test_tokens=500')


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder with the project's files in it."""
    for name in os.listdir(ROOT):
        if name.endswith('.py') or name in ('config', 'nanocem', 'requirements.txt'):
            os.symlink(os.path.join(ROOT, name), tmp_path / name)
    (tmp_path / 'README.md').write_text('<!-- claims -->\n<!-- /claims -->\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, 'FAILED', set())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def text(here):
    """A tiny data/corpus."""
    os.makedirs('data')
    lines = [json.dumps({'text': f'{n} ' * 40}) for n in range(600)]
    (here / 'data/corpus.jsonl').write_text('\n'.join(lines))
    corpus.make_corpus()
    return here


def use(monkeypatch, sizes=2, **more):
    """The ladder with so many tiny sizes."""
    tiny = {f's{n}': TINY.format(n=n) for n in range(1, sizes + 1)}
    swept = {size: tiny[size] for size in list(tiny)[:2]}
    more = {'sizes': tiny, 'sweep_sizes': swept, 'seeds': (1, 2), **more}
    scale = replace(SCALES['ladder'], **more)
    monkeypatch.setitem(SCALES, 'ladder', scale)
    return scale


def pretend(task, perplexity, **more):
    """Files as a finished run leaves them."""
    os.makedirs(task.folder, exist_ok=True)
    train, model = map(asdict, reproduce.configs(task.options))
    tokens = int(cost(task.shape).tokens)
    result = {'test_perplexity': perplexity, 'val_perplexity': perplexity, 'parameters': 10,
              'tokens': tokens, 'flops_per_token': cost(task.shape).flops / cost(task.shape).tokens,
              'steps': 10, 'seconds': 2.0, **more}
    for name, content in (('result', result), ('config', {'train': train, 'model': model})):
        with open(f'{task.folder}/{name}.json', 'w', encoding='utf-8') as file:
            json.dump(content, file)
    with open(f'{task.folder}/log.jsonl', 'w', encoding='utf-8') as file:
        file.write('{"step": 10, "tokens": 10, "loss": 2.0, "lr": 0.1}\n' * 12)


def likely(task):
    """A perplexity for a made-up run: the best rate is 0.01 and a little more for CEM."""
    best = 0.01 if task.model == 'llama' else 0.012
    gap = 0.02 * (MODELS[task.model].family != 'llama') + 0.001 * task.seed
    return round(5 * math.exp(gap + 0.1 * math.log(task.rate / best) ** 2), 4)


def pretend_all(monkeypatch):
    """Runs are made up instead of trained; returns those that were asked for."""
    asked = []

    def run(commands, jobs, quiet):
        for task in commands:
            asked.append(task)
            pretend(task, likely(task))
            yield task, None

    monkeypatch.setattr(reproduce, 'run_side_by_side', run)
    monkeypatch.setattr(reproduce, 'make_corpus', lambda: None)
    monkeypatch.setattr('nanocem.claims.DRAWS', 3)
    monkeypatch.setattr('nanocem.figures.look_inside', lambda out_dir: {
        'trained_steps': 2, **{k: [2.0] * 8 for k in ('perplexity', 'energy')},
        'attn': [[1.0] * 9], 'mlp': [[1.0] * 9]})
    return asked


@pytest.mark.parametrize('scale', ['ladder', 'paper'])
def test_runs_are_valid(scale, here):
    """Every run of every figure builds both configs; no two cells of a figure have one name."""
    plan = stages(SCALES[scale])
    for name in [name for name in FIGURES if scale in FIGURES[name].scales]:
        cells = cells_of(name, SCALES[scale], plan)
        assert len({key[:3] for key in cells}) == len(cells)
        sizes = SCALES[scale].sweep_sizes if name == 'fig_lr' else SCALES[scale].sizes
        drawn = {size: {model for of, *_, model in cells if of == size} for size, *_ in cells}
        variants = set().union(*drawn.values()) - {*FAMILIES, 'llama-alibi'}
        if scale == 'ladder' and variants:  # two sizes, a few three: no panel is without one
            assert all(models & variants for models in drawn.values())
            sizes = ['83k', '195k', *['387k'] * bool(variants & set(ladder.THIRD_SIZE))]
        assert set(drawn) == set(sizes)
        for tasks in cells.values():
            of = cost(tasks[0].shape)
            assert of.disk > 0 and of.tokens >= 10 * 100_000 and of.flops > 6 * of.tokens
            assert sum(of.weights.values()) > 50_000


def test_the_ladders_sizes(here):
    """The names are the weights of Llama's blocks, and heads are 16 wide."""
    for scale, size in [(SCALES[name], size) for name in ('ladder', 'gpu')
                        for size in SCALES[name].sizes]:
        name = float(size.replace('k', 'e3').replace('m', 'e6'))
        assert reproduce.weights_at(scale, size) == pytest.approx(name, rel=0.01)
        cfg = reproduce.configs(scale.sizes[size])[1]
        assert cfg.d_model == 16 * cfg.n_head == 16 * cfg.n_layer and cfg.context_length == 128


def test_every_model_is_drawn_or_asked():
    """Nothing is trained for nothing."""
    from nanocem.claims import CLAIMS
    drawn = {m for figure in FIGURES.values() for of in figure.groups.values() for m in of.values()}
    asked = {m for _, tests in CLAIMS.values() for test in tests for m in (test.A, test.B)}
    assert set(MODELS) == (drawn | asked) - {''}


def test_canonical():
    assert canonical('config/a.py --x=1 --y=2 --x=3') == 'config/a.py --x=3 --y=2'


def test_the_256m_sweep_is_at_the_papers_scale_only(here):
    plan = stages(SCALES['paper'])
    assert '256m' in {key[0] for key in cells_of('fig_lr', SCALES['paper'], plan)}
    assert '256m' not in {key[0] for key in cells_of('fig_attn', SCALES['paper'], plan)}


def test_a_sweep_goes_on_past_its_edges(here, monkeypatch):
    """Best at the lowest rate: one lower is tried, and so on; a run that failed counts as worst."""
    scale = use(monkeypatch)

    def rates():
        return [task.rate for task in sweep(scale, 's1', 'llama', 1)]

    def do(rate, perplexity):
        pretend(Task('ladder', 's1', 'llama', rate, 1), perplexity)

    assert rates() == [0.004, 0.008, 0.016]
    for rate, perplexity in ((0.004, 3.0), (0.008, 4.0)):
        do(rate, perplexity)
    assert rates() == [0.004, 0.008, 0.016]  # one is still to come
    reproduce.FAILED.add(Task('ladder', 's1', 'llama', 0.016, 1))
    assert rates() == [0.002, 0.004, 0.008, 0.016]
    do(0.002, 2.5)
    assert rates()[0] == 0.001
    do(0.001, 2.7)
    assert rates() == [0.001, 0.002, 0.004, 0.008, 0.016]  # bracketed


def test_rates_are_chosen_and_carried(here, monkeypatch):
    """From made-up sweeps with the optimum at 0.01 at one size and 0.008 at the next."""
    scale = use(monkeypatch, sizes=3)
    for size, best in (('s1', 0.01), ('s2', 0.008)):
        for family in FAMILIES:
            for rate in (0.004, 0.008, 0.016):
                perplexity = 5 * math.exp(0.1 * math.log(rate / best) ** 2)
                pretend(Task('ladder', size, family, rate, 1), perplexity)
    chosen = choose_rates(scale)
    for family in FAMILIES:
        assert chosen['best'][family] == pytest.approx([0.01, 0.008], rel=0.03)
        rates = chosen['rates'][family]
        N = [reproduce.weights_at(scale, size) for size in scale.sizes]
        right = 0.008 * (N[2] / N[1]) ** -chosen['exponent']
        assert rates['s3'] == pytest.approx(right, rel=0.05) and rates['s3'] < rates['s2']


def test_the_plan_begins_with_what_tells_most(here):
    """The sweep, then three sizes with three seeds and the variants, then what takes hours."""
    plan = stages(SCALES['ladder'])
    assert {task.size for task in plan[0].tasks} == {'83k', '195k'}
    assert {task.seed for task in plan[1].tasks} == {1}
    small, large = list(SCALES['ladder'].sizes)[:3], list(SCALES['ladder'].sizes)[3:]
    for stages_of, sizes, seeds in ((plan[1:4], small, (1, 2, 3)), (plan[6:8], large, (1,))):
        models = FAMILIES + (ladder.CONTROL if sizes == large else [])
        assert {(t.size, t.model, t.seed) for stage in stages_of for t in stage.tasks} == {
            (size, model, seed) for size in sizes for model in models for seed in seeds}
    variants = [{(t.size, t.model, t.seed) for t in stage.tasks} for stage in plan[4:6]]
    for at, models, sizes in ((0, ladder.VARIANTS, small[:2]), (1, ladder.THIRD_SIZE, small[2:])):
        assert variants[at] == {(size, model, seed) for size in sizes for model in models
                                for seed in (1, 2, 3)}
    main = [task for stage in plan[1:] for task in stage.tasks
            if task.model in FAMILIES + ladder.CONTROL]
    for size in SCALES['ladder'].sizes:  # three seeds of everything in the end
        assert {(t.model, t.seed) for t in main if t.size == size} >= {
            (model, seed) for model in FAMILIES + ladder.CONTROL for seed in (1, 2, 3)}
    figure = wanted(['fig_kq_diag'], SCALES['ladder'])
    assert {t.model for stage in figure for t in stage.tasks} == {
        'llama', 'attn-1-diag', 'attn-1-diag-nodiag', 'attn-1-diag-perhead'}
    other = wanted(['fig_lr'], replace(SCALES['ladder'], seeds=(2,)))
    assert {(t.seed, t.rate) for stage in other for t in stage.tasks} == {
        (2, rate) for rate in SCALES['ladder'].rates}


def test_the_plan_counts_hours(here, capsys):
    reproduce.main(['ladder', '--plan', '--jobs=2'])
    printed = capsys.readouterr().out
    rows = [line.split('|') for line in printed.splitlines() if line.startswith('| ')][1:]
    assert len(rows) == len(stages(SCALES['ladder']))
    hours = sum(float(row[6]) for row in rows)
    assert float(rows[-1][7]) == pytest.approx(hours, abs=0.8)  # each row is rounded
    last = printed.splitlines()[-1]
    assert last.endswith('take longer.') and 'with 2 runs side by side' in last
    assert float(last.split()[0]) == pytest.approx(float(rows[-1][7]) / 2, abs=0.1)


def test_everything_in_the_plans_order(here, monkeypatch, capsys):
    """The whole ladder with made-up runs: sweeps first, rates chosen, each run once; the tables
    stand in out/results and nothing in results/; the second time nothing is done."""
    scale = use(monkeypatch, sizes=3)
    asked = pretend_all(monkeypatch)
    monkeypatch.setattr(reproduce, 'figure_files', lambda figure, cells: dict.fromkeys(
        ('png', 'csv', 'md'), figure.title.encode()))
    reproduce.main(['ladder', '--jobs=1'])
    assert len(asked) == len(set(asked))
    assert {task for stage in stages(scale) for task in stage.tasks} == set(asked)
    swept = set(reproduce.all_sweeps(scale, 1, FAMILIES))
    assert set(asked[:len(swept)]) == swept
    made = set(os.listdir('out/results/ladder'))
    assert {'claims.md', 'claims_validation.md', 'ladder.md', 'rates.json'} <= made
    assert {f'{name}.{end}' for name in FIGURES for end in ('png', 'csv', 'md')} <= made
    assert not os.path.exists('results')
    table = (here / 'out/results/ladder/ladder.md').read_text()
    assert f'{len(set(asked))} runs, {2 * len(set(asked)) / 3600:.1f} hours' in table
    claims = (here / 'out/results/ladder/claims.md').read_text()
    assert claims.count('not run') == 1  # the Gaussian-process table
    assert '+2.0%' in claims  # the made-up gap to Llama

    asked.clear()
    capsys.readouterr()
    reproduce.main(['ladder', '--publish'])
    assert not asked
    printed = capsys.readouterr().out  # drawn once, not after every stage
    assert printed.count('\nout/results/ladder/fig_ladder: ') == 1
    assert set(os.listdir('results/ladder')) == made | {'runs.csv'}
    text = (here / 'README.md').read_text()
    assert '| a | CEM attention, T = 1' in text


@pytest.mark.parametrize('name', FIGURES)
def test_every_figure_is_drawn(name, here, monkeypatch):
    """From made-up runs: a picture, a csv with a line a seed, a table with a line a cell."""
    scale = use(monkeypatch, rate=0.004, seeds=(1, 2))
    pretend_all(monkeypatch)
    plan = stages(scale)
    cells = cells_of(name, scale, plan)
    for tasks in cells.values():
        for task in tasks:
            pretend(task, likely(task))
    found = reproduce.look(task for stage in plan for task in stage.tasks)
    reproduce.write_figure(name, cells, found, 'out', whole=True)
    with open(f'out/{name}.png', 'rb') as file:
        assert file.read(4) == b'\x89PNG'
    with open(f'out/{name}.csv', encoding='utf-8') as file:
        assert len(file.readlines()) == 1 + sum(map(len, cells.values()))
    with open(f'out/{name}.md', encoding='utf-8') as file:
        assert len(file.readlines()) == 4 + len(cells)


def test_publish_takes_finished_stages_only(here, monkeypatch, capsys):
    """Half of the further seeds are there: what is published is the first seed's at three sizes,
    and the pictures that want no more."""
    scale = use(monkeypatch, sizes=4)
    pretend_all(monkeypatch)
    reproduce.settle_rates(scale, 1)
    plan = stages(scale)
    for task in [*plan[1].tasks, *plan[2].tasks[::2]]:
        pretend(task, likely(task))
    reproduce.main(['claims', '--publish'])
    said = 'finished stages: the sweep; three smallest sizes, first seed\n'
    assert said in capsys.readouterr().out
    published = (here / 'results/ladder/ladder.md').read_text()
    inside = (here / 'out/results/ladder/ladder.md').read_text()
    assert '; 1 |' in published and '; 2 |' not in published and '; 2 |' in inside
    drawn = [name for name in FIGURES if os.path.exists(f'results/ladder/{name}.png')]
    assert drawn == ['fig_ladder', 'fig_lr', 'fig_energy']
    reproduce.main(['claims', '--sizes=s4'])
    assert 'fig_lr: not written to out/results/ladder, none of its' in capsys.readouterr().out
    for option in ('--seeds=1', '--sizes=s1'):
        with pytest.raises(SystemExit, match='publish writes whole tables'):
            reproduce.main(['claims', '--publish', option])


def test_going_on_from_what_is_published(here, monkeypatch, capsys):
    """On a machine without the runs' folders: none is done again, tables and pictures are the same,
    those that want logs or weights stay; runs of unfinished stages and spikes are kept too."""
    scale = use(monkeypatch, sizes=3)
    asked = pretend_all(monkeypatch)

    def train(*options):  # without the pictures after every stage
        with monkeypatch.context() as undrawn:
            undrawn.setattr(reproduce, 'write_out', lambda *given, **options: None)
            reproduce.main(['ladder', *options])

    train()
    last = [task for task in reproduce.stages(scale)[3].tasks if task.model == 'cem-2'][-1]
    result = json.loads((here / last.folder / 'result.json').read_text())
    result['test_perplexity'] += 4.9e-5  # the tables are of what runs.csv keeps, four decimals
    (here / last.folder / 'result.json').write_text(json.dumps(result))
    with open(f'{last.folder}/log.jsonl', 'a', encoding='utf-8') as file:
        file.write('{"step": 5, "event": "spike"}\n')
    reproduce.main(['claims', '--publish'])
    before = {name: (here / 'results/ladder' / name).read_bytes()
              for name in os.listdir('results/ladder')}
    assert '1 in ' in before['claims.md'].decode()
    assert all(f'{name}.png' in before for name in FIGURES)

    shutil.rmtree('out')
    asked.clear()
    reproduce.main(['ladder', '--from_published', '--publish'])
    assert not asked
    printed = capsys.readouterr().out
    for name in ('fig_test_T', 'fig_energy', 'fig_curves'):
        assert f'{name}: results/ladder keeps the one it has' in printed
    after = {name: (here / 'results/ladder' / name).read_bytes()
             for name in os.listdir('results/ladder')}
    assert after == before

    # without the option it is trained anew, and what is published is not lost
    train('--seeds=1')
    assert asked
    with pytest.raises(SystemExit, match='runs that are not here: --from_published keeps them'):
        reproduce.main(['claims', '--publish'])
    assert (here / 'results/ladder/runs.csv').read_bytes() == before['runs.csv']


@pytest.mark.parametrize(('old', 'new', 'message'), [
    (',llama,', ',lama,', 'runs.csv, line 2 is damaged'),
    (',528,', ',,', 'runs.csv, line 2 is damaged'),
    (',683136.0,', ',683137.0,', 'has llama at 83k in another shape')])
def test_damaged_records(old, new, message, here):
    os.makedirs('results/ladder')
    columns = ','.join(records.COLUMNS)
    line = '83k,llama,0.014,1,107952,1081344,683136.0,528,,6.7058,float32,,'
    with pytest.raises(SystemExit, match='no runs are published there'):
        reproduce.main(['fig_attn', '--from_published'])
    with open('results/ladder/runs.csv', 'w', encoding='utf-8') as file:
        file.write(f'{columns}\n{line.replace(old, new)}\n')
    with pytest.raises(SystemExit, match=message):
        reproduce.main(['fig_attn', '--from_published'])


def test_nothing_is_published_from_little(here, monkeypatch, capsys):
    """Neither from nothing nor from the sweep alone."""
    scale = use(monkeypatch)
    pretend_all(monkeypatch)
    for settle in (lambda: None, lambda: reproduce.settle_rates(scale, 1)):
        settle()
        reproduce.main(['claims', '--publish'])
        assert 'nothing is published' in capsys.readouterr().out
        assert not os.path.exists('results')


def test_finished_runs_are_skipped_and_failed_ones_named(here, monkeypatch, capsys):
    scale = use(monkeypatch)
    asked = pretend_all(monkeypatch)
    reproduce.settle_rates(scale, 1)
    asked.clear()
    made_up = reproduce.run_side_by_side

    def run(commands, jobs, quiet):
        burning = [task for task in commands if 'none' in task.model]
        asked.extend(burning)
        yield from ((task, 'the disk is on fire') for task in burning)
        yield from made_up({t: of for t, of in commands.items() if t not in burning}, jobs, quiet)

    monkeypatch.setattr(reproduce, 'run_side_by_side', run)
    with pytest.raises(SystemExit, match='4 runs failed'):
        reproduce.main(['fig_attn', '--jobs=1'])
    printed = capsys.readouterr().out
    assert printed.count('FAILED: the disk is on fire') == 4 and 'test perplexity 5.0' in printed
    table = (here / 'out/results/ladder/fig_attn.md').read_text()
    assert '| Llama |' in table and '| CEM attention |' not in table  # the rest went on
    asked.clear()
    reproduce.FAILED.clear()
    with pytest.raises(SystemExit, match='4 runs failed'):
        reproduce.main(['fig_attn', '--jobs=1'])
    assert len(asked) == 4 and all('none' in task.model for task in asked)

    (task,) = reproduce.own_runs(scale, ['llama'], ['s1'], [1])
    config = here / task.folder / 'config.json'
    config.write_text(config.read_text().replace('"batch_size": 8', '"batch_size": 4'))
    with pytest.raises(SystemExit, match='another batch_size: remove it'):
        reproduce.main(['fig_attn'])
    os.remove(here / task.folder / 'result.json')
    with pytest.raises(SystemExit, match='another batch_size: remove it'):  # nor is it taken on
        reproduce.main(['fig_attn'])


@pytest.mark.parametrize('damage', ['result.json', 'config.json', 'rates.json'])
def test_damaged_files_are_named(damage, here, monkeypatch):
    scale = use(monkeypatch)
    pretend_all(monkeypatch)
    reproduce.settle_rates(scale, 1)
    (task,) = reproduce.own_runs(scale, ['llama'], ['s1'], [1])
    pretend(task, 5.0)
    path = f'out/results/ladder/{damage}' if damage == 'rates.json' else f'{task.folder}/{damage}'
    with open(path, 'w', encoding='utf-8') as file:
        file.write('{"half')
    with pytest.raises(SystemExit, match=damage) as error:
        reproduce.main(['claims'])
    assert '\n' not in str(error.value)


def test_a_result_without_a_number_is_none(here, monkeypatch):
    """A run whose every step was skipped leaves null where its perplexity would be."""
    use(monkeypatch)
    task = Task('ladder', 's1', 'llama', 0.004, 1)
    for value in (None, math.nan, math.inf):
        pretend(task, value)
        assert finished(task) is None
    pretend(task, 5.0)
    assert finished(task)['test_perplexity'] == 5.0


@pytest.mark.parametrize('bad', [
    'fig_none', '--seeds=', '--seeds=1,1', '--sizes=83k,83k', '--jobs=0', '--sizes=86m',
    '--scale=huge', 'fig_tokens --scale=paper', '--publish --seeds=1'])
def test_bad_options(bad, here):
    with pytest.raises(SystemExit) as error:
        reproduce.main(['fig_attn', *bad.split()])
    assert error.value.code not in (0, None) and '\n' not in str(error.value)


def test_the_papers_plan(here, capsys):
    reproduce.main(['fig_attn', 'fig_energy', '--scale=paper', '--sizes=86m'])
    printed = capsys.readouterr().out.splitlines()
    start = 'torchrun --nproc_per_node=8 train.py --size=86m'
    assert len([line for line in printed if line.startswith(start)]) == 4
    scale = replace(SCALES['paper'], only=('86m',))
    plan = stages(scale)
    tasks = {t for name in ('fig_attn', 'fig_energy')
             for of in cells_of(name, scale, plan).values() for t in of}
    flops = sum(cost(task.shape).flops for task in tasks)
    (total,) = [line for line in printed if line.startswith('| all |')]
    assert f'| {flops:.2e} | {flops / 0.4 / 312e12 / 3600:,.0f} |' in total
    reproduce.main(['fig_attn', 'fig_energy', '--scale=paper', '--sizes=86m', '--plan'])
    printed = capsys.readouterr().out  # in an A100's hours, not in a CPU core's
    last = [line for line in printed.splitlines() if line.startswith('| ')][-1]
    assert '| GPU-hours | so far |' in printed
    assert last.endswith(f'| {flops / 0.4 / 312e12 / 3600:,.1f} |')


def test_a_closed_pipe_ends_in_silence(here):
    """python reproduce.py --list | head -1"""
    command = f'{sys.executable} reproduce.py --list | head -1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith('fig_ladder: ') and done.stderr == ''


def test_the_claims_on_a_gpu(here, monkeypatch, capsys):
    """Every family and the control at both sizes, once; and then the claims that these answer."""
    asked = pretend_all(monkeypatch)
    for _ in range(2):
        reproduce.main(['ladder', '--scale=gpu', '--run'])
        models = {(size, model) for size in ('3.06m', '10.4m')
                  for model in [*FAMILIES, 'llama-alibi']}
        assert len(asked) == 20 and {(task.size, task.model) for task in asked} == models
        assert '| a |' in capsys.readouterr().out
        page = (here / 'out/results/gpu/ladder.md').read_text()
        assert all(f'| {family} |' in page for family in FAMILIES)


def test_a_figure_from_nothing(text, monkeypatch):
    """A tiny run, its energies, picture and tables; the second time nothing is trained and the
    files are the same; trained anew, the numbers are the same to the last digit."""
    scale = use(monkeypatch, sizes=1, seeds=(1,), rate=0.004)
    argv = ['fig_energy', '--jobs=1']
    reproduce.main(argv)

    def files():
        return {path.name: path.read_bytes() for path in (text / 'out/results/ladder').iterdir()}

    first = files()
    assert set(first) == {f'{n}.{end}' for n in argv[:1] for end in ('png', 'csv', 'md')}
    run = reproduce.run_side_by_side
    monkeypatch.setattr(reproduce, 'run_side_by_side', lambda *_: pytest.fail('trained again'))
    reproduce.main(argv)
    assert files() == first
    (task,) = reproduce.own_runs(scale, ['cem-2'], ['s1'], [1])
    inside = look_inside(task.folder)
    assert len(inside['attn']) == len(inside['mlp']) == 1 and len(inside['mlp'][0]) == 9
    assert inside['mlp'][0][1] < inside['mlp'][0][0]  # the first step goes down

    os.rename('out/reproduce', 'out/before')
    monkeypatch.setattr(reproduce, 'run_side_by_side', run)
    reproduce.main(argv)
    assert files() == first


def test_asked_to_stop_its_runs_write_checkpoints(text, monkeypatch):
    """SIGTERM to reproduce.py: its runs stop with a checkpoint, it says so, and goes on later."""
    code = ('import sys, reproduce; from dataclasses import replace; '
            'from nanocem.ladder import SCALES; '
            f'tiny = {{"s1": {TINY.format(n=1)!r} + " --tokens_per_param=400"}}; '
            'SCALES["ladder"] = replace(SCALES["ladder"], sizes=tiny, sweep_sizes=tiny, '
            'seeds=(1,), rate=0.004); sys.argv[0] = "reproduce.py"; '
            'reproduce.main(["fig_energy", "--jobs=1"])')
    program = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    folder = text / 'out/reproduce/ladder/s1/cem-2_rate=0.004_seed=1'
    log = folder / 'log.jsonl'
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    program.send_signal(signal.SIGTERM)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 1
    assert err.strip() == 'reproduce.py: stopped; the same command goes on'
    assert list(folder.glob('step_*.pt'))


def test_the_corpus_is_gathered_in_order(here, monkeypatch, tmp_path):
    """Each content once, no byte code, in an order that a second look repeats."""
    paths = []
    for name, content in (('b.py', 'same'), ('a.py', 'same'), ('c.md', 'english'), ('d.txt', ' '),
                          ('e.py', b'\xff\xfe')):
        path = tmp_path / f'x_{name}'
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append((name, str(path)))
    monkeypatch.setattr(corpus, 'library_files', lambda: iter(paths[:3]))
    monkeypatch.setattr(corpus, 'package_files', lambda requirements: iter(paths[3:]))
    assert corpus.write_documents('one') == len('sameenglish')
    with open('one', encoding='utf-8') as file:
        assert [json.loads(line)['name'] for line in file] == ['b.py', 'c.md']


def test_the_corpus_is_of_the_pinned_packages(here):
    """Names are sorted, files are there, and a package that is not installed is named."""
    (here / 'pins').write_text('tqdm==1\n# a comment\n')
    found = list(corpus.package_files('pins'))
    names = [name for name, _ in found]
    assert names == sorted(names) and any(name.endswith('/std.py') for name in names)
    assert all(os.path.isfile(path) for _, path in found)
    (here / 'pins').write_text('no-such-package-here==1\n')
    with pytest.raises(SystemExit, match='no-such-package-here is not installed'):
        list(corpus.package_files('pins'))
