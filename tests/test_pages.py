"""results/pages.py: the pages' tables and numbers are those of the CSVs, and verdicts stand in
tables alone."""
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

import evaluate
import pages
from nanocem.files import read_csv
from results.gradient import tables as gradient
from results.ties import tables as ties
from results.tokens import verdicts
from running import ROOT
from study import RESULTS, counting_runs

VERDICTS = r'\b(hold|holds|does not hold|undecided|level|close to|better|matches|as good)\b'
INTERVAL = r'[-+]?[.\d]+%? \([-+][.\d]+ to [-+][.\d]+\)'
STUDIES = 'tokens', 'copies', 'gradient', 'ties'


def prose(page: str) -> str:
    """Return a page without its written tables and code, and with each paragraph in one line."""
    text = (ROOT / page).read_text(encoding='utf-8')
    text = re.sub(r'```.*?```', '', pages.BLOCK.sub('', text), flags=re.DOTALL)
    text = re.sub(r'^    .*\n', '', text, flags=re.MULTILINE)
    return re.sub(r'\]\([^)]*\)', ']', re.sub(r'\n\s*(?=\S)(?![-#*!|])', ' ', text))


def section(page: str, title: str) -> str:
    return prose(page).partition(f'## {title}')[2].partition('\n## ')[0]


@pytest.mark.parametrize('page', pages.PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_the_csvs(page: Path) -> None:
    """`python results/pages.py` would change nothing."""
    text = page.read_text(encoding='utf-8')
    assert pages.with_tables(text) == text


def test_each_table_stands_on_a_page_and_a_changed_number_is_written_again() -> None:
    text = ''.join(page.read_text(encoding='utf-8') for page in pages.PAGES)
    assert sorted(name for _, name, _ in pages.BLOCK.findall(text)) == sorted(pages.TABLES)
    for block in pages.BLOCK.finditer(text):
        number = re.search(r'\d\.\d', block[0]) or re.search(r'[-+]?\d+', block[0])
        changed = block[0].replace(number[0], '8.8')
        assert changed != block[0] and pages.with_tables(changed) == block[0]


def runs_at_S() -> list[dict[str, str]]:
    """Return the runs of the three studies that count, without ablations."""
    folders = [RESULTS / study for study in ('copies', 'gradient', 'ties')]
    return [run for run in counting_runs(*folders) if run['size'] == 'S' and not run['variant']]


def test_the_front_page_has_the_means_of_the_runs() -> None:
    """Bits per byte are of both splits, which are counted by their bytes."""
    size = {row['split']: int(row['bytes']) for row in read_csv(f'{RESULTS}/tokens/text.csv')}
    runs, of_ties = runs_at_S(), read_csv(f'{RESULTS}/ties/runs.csv')
    found = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
             for cells in (line.split('|') for line in pages.front().splitlines()[2:])}
    llama = [run for run in runs if run['model'] == pages.LLAMA]
    for model, label in pages.TIES.items():
        of_model = [run for run in runs if run['model'] == model]
        assert of_model, label
        bits = statistics.fmean(
            sum(float(run[f'{split}_bits_per_byte']) * n for split, n in size.items())
            / sum(size.values()) for run in of_model)
        flops, bits_per_byte, change, seeds, larger = found[label]
        parameters = int(of_model[0]['parameters']) / 1e6
        assert re.search(rf'\| {re.escape(label)} +\| {parameters:.3f} ', pages.ties())
        assert f'{parameters:.2f}' == '0.72'  # as the front page says of all
        ratio = float(of_model[0]['flops_per_token']) / float(llama[0]['flops_per_token'])
        assert flops == f'{ratio:.2f}'
        assert bits_per_byte == f'{bits:.3f}' and seeds == str(len(of_model))
        y = {run['seed']: float(run['y']) for run in llama}
        d = [float(run['y']) - y[run['seed']] for run in of_model if run['seed'] in y]
        effect = 100 * math.expm1(statistics.fmean(d))
        shown = f'{round(effect, 1) + 0.0:+.1f}'  # never -0.0
        assert change.split(' (')[0] == ('0' if model == pages.LLAMA else shown)
        assert ('(' in change) == (len(d) > 1 and model != pages.LLAMA)
        # The last column is of size M, and of the seed that all its models have
        at_M = {row['model']: row for row in of_ties
                if (row['size'], row['seed']) == ('M', '1')}
        assert (larger != '') == (model in at_M), label
        if larger and model != pages.LLAMA:
            d_M = float(at_M[model]['y']) - float(at_M[pages.LLAMA]['y'])
            assert larger == f'{100 * math.expm1(d_M):+.1f}'
            assert f'{int(at_M[model]["parameters"]) / 1e6:.2f}' == '1.51'


