"""Write a model and its tokenizer into one HTML file, which runs it in a browser without network.

page.html is the page without a model: its JavaScript computes what model.py does, a token at a
time. What stands here packs the weights, and refuses what the page cannot compute.
"""
import base64
import html
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from configurator import check, fail
from model import ModelConfig, Transformer
from nanocem.files import write_atomic
from nanocem.hub import check_file
from nanocem.hub_tokenizer import convert_tokenizer
from nanocem.tokenizers import tokenizer_of

TEMPLATE = Path(__file__).with_name('page.html')
PLACEHOLDER = 'MODEL GOES HERE'  # in the template, as are these two
TITLE, ABOUT = 'TITLE GOES HERE', 'ABOUT GOES HERE'
# The address of the repository, or '' as long as it has none
REPOSITORY: str = tomllib.loads(Path(__file__).parents[1].joinpath('pyproject.toml').read_text(
    encoding='utf-8'))['project'].get('urls', {}).get('Repository', '')
# The text that shows copying. No model has read its two names
COPYING = ('The Zorblax function returns a tuple. The Quimby module reads a file. If the Zorblax '
           'function fails, call the Quimby')
MOST_WEIGHTS = 50_000_000  # base64 makes 133 MB of them, and some browsers stop soon after
LOGIT_ERROR = 1e-4  # of their norm; GELU in place of SiLU is 0.7%
PROBE_PRODUCTS = 100_000_000  # so many a browser computes in less than a second
# What the page computes: the words of options with a choice, and the options that are numbers
CHOICES = {
    'attn': ('llama', 'cem'), 'mlp': ('llama', 'cem'), 'tie': ('none', 'kv', 'qo', 'both'),
    'positions': ('alibi', 'rope'), 'kq_diag': ('none', 'shared', 'per_head'),
    'score_scale': ('head', 'model'), 'preconditioner': ('none', 'diag', 'diag_lowrank'),
    'residual': ('raw', 'normed'), 'exact_update': (False, True),
    'mlp_energy': ('gated', 'sign_convex'), 'mlp_match': ('dims', 'params'),
    'key_shift': ('none', 'half'), 'match_bias': ('none', 'token', 'pair')}
NUMBERS = {
    'd_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'context_length', 'attn_steps',
    'mlp_steps', 'attn_reuse', 'mlp_reuse', 'loops', 'attn_step_size', 'mlp_step_size', 'attn_rank',
    'mlp_rank', 'rope_theta'}
NOT_COMPUTED = {'size', 'init_std'}  # they name the shape, or begin the training


def write_page(path: str, model: Transformer, state: dict[str, Any], prompt: str = '',
               title: str = '', about: str = '',
               beside: tuple[str, Transformer, dict[str, Any]] | None = None) -> None:
    """Write a model to a new HTML file. Its checkpoint `state` names tokenizer and data. `prompt`
    is the text that the page begins with, by default COPYING; `about` says what the model has read.
    `beside` is the name of another model, the model and its state: the page begins with COPYING,
    and shows what both expect. UserError if there is such a file, or if the page cannot compute
    the model or its tokenizer."""
    check(path.endswith('.html'), f'page={path}: expected a name that ends in .html')
    check(not Path(path).exists(), f'page={path} exists: give a new file')
    has_pages = (Path(path).parent / 'descent.html').exists()
    text = make_page(model, state, prompt, title, about, beside, has_pages)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())


def make_page(model: Transformer, state: dict[str, Any], prompt: str = '', title: str = '',
              about: str = '', beside: tuple[str, Transformer, dict[str, Any]] | None = None,
              has_pages: bool = False) -> str:
    """Return the HTML of a page. `has_pages` says whether the other pages of docs/ are beside it.
    UserError if the page cannot compute the model."""
    check_model(model)
    check_file(model, state, 'page: a page computes the classes of model.py, and')
    tokenizer = tokenizer_of(state)
    examples = [('copying', COPYING), ('writing', prompt), ('your own', '')]
    content = dict(pack_model(model), tokenizer=pack_tokenizer(tokenizer), step=state.get('step'),
                   prompt=COPYING if beside or not prompt else prompt, copying=COPYING,
                   examples=[example for example in examples if example != ('writing', '')])
    if beside:
        content['beside'] = pack_beside(tokenizer, *beside)
    # "<" is escaped: no text of a tokenizer or a prompt ends the script that holds it
    text = json.dumps(content, allow_nan=False).replace('<', '\\u003c')
    page = TEMPLATE.read_text(encoding='utf-8')
    page = page.replace(TITLE, html.escape(title or 'A language model in your browser'))
    page = page.replace(ABOUT, html.escape(about)).replace(PLACEHOLDER, text)
    return set_links(page, REPOSITORY, has_pages)


def set_links(page: str, repository: str, has_pages: bool) -> str:
    """Return a page with the address of the repository in its links to code, <a data-code="FILE">,
    and that of its GitHub Pages in links to pages, <a data-page="FILE">, and in og:image. Without
    an address these are files of a clone, if the other pages are beside this one. If they are not,
    the links are left out, with the comma that joins them to others."""
    owner, _, name = repository.removeprefix('https://github.com/').partition('/')
    site = f'https://{owner}.github.io/{name}/' if repository else ''
    code = f'{repository}/blob/main/' if repository else '../'
    if not (repository or has_pages):
        page = re.sub(r'<a data-page=[^>]*>[^<]*</a>,\s*', '', page)
        page = re.sub(r',\s*<a data-code=[^>]*>[^<]*</a>', '', page)
    page = re.sub(r'<a data-code="([^"]*)"[^>]*>', rf'<a data-code="\1" href="{code}\1">', page)
    page = re.sub(r'<a data-page="([^"]*)"[^>]*>',
                  rf'<a data-page="\1" href="{"" if has_pages else site}\1">', page)
    return re.sub(r'(<meta property="og:image" content=")[^"]*?([^"/]*">)', rf'\1{site}\2', page)


