"""
Take a trained model to another program.

    python export.py --to=DIR                                      the newest run
    python export.py --out_dir=out/RUN --to=DIR --dtype=bfloat16   another one, in half the bytes

Hugging Face's transformers loads the folder DIR, by the lines in DIR/README.md. The scripts here
read it as they read a run.
"""
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from configurator import PathStr, build, check, command_line, read_options
from nanocem.hub import export
from nanocem.runs import load_model, newest_run


@dataclass
class ExportConfig:
    """A model, and where it goes."""
    out_dir: PathStr | None = None  # a run (its best.pt), a .pt or export; default: newest in out/
    to: PathStr | None = None  # a new folder for the model in transformers' format
    dtype: Literal['float32', 'bfloat16'] = 'float32'  # of the weights in that folder


@command_line
def main(argv: list[str]) -> None:
    cfg = build(ExportConfig, read_options(argv, ExportConfig))
    check(cfg.to is not None, 'expected a new folder: --to=DIR')
    model, state = load_model(cfg.out_dir or newest_run())
    # Every form in which a model can leave has its lines here
    export(model, cfg.to, state, getattr(torch, cfg.dtype))
    print(f'{cfg.to}: transformers loads it, as its README.md says', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
