"""Write a model and its tokenizer into one HTML file, which runs it in a browser without network.

page.html is the page without a model: its JavaScript computes what model.py does, a token at a
time. What stands here packs the weights, and refuses what the page cannot compute.
"""
import base64
import copy
import html
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from configurator import check
from model import ModelConfig, Transformer
from nanocem.files import write_atomic
from nanocem.hub_tokenizer import convert_tokenizer
from nanocem.same import file_change
from nanocem.tokenizers import tokenizer_of

TEMPLATE = Path(__file__).with_name('page.html')
# What the template holds in place of a page's own texts
MODEL, TITLE, ABOUT = 'MODEL GOES HERE', 'TITLE GOES HERE', 'ABOUT GOES HERE'
SIZE, MEGABYTES = 'SIZE GOES HERE', 'MEGABYTES GO HERE'
# The address of the repository, or '' as long as it has none
REPOSITORY: str = tomllib.loads(Path(__file__).parents[1].joinpath('pyproject.toml').read_text(
    encoding='utf-8'))['project'].get('urls', {}).get('Repository', '')
QUESTION = 'Can it copy a word it has read only once?'  # the title of a page
# The page puts a word into the two gaps of these sentences. The model reads it once, and spells it
LESSON = ('The ', ' is a rare fish. If the ', ' is hungry,')
# Invented words: a page says how many of their pieces its model spells. A reader who had not seen
# the others made up the last ten
WORDS = ('Zorblax', 'Quimby', 'Fendril', 'Morvath', 'Drumbolt', 'Skelnar', 'Wobrick', 'Tarquel',
         'Nimbrosk', 'Gravenol', 'Brizzock', 'Jalpent', 'Oskrim', 'Pelvadur', 'Triskett',
         'Humbrell', 'Vexaloo', 'Yarndip', 'Krellovar', 'Gumfort', 'Gryndal', 'Vexolite',
         'Tamsuro', 'Plikworth', 'Ozzibane', 'Hrunkel', 'Dwimmerly', 'Squombat', 'Jaxtavir',
         'xyzzq')
MOST_WEIGHTS = 50_000_000  # base64 makes 133 MB of them, and some browsers stop soon after
LOGIT_ERROR = 1e-4  # relative to their norm; GELU in place of SiLU would cause 0.7%
PROBE_PRODUCTS = 100_000_000  # a browser computes this many in less than a second
# What the page computes: the words of options with a choice, and the options that are numbers
CHOICES = {
    'attn': ('llama', 'cem'), 'mlp': ('llama', 'cem'), 'tie': ('none', 'kv', 'qo', 'both'),
    'positions': ('alibi', 'rope'), 'kq_diag': ('none', 'shared', 'per_head', 'scaled'),
    'score_scale': ('head', 'model'), 'preconditioner': ('none', 'diag', 'diag_lowrank'),
    'residual': ('raw', 'normed'), 'exact_update': (False, True), 'untied_output': (False, True),
    'mlp_energy': ('gated', 'sign_convex'), 'mlp_match': ('dims', 'params'),
    'key_shift': ('none', 'half'), 'value_shift': ('none', 'half'),
    'match_bias': ('none', 'token')}
NUMBERS = {
    'd_model', 'n_layer', 'n_head', 'd_mlp', 'vocab_size', 'context_length', 'attn_steps',
    'mlp_steps', 'attn_reuse', 'mlp_reuse', 'attn_step_size', 'mlp_step_size', 'attn_rank',
    'mlp_rank', 'rope_theta'}
NOT_COMPUTED = {'size', 'init_std'}  # they name the shape, or begin the training


def write_page(path: str, model: Transformer, state: dict[str, Any], prompt: str = '',
               title: str = '', about: str = '') -> None:
    """Write a model to a new HTML file. Its checkpoint `state` names tokenizer and data. `about`
    says what the model has read, and `prompt` is the text with which "Look inside" begins: by
    default the sentences of LESSON. UserError if there is such a file, or if the page cannot
    compute the model or its tokenizer."""
    check(path.endswith('.html'), f'page={path}: expected a name that ends in .html')
    check(not Path(path).exists(), f'page={path} exists: give a new file')
    has_pages = (Path(path).parent / 'descent.html').exists()
    text = make_page(model, state, prompt, title, about, has_pages)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())


def make_page(model: Transformer, state: dict[str, Any], prompt: str = '', title: str = '',
              about: str = '', has_pages: bool = False) -> str:
    """Return the HTML of a page. `has_pages` says whether the other pages of docs/ are beside it.
    UserError if the page cannot compute the model."""
    check_model(model)
    reason = file_change(model, state)
    check(not reason, f'page: a page computes the classes of model.py, and {reason}')
    tokenizer = tokenizer_of(state)
    rounded = round_weights(model)  # all numbers of the page are those of the weights that it holds
    content = dict(pack_model(rounded), tokenizer=pack_tokenizer(tokenizer),
                   step=state.get('step'), prompt=prompt, lesson=pack_lesson(rounded, tokenizer))
    # "<" is escaped: no text of a tokenizer or a prompt ends the script that holds it
    text = json.dumps(content, allow_nan=False).replace('<', '\\u003c')
    page = TEMPLATE.read_text(encoding='utf-8')
    page = page.replace(TITLE, html.escape(title or QUESTION)).replace(ABOUT, html.escape(about))
    page = page.replace(SIZE, round_number(model.num_params()))
    page = page.replace(MEGABYTES, f'{len(text) / 1e6:.1f} MB').replace(MODEL, text)
    return set_links(page, REPOSITORY, has_pages)


def round_number(n: int) -> str:
    """Two digits of a number of weights: 1.1 million, 23 thousand."""
    if n < 1000:
        return str(n)
    unit, word = (1e6, 'million') if n >= 995_000 else (1e3, 'thousand')
    return f'{float(f"{n / unit:.2g}"):g} {word}'


