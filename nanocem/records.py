"""
The finished runs as results/ keeps them, for machines that do not have their folders.

runs.csv has a line a run: what the claims and most figures need. A number that was not kept is
empty. spikes.csv has what had been counted of claim h in runs whose logs are not kept.
"""
import csv
import io
import math
import os
from collections.abc import Mapping
from typing import Any

from configurator import fail
from nanocem.figures import read_log
from nanocem.ladder import Scale, Task

COLUMNS = ('size', 'model', 'learning_rate', 'seed', 'parameters', 'tokens', 'flops_per_token',
           'steps', 'val_perplexity', 'test_perplexity', 'precision', 'seconds', 'events')
NUMBERS = {'parameters': int, 'tokens': int, 'flops_per_token': float, 'steps': int,
           'val_perplexity': float, 'test_perplexity': float, 'seconds': float}
NEEDED = ('parameters', 'tokens', 'flops_per_token', 'steps', 'test_perplexity')
NONE = 'none'  # events were looked for, and there are none


def events_of(result: dict[str, Any]) -> set[int] | None:
    """The steps at which a finished run's loss spiked or that were skipped; None if not kept."""
    if 'events' in result:
        return result['events']
    if not os.path.exists(os.path.join(result['out_dir'], 'log.jsonl')):
        return None
    return {line['step'] for line in read_log(result) if line.get('event') in ('spike', 'skipped')}


def as_csv(found: Mapping[Task, dict[str, Any]], scale: Scale) -> str:
    """runs.csv of a scale's finished runs, by size, model, rate and seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(COLUMNS)
    sizes = list({**scale.sweep_sizes, **scale.sizes})
    for task, r in sorted(found.items(), key=lambda of: (sizes.index(of[0].size), of[0])):
        events = events_of(r)
        values = {
            **r, **task._asdict(), 'learning_rate': f'{task.rate:g}',
            'val_perplexity': written(r['val_perplexity'], 4),
            'test_perplexity': written(r['test_perplexity'], 4),
            'seconds': written(r['seconds'], 0),
            'events': '' if events is None else ' '.join(map(str, sorted(events))) or NONE}
        writer.writerow([values.get(name, '') for name in COLUMNS])
    return text.getvalue()


def written(value: float, digits: int) -> str:
    """A number with so many decimals; empty where it was not kept."""
    return f'{value:.{digits}f}' if math.isfinite(value) else ''


def read_rows(path: str) -> list[dict[str, str]]:
    """A csv file's lines, [] if there is none."""
    try:
        with open(path, encoding='utf-8', newline='') as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        fail(f'{path} cannot be read: {error}')


def read_runs(path: str, scale: Scale) -> dict[Task, dict[str, Any]]:
    """A scale's runs as their result.json would have them, with their events; nan or None for what
    was not kept. SystemExit, naming the line, where one is damaged."""
    found = {}
    for n, row in enumerate(read_rows(path), 2):
        try:
            task = Task(scale.name, row['size'], row['model'], float(row['learning_rate']),
                        int(row['seed']))
            result: dict[str, Any] = {name: kind(row[name] or 'nan')
                                      for name, kind in NUMBERS.items()}
            if not all(0 < result[name] < math.inf for name in NEEDED):
                raise ValueError
            kept = {'': None, NONE: set()}
            events = row['events']
            result['events'] = kept[events] if events in kept else {*map(int, events.split())}
            result['precision'] = row['precision']
            task.shape  # noqa: B018  KeyError where the size or the model is unknown
        except (KeyError, ValueError, TypeError, AttributeError):
            fail(f'{path}, line {n} is damaged: git checkout {path}')
        found[task] = result
    return found


def read_counts(path: str) -> dict[str, tuple[int, int, int]]:
    """size -> steps, events of A alone, events that B has too: claim h's, of runs without logs."""
    try:
        return {row['size']: (int(row['steps']), int(row['own']), int(row['shared']))
                for row in read_rows(path)}
    except (KeyError, ValueError, TypeError):
        fail(f'{path} is damaged: git checkout {path}')
