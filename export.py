"""
Export a trained model to other programs.

    python export.py --to=DIR                                      the newest run
    python export.py --out_dir=out/RUN --to=DIR --dtype=bfloat16   another one, in half the bytes
    python export.py --page=my_model.html --about="It has read eleven novels."   a page to play with

Hugging Face's transformers loads the folder DIR: DIR/README.md has the lines for it. The scripts
here read it as they read a run. The page is one file, which runs the model in a browser: it needs
no network, and its weights are bfloat16.
"""
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # PYTHONSAFEPATH leaves it out

from configurator import PathStr, build, check, command_line, read_options
from nanocem.hub import export
from nanocem.page import write_page
from nanocem.runs import load_model, newest_run


@dataclass
class ExportConfig:
    """A model, and where it goes."""
    out_dir: PathStr | None = None  # a run (its best.pt), a .pt or export; default: newest in out/
    to: PathStr | None = None  # a new folder for the model in transformers' format
    dtype: Literal['float32', 'bfloat16'] = 'float32'  # precision of the weights in that folder
    page: PathStr | None = None  # a new HTML file that runs the model in a browser
    prompt: str = ''  # the text that the page opens with, for the model to continue
    title: str = ''  # the page's title; default: a question
    about: str = ''  # a line that says what the model has read


@command_line
def main(argv: list[str]) -> None:
    given = read_options(argv, ExportConfig)
    cfg = build(ExportConfig, given)
    check(bool(cfg.to or cfg.page), 'expected a new folder: --to=DIR, or a new page: '
          '--page=FILE.html')
    check(bool(cfg.to) or 'dtype' not in given, "dtype is for --to=DIR: a page's weights are "
          'bfloat16')
    for name in ('prompt', 'title', 'about'):
        check(bool(cfg.page) or name not in given, f'{name} is for --page=FILE.html')
    path = cfg.out_dir or newest_run()
    model, state = load_model(path)
    # Write what was asked for
    if cfg.page:
        write_page(cfg.page, model, state, cfg.prompt, cfg.title, cfg.about)
        megabytes = os.path.getsize(cfg.page) / 1e6
        print(f'{cfg.page}: {path}; open it in a browser ({megabytes:.1f} MB)', flush=True)
    if cfg.to:
        export(model, cfg.to, state, getattr(torch, cfg.dtype))
        print(f'{cfg.to}: {path}, as transformers loads it: see its README.md', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