def test_the_headline_is_the_effect_of_its_row() -> None:
    """Both pages say it in prose: another number of a CSV is wrong there."""
    effect = pages.effect('ties p1')
    expected = f'{-float(effect["effect_%"]):.1f}'
    assert effect['verdict'] == 'holds'
    larger = f'{-float(pages.effect("ties p1", "M")["effect_%"]):.1f}'
    found = re.findall(r'With our additions, perplexity falls by (\S+)% at 0.72 million '
                       r'parameters, and by (\S+)% at 1.51 million \(one seed\)',
                       prose('README.md'))
    assert found == [(expected, larger)]
    found = re.findall(r"lowers Llama's perplexity by (\S+)%", prose('results/README.md'))
    assert found == [expected]
    # Without the additions it is another one
    (row,) = [row for row in pages.ties_effects() if row['id'] == 'd12']
    for page in ('README.md', 'results/README.md'):
        found = re.findall(r"[Ww]ithout (?:our|the) additions, the first tie raises (?:Llama's )?"
                           r'perplexity by (\S+)%', prose(page))
        assert found == [pages.percent(row).split()[0].strip('+')], page


def test_the_other_ties_have_the_effects_of_their_rows() -> None:
    second, third = (pages.percent(pages.effect(f'ties {row}')) for row in ('p2', 'p3'))
    front, study = prose('README.md'), prose('results/README.md')
    assert re.findall(r'the second tie makes no clear difference, and the third raises perplexity '
                      r'by (\S+)%', front) == [third.split()[0].strip('+')]
    assert pages.effect('ties p2')['verdict'] == 'undecided'
    both = pages.percent(pages.over_llama('attn-1-three-wide'))
    assert re.findall(r'CEM attention\W+has the first two .*? It changes perplexity by (.*?\))',
                      front) == [both.replace(' ', '% ', 1)]
    assert re.findall(r"the second tie, W_O = W_Q, changes Llama's perplexity by (.*?\)), and the "
                      r'third, \S+ = \S+ by (.*?\))', study) == [tuple(each.replace(' ', '% ', 1)
                                                      for each in (second, third))]


def test_other_numbers_of_the_front_page() -> None:
    """Those of our additions: how much they help Llama, and what they do to its cache."""
    y = {(run['model'], run['seed']): float(run['y']) for run in runs_at_S()}

    def over(one: str, other: str, seeds: str) -> float:
        """Return by how many per cent one model's perplexity is above another's."""
        d = [y[one, seed] - y[other, seed] for seed in seeds]
        return 100 * math.expm1(statistics.fmean(d))

    seeds = ''.join(seed for model, seed in y if model == pages.LLAMA)
    assert re.findall(r"without which Llama's perplexity is (\d+)% higher", prose('README.md')) == [
        f'{over("llama-alibi", pages.LLAMA, seeds):.0f}']
    cache = {model: float(row['cache']) for (_, model), row in pages.copying('ties').items()}
    saved = [f'{100 - 100 * cache[model] / cache[pages.LLAMA]:.0f}'
             for model in ('llama-kv-three-wide-4-heads', 'llama-grouped-three-wide')]
    assert re.findall(r'The first tie makes the KV cache (\d+)% smaller, and grouped-query '
                      r'attention (\d+)%\.', prose('README.md')) == [tuple(saved)]
    # The first tie with seed 1, that of rows with one seed, and without its parameters
    tied = 'llama-kv-three-wide'
    of_seed_1 = over(tied, pages.LLAMA, '1')
    assert re.findall(r'it is (\S+)% below if they are moved, with the same seed',
                      prose('README.md')) == [f'{-of_seed_1:.1f}']
    assert re.findall(r'what the first tie does at this seed: (\S+)%',
                      prose('results/README.md')) == [f'{of_seed_1:.1f}']
    # The tie and the shift of the values, each with and without the other
    rows = {row['id']: row for row in pages.ties_effects() if row['size'] == 'S'}
    both = tuple(pages.percent(rows[name]).replace(' ', '% ', 1) for name in ('d15', 'd16'))
    for page in 'README.md', 'results/README.md':
        assert re.findall(r'shifting the values like the keys changes perplexity by (.*?\)), and '
                          r'the first tie then changes it by (.*?\))', prose(page)) == [both], page
    at_M = tuple(pages.percent(row) for row in pages.ties_effects()
                 if row['size'] == 'M' and row['id'] in ('d15', 'd16'))
    assert re.findall(r'These changes are (\S+)% and (\S+)% at 1.51 million',
                      prose('README.md')) == [at_M]
    shifted, unshifted = 'llama-alibi-three-shifted', 'llama-kv-three-wide-unshifted'
    lowered = [f'{-over(*pair, "123"):.1f}' for pair in (
        (shifted, pages.LLAMA), (tied, unshifted))]
    raised = [f'{over(*pair, "123"):.1f}' for pair in ((unshifted, pages.LLAMA), (tied, shifted))]
    for page in 'README.md', 'results/README.md':
        assert re.findall(r'values lower perplexity by (\S+)% without the tie and by (\S+)% with '
                          r'it', prose(page)) == [tuple(lowered)], page
        assert re.findall(r'The tie raises it by (\S+)% if values are not shifted, and by (\S+)% '
                          r'if they are', prose(page)) == [tuple(raised)], page
    found = rows['d9']
    parameters = int(pages.copying('ties')['S', found['A']]['parameters']) / 1e6
    expected = f'{parameters:.3f}', f'{-float(found["effect_%"]):.1f}'
    assert re.findall(r'at (\S+) million, perplexity is (\S+)% below that of the first row '
                      r'\(one seed;', prose('README.md')) == [expected]
    # CEM attention of Llama's width, at S and at L
    sizes = {row['model']: row for row in read_csv(f'{RESULTS}/tokens/size_l.csv')}
    small = pages.copying('copies')
    fewer = [f'{100 - 100 * pages.ratio(one, other, "parameters"):.0f}' for one, other in (
        (small['S', 'attn-1-none'], small['S', 'llama-alibi']),
        (sizes['attn-1-none'], sizes['llama-alibi']))]
    assert re.findall(r'with (\d+) to (\d+)% fewer parameters',
                      prose('README.md')) == [tuple(fewer)]