def set_links(page: str, repository: str, has_pages: bool) -> str:
    """Return a page with the address of the repository in its links to code, <a data-code="FILE">,
    and that of its GitHub Pages in links to pages, <a data-page="FILE">, and in og:image. Without
    an address, links point to files of a clone if the other pages are beside this one; if they are
    not, the navigation, <nav>, is left out."""
    owner, _, name = repository.removeprefix('https://github.com/').partition('/')
    site = f'https://{owner}.github.io/{name}/' if repository else ''
    code = f'{repository}/blob/main/' if repository else '../'
    if not (repository or has_pages):
        page = re.sub(r'<nav.*?</nav>\n', '', page, flags=re.DOTALL)
    page = re.sub(r'<a data-code="([^"]*)"[^>]*>', rf'<a data-code="\1" href="{code}\1">', page)
    page = re.sub(r'<a data-page="([^"]*)"[^>]*>',
                  rf'<a data-page="\1" href="{"" if has_pages else site}\1">', page)
    return re.sub(r'(<meta property="og:image" content=")[^"]*?([^"/]*">)', rf'\1{site}\2', page)


class Guess(NamedTuple):
    """What a model expects where a piece of a word stands."""
    piece: str
    p: float  # the piece's probability
    is_first: bool  # whether the piece is the likeliest


@torch.no_grad()
def guesses(model: Transformer, tokenizer: Any, sentence: str, word: str) -> list[Guess]:
    """Return what a model expects of the pieces of the last `word` in a sentence, each given all
    before it. The first piece with a letter, and a space before it, are left out."""
    before = sentence[:sentence.rindex(word)].rstrip(' ')
    begin = len(tokenizer.encode(before))
    end = len(tokenizer.encode(f'{before} {word}'))
    ids = tokenizer.encode(sentence)
    while not tokenizer.decode(ids[begin:begin + 1]).strip():
        begin += 1
    logits = model(torch.tensor([[tokenizer.bos, *ids]]))[0][0]
    # The logits at BOS are those of the first id
    return [Guess(tokenizer.decode(ids[at:at + 1]), logits[at].softmax(dim=-1)[ids[at]].item(),
                  logits[at].argmax().item() == ids[at]) for at in range(begin + 1, end)]


def pack_lesson(model: Transformer, tokenizer: Any) -> dict[str, Any] | None:
    """Return the sentences and words of the page's lesson, and how many pieces of all words are
    the model's first guess: as it is, and with all match weights 0. `whole` counts the words that
    it spells. They come first, and the page opens with the first word. None if the model's context
    is too short for the sentences."""
    sentences = [word.join(LESSON) for word in WORDS]
    longest = max(len(tokenizer.encode(sentence)) for sentence in sentences)
    if 1 + longest > model.cfg.context_length:
        return None
    switched_off = copy.deepcopy(model)
    for name, w in switched_off.named_parameters():
        if name.endswith('match_weight'):
            w.data.zero_()

    def right(one: Transformer) -> dict[str, list[bool]]:
        return {word: [guess.is_first for guess in guesses(one, tokenizer, sentence, word)]
                for word, sentence in zip(WORDS, sentences, strict=True)}

    on, off = right(model), right(switched_off)
    words = sorted(WORDS, key=lambda word: not all(on[word]))  # the words that it spells come first
    return dict(sentences=LESSON, words=words, pieces=sum(map(len, on.values())),
                on=sum(map(sum, on.values())), off=sum(map(sum, off.values())),
                whole=sum(map(all, on.values())))


def check_model(model: Transformer) -> None:
    """UserError, which names the option, unless the page computes this model."""
    check(type(model) is Transformer,
          f'page: expected a Transformer of model.py, not {type(model).__name__}')
    choices = CHOICES | {'n_kv_head': (model.cfg.n_head,)}  # no grouped queries
    for field in fields(ModelConfig):
        if field.name in NUMBERS | NOT_COMPUTED:
            continue
        value, known = getattr(model.cfg, field.name), choices.get(field.name, (field.default,))
        check(value in known, f'page: the page cannot compute {field.name}={value}: expected one '
              f'of {", ".join(map(str, known))}')
    n_weights = model.num_params()
    check(n_weights <= MOST_WEIGHTS, f'page: a model of {n_weights:,} weights is too large for a '
          f'page: expected at most {MOST_WEIGHTS:,}')


def round_weights(model: Transformer) -> Transformer:
    """Return a copy of a model whose weights are rounded to bfloat16."""
    rounded = Transformer(model.cfg).eval()
    rounded.load_state_dict({name: w.bfloat16() for name, w in model.state_dict().items()})
    return rounded


@torch.no_grad()
def pack_model(model: Transformer) -> dict[str, Any]:
    """Return a model's options, and its weights, already rounded: their names and shapes, and their
    bfloat16 bits in base64. `probe` has a few ids, the logits after the last one, and how far the
    page's logits may be off. UserError if the logits are not finite."""
    weights = dict(model.named_parameters())
    bits = torch.cat([w.detach().bfloat16().view(torch.int16).flatten() for w in weights.values()])
    n_ids = min(model.cfg.context_length, max(6, PROBE_PRODUCTS // model.num_params()))
    idx = torch.arange(n_ids)[None] * 7919 % model.cfg.vocab_size
    logits = model.next_logits(idx)[0]
    check(bool(logits.isfinite().all()), 'page: the logits of the model are not finite: it cannot '
          'be sampled from')
    # Rounding is 1e-6 of the norm, or more with residual=normed, where it grows from layer to layer
    exact = copy.deepcopy(model).double().next_logits(idx)[0]
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