@torch.no_grad()
def pack_beside(tokenizer: Any, name: str, other: Transformer,
                state: dict[str, Any]) -> dict[str, Any]:
    """Return the probability that another model gives to each token of COPYING, and its options.
    UserError if its tokens are others."""
    check(pack_tokenizer(tokenizer_of(state)) == pack_tokenizer(tokenizer),
          f'beside={name}: expected a model with the same tokenizer')
    ids = [tokenizer.bos, *tokenizer.encode(COPYING)]
    length = other.cfg.context_length
    check(len(ids) <= length, f'beside={name}: expected a context of at least {len(ids)} tokens, '
          f'and not {length}')
    p = other(torch.tensor([ids]))[0][0].softmax(dim=-1)
    found = [1.0, *(p[at, id].item() for at, id in enumerate(ids[1:]))]
    return dict(name=name, p=[float(f'{value:.6g}') for value in found],
                cfg={name: value for name, value in vars(other.cfg).items()
                     if name not in NOT_COMPUTED})


def check_model(model: Transformer) -> None:
    """UserError, which names the option, unless the page computes this model."""
    name, n_weights = type(model).__name__, model.num_params()
    check(type(model) is Transformer, f'page: expected a Transformer of model.py, not {name}')
    for field in fields(ModelConfig):
        name, value = field.name, getattr(model.cfg, field.name)
        if name in NUMBERS | NOT_COMPUTED or value in CHOICES.get(name, (field.default,)):
            continue
        words = ', '.join(map(str, CHOICES.get(name, (field.default,))))
        fail(f'page: the page cannot compute {name}={value}: expected one of {words}')
    check(n_weights <= MOST_WEIGHTS, f'page: a model of {n_weights:,} weights is too large for a '
          f'page: expected at most {MOST_WEIGHTS:,}')


@torch.no_grad()
def pack_model(model: Transformer) -> dict[str, Any]:
    """Return the options of a model, the names and shapes of its weights, and their bfloat16 bits
    in base64; `probe` has a few ids, their last logits, and how far the page's may be from these.
    UserError if these are not finite."""
    rounded = Transformer(model.cfg).eval()
    rounded.load_state_dict({name: w.bfloat16() for name, w in model.state_dict().items()})
    # named_parameters lists a tied matrix once, by its first name
    weights = dict(rounded.named_parameters())
    bits = torch.cat([w.detach().bfloat16().view(torch.int16).flatten() for w in weights.values()])
    n_ids = min(model.cfg.context_length, max(6, PROBE_PRODUCTS // model.num_params()))
    idx = torch.arange(n_ids)[None] * 7919 % model.cfg.vocab_size
    logits = rounded.next_logits(idx)[0]
    check(bool(logits.isfinite().all()), 'page: the logits of the model are not finite: it cannot '
          'be sampled from')
    # Rounding is 1e-6 of the norm, or more with residual=normed, where it grows from layer to layer
    exact = rounded.double().next_logits(idx)[0]
    tolerance = max(LOGIT_ERROR, 10 * float((logits - exact).norm() / exact.norm()))
    options = {name: value for name, value in vars(model.cfg).items() if name not in NOT_COMPUTED}
    return dict(cfg=options, shapes=[[name, [*w.shape]] for name, w in weights.items()],
                weights=base64.b64encode(bits.numpy().astype('<i2').tobytes()).decode(),
                probe=dict(ids=idx[0].tolist(), logits=logits[:16].tolist(), tolerance=tolerance))


def pack_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return a tokenizer as the page reads it: `pieces` has a text for each id, or a byte's number,
    or None for an id without text. Without `ranks` each byte is a token. With it a text begins as
    characters, and the pair whose concatenation has the lowest rank is joined first. UserError for
    a tokenizer of another kind."""
    if tokenizer.name == 'byte':
        return dict(pieces=[*range(256), None], bos=tokenizer.bos)
    sp, ids = getattr(tokenizer, 'model', None), range(tokenizer.vocab_size)
    known = sp is not None and sum(map(sp.is_byte, ids)) == 256 and convert_tokenizer(tokenizer)
    check(bool(known), f'page: the page has no tokenizer {tokenizer.name}: expected bytes, a '
          "byte-pair one that this project trained, or Llama's")
    pieces: list[Any] = [sp.id_to_piece(i).replace('\u2581', ' ') for i in ids]
    for i in ids:
        if sp.is_byte(i):
            pieces[i] = int(pieces[i][1:-1], 16)  # <0x0A>
        elif sp.is_control(i) or sp.is_unknown(i):
            pieces[i] = None
    # The score of a piece is minus its rank
    return dict(pieces=pieces, ranks=[-sp.get_score(i) for i in ids], bos=tokenizer.bos,
                like_llama=tokenizer.u2581_ids is None)