def test_the_command_of_the_front_page_prints_its_numbers(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """And pretrained/README.md says the same. The text has 13 pages."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / 'README.md').read_text(encoding='utf-8')
    (options,) = re.findall(r'python evaluate\.py (--compare=\S+) \\\n +(--text=\S+)', page)
    evaluate.main([*options, '--device=cpu'])
    found = re.findall(r'\| (\d\.\d{4}) +\|', capsys.readouterr().out)
    shown = re.findall(r'It prints (\S+) and (\S+) bits per byte', prose('README.md'))
    assert shown == [tuple(found)]
    assert f'prints {found[1]} and {found[0]} bits per byte' in prose('pretrained/README.md')
    text = (ROOT / options[1].partition('=')[2]).read_text(encoding='utf-8')
    assert len(text.splitlines()) == 13


def known_numbers() -> list[float]:
    """Return what the CSVs of the studies say: effects with the ends of their intervals, losses,
    and by how much runs of size L differ."""
    files = [*(f'{study}/effects' for study in STUDIES), 'ties/differences_found',
             *(f'{study}/copying' for study in STUDIES[1:]), 'copies/ablations',
             'gradient/counts', 'ties/counts']
    found = []
    for name in files:
        for row in read_csv(f'{RESULTS}/{name}.csv'):
            found += [float(cell) for key, cell in row.items()
                      if re.fullmatch(r'[-+]?[.\d]+', cell) and key not in ('size', 'model')]
    large = [(float(row['y']), int(row['parameters'])) for row in
             read_csv(f'{RESULTS}/tokens/size_l.csv')]
    found += [100 * math.expm1(y - other) for y, _ in large for other, _ in large]
    return found + [parameters / 1e6 for _, parameters in large]


def without_later_runs() -> str:
    """Return what a second step changes in all-CEM that copies, without the runs on a CPU, which
    came later and against the rule."""
    runs = [row for row in read_csv(f'{RESULTS}/copies/runs.csv')
            if not row['variant'] and row['device'] != 'CPU']
    kinds = {row['model']: row['noise'] for row in read_csv(f'{RESULTS}/copies/models.csv')}
    claims = read_csv(f'{RESULTS}/copies/verdicts.csv')
    kinds = {model: kinds[model] for model in verdicts.models_of(claims)}
    y = verdicts.losses_by_size(runs)
    m = sum('S' in row['sizes'].split() for row in claims)
    effect = verdicts.compare(y['S'], 'cem-2-copies', 'cem-1-copies', 'S', m,
                              verdicts.noise_by_kind([y['S'], y['M']], kinds))
    change, low, high = effect.percent()
    return f'{change:+.1f} ({low:+.1f} to {high:+.1f})'


PROSE = [('README.md', 'How good is it?'),
         *(('results/README.md', title) for title in (
             'Which of the three ties pays?', 'Why is CEM behind?', 'What narrows the gap?',
             'Do the paper')),
         ('results/notes.md', 'Options'), ('results/notes.md', 'Size L')]


def test_numbers_of_the_prose_are_in_a_csv() -> None:
    """Intervals as a whole, and per cent and losses with a decimal, to as many digits."""
    numbers = known_numbers()
    rows = [row for study in STUDIES for row in pages.effects(study)]
    rows += read_csv(f'{RESULTS}/ties/differences_found.csv')
    intervals = {pages.percent(row) for row in rows if row['effect_%']}
    intervals.add(without_later_runs())
    checked = 0
    summaries = [prose(page).partition('\n## ')[0] for page in ('README.md', 'results/README.md')]
    for text in (*summaries, *(section(*each) for each in PROSE)):
        assert text
        for interval in re.findall(INTERVAL, text):
            # A page may say of +11.6 that it is 11.6% above
            signed = interval if interval[0] in '+-' else f'+{interval}'
            assert signed.replace('%', '') in intervals, interval
            checked += 1
        for number in re.findall(r'(?<![.\d])\d+\.\d+(?=%| nats)', re.sub(INTERVAL, '', text)):
            digits = len(number.partition('.')[2])
            assert any(f'{abs(known):.{digits}f}' == number for known in numbers), number
            checked += 1
    assert checked > 30


def test_other_numbers_of_the_results_page() -> None:
    """Each sentence is found once, and its numbers are computed again."""
    page = prose('results/README.md')

    def numbers(pattern: str) -> list[float]:
        (found,) = re.findall(pattern, page)
        return [float(each) for each in ([found] if isinstance(found, str) else found)]

    gaps = [row for row in read_csv(f'{RESULTS}/gradient/gaps.csv') if row['model'] == 'cem']
    share = {row['pair in training, from']: float(row['share of the difference, %'])
             for row in gaps}
    targets = {row['pair in training, from']: float(row['targets, %']) for row in gaps}
    assert numbers(r'(\S+)% of the targets complete a repeated bigram that occurs at most 100') == [
        targets['0'] + targets['11']]
    assert numbers(r'account for (\d+)% of the gap between all-CEM and Llama with ALiBi\. More '
                   r'frequent repeated bigrams account for another (\d+)%') == [
        share['0'] + share['11'], share['101'] + share['1001']]
    run = read_csv(f'{RESULTS}/gradient/runs.csv')[0]
    repeated, others = int(run['repeated_targets']), int(run['other_targets'])
    assert numbers(r'(\d+)% of the targets are repeated') == [
        round(100 * repeated / (repeated + others))]
    steps: dict[str, int] = {}
    for row in read_csv(f'{RESULTS}/copying/steps.csv'):
        steps[row['model']] = min(steps.get(row['model'], 9999), int(row['median']))
    times = [round(steps[name] / steps['Llama with ALiBi'], 1)
             for name in ('W_V tied to W_K', 'W_O tied to W_Q', 'both', 'CEM attention')]
    assert numbers(r'need (\S+) times as many batches as Llama .* (\S+) times as many if W_O .* '
                   r'(\S+) times as many if both are tied\. .* needs (\S+) times') == times
    assert numbers(r'Of the (\d+) runs that the study .* planned, (\d+) were run') == [
        len(read_csv(f'{RESULTS}/gradient/{name}.csv')) for name in ('cells', 'runs')]
    measured = pages.copying('copies') | pages.copying('gradient')
    y = {row['model']: float(row['y']) for study in ('copies', 'gradient')
         for row in read_csv(f'{RESULTS}/{study}/runs.csv')
         if (row['size'], row['seed'], row['variant']) == ('S', '1', '')}
    change = math.expm1(y['llama-alibi-kv-copies'] - y['llama-alibi-copies'])
    assert numbers(r'match bias, again without a wider MLP, it lowers perplexity by (\S+)%') == [
        round(-100 * change, 1)]
    narrow, llama = measured['S', 'attn-1-three'], measured['S', pages.LLAMA]
    assert numbers(r'has (\d+)% fewer parameters') == [
        round(100 - 100 * pages.ratio(narrow, llama, 'parameters'))]
    trials = {(row['model'], row['rate']): float(row['y'])
              for row in read_csv(f'{RESULTS}/copies/runs.csv') if row['seed'] == '101'}
    lower = [trials[model, low] - trials[model, rate] for model, low, rate in (
        ('attn-1-copies', '0.01099', '0.0157'), ('llama-alibi-copies', '0.01022', '0.0146'))]
    assert numbers(r'a perplexity (\S+)% lower, and the Llama with both has one (\S+)% higher') == [
        round(-100 * math.expm1(lower[0]), 1), round(100 * math.expm1(lower[1]), 1)]
    pairs = {row['model']: float(row['0 to 10: nats'])
             for row in read_csv(f'{RESULTS}/ties/counts.csv') if row['size'] == 'S'}
    (shown,) = re.findall(r'loss is (\S+) nats for Llama and (\S+) for the model with the first '
                          r'tie\. With both ties of attention it is (\S+) \(',
                          prose('pretrained/README.md').replace('[', '('))
    assert [*map(float, shown)] == [pairs[model] for model in (
        pages.LLAMA, 'llama-kv-three-wide', 'attn-1-three-wide')]
    alibi = [float(row['y']) for row in read_csv(f'{RESULTS}/copies/runs.csv')
             if (row['size'], row['model']) == ('M', 'llama-alibi')]
    assert numbers(r'Two seeds of Llama with ALiBi differ by (\S+)%') == [
        round(100 * math.expm1(max(alibi) - min(alibi)), 1)]


def noise(folder: Path) -> dict[str, float]:
    """Return the standard deviation of each kind's runs, in per cent."""
    claims = [{'unit': 'perplexity'} | row for row in read_csv(f'{folder}/verdicts.csv')]
    own = {gradient.HERE: gradient.gradient_rule, ties.HERE: ties.ties_rule}
    rule = own.get(folder) or verdicts.RULES[folder]
    tables = rule(folder, claims, {})
    return {kind: 100 * s for table in tables.values() for kind, s, _ in table.noise.values()}


def test_the_noise_on_the_page_is_that_of_the_rules() -> None:
    page = prose('results/README.md')
    third, own, of_ties = (noise(folder) for folder in (
        verdicts.STUDY / 'third', gradient.HERE, ties.HERE))
    (shown,) = re.findall(r'a run is (\S+)% for Llama with RoPE, (\S+)% for .* (\S+)% for models '
                          r'with it\. .* it is (\S+)% for Llama with RoPE and (\S+)% for the other '
                          r'models\. .* it is (\S+)% for models .* (\S+)% for models with it',
                          page)
    expected = [third[kind] for kind in ('Llama with RoPE', 'no CEM MLP', 'CEM MLP')]
    expected += [own[kind] for kind in ('Llama with RoPE', 'no CEM MLP')]
    expected += [of_ties[kind] for kind in ('no CEM MLP', 'CEM MLP')]
    assert [*shown] == [f'{s:.1f}' for s in expected]


def test_noise_of_all_models_changes_no_verdict_of_the_gradient() -> None:
    """RULE.md can be read as all models of both studies; tables.py pools those of the rows."""
    kinds = {row['model']: row['noise'] for study in ('copies', 'gradient')
             for row in read_csv(f'{RESULTS}/{study}/models.csv')}

    def words(rule: Callable[..., verdicts.Tables]) -> list[str]:
        return [word for _, _, word in verdicts.judge(gradient.HERE, rule)]

    published = words(gradient.gradient_rule)

    def with_all(*of: object) -> verdicts.Tables:
        tables = gradient.gradient_rule(*of)
        y = {size: table.y for (_, size), table in tables.items()}
        every = verdicts.noise_by_kind([y['S'], y['M']], kinds)
        return {key: table._replace(noise=every) for key, table in tables.items()}

    assert words(with_all) == published and 'undecided' in published


@pytest.mark.parametrize('page', ['README.md', 'results/README.md'])
def test_a_verdict_stands_in_a_table_that_is_written_from_its_csv(page: str) -> None:
    """Prose has no word of a verdict, except in headings and where *it* is defined."""
    text = re.sub(r'^#.*', '', prose(page), flags=re.MULTILINE)
    if page == 'README.md':
        text = text.partition('\n## ')[0] + section(page, 'How good is it?')
    assert re.findall(VERDICTS, re.sub(r'\*[\w ]+\*', '', text)) == []


def test_the_words_of_a_verdict_are_found() -> None:
    for sentence in ('At equal size CEM is level.', 'It is better.', 'This holds at S.'):
        assert re.search(VERDICTS, sentence)
