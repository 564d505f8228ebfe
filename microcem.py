"""
A language model whose layers nobody wrote: Karpathy's microgpt with its two layers deleted.

Its layers have no softmax, no values and no MLP code, only two energies. Each letter of a word has
a state, a list of 16 numbers, and an energy says how badly the state fits the letters so far. A
layer is one step downhill, minus the energy's gradient, and autograd computes it. The first
gradient turns out to be attention, the second a gated MLP. At the end the program compares both
with the same layers written by hand. Autograd also trains the weights, through these gradients.
This is Causal Energy Minimization (CEM, arXiv 2605.07588). Its attention has 512 weights, half of
microgpt's 1,024: keys double as values, and the query matrix doubles as the output matrix. This
program needs Python 3.10 or later and no packages. energy.py is the same idea in PyTorch.

    python microcem.py              learn names of English towns, and invent some, in about a minute
    python microcem.py words.txt    learn your own words, one per line, from 2,800 random draws
"""
from __future__ import annotations

import math
import random
import signal
import sys
from collections.abc import Callable, Iterator
from operator import add, mul
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit('microcem.py: expected Python 3.10 or later')


# Autograd: each result remembers how it was made, so that its gradient can be computed. Results are
# matrices, because plain Python multiplies matrices much faster than it keeps track of each number.
class Value:
    """A matrix of numbers, and its parents: the Values that it was made from. With each parent
    comes a function that turns g, the gradient of the result, into the gradient of this parent.
    Where microgpt multiplies g by a plain number, this function multiplies it by a Value. So a
    gradient also has parents, and can itself be differentiated."""
    def __init__(self, rows: list, *parents: tuple[Value, Callable[[Value], Value]]):
        self.rows = rows
        self.parents = parents
        self.shape = len(rows), len(rows[0])

    def match(self, other: Value | float) -> Value:  # a number becomes a matrix full of it
        other = other if isinstance(other, Value) else full(*self.shape, other)
        assert self.shape == other.shape, f'{self.shape} and {other.shape}'
        return other

    def __add__(self, other: Value | float) -> Value:
        other = self.match(other)
        rows = [list(map(add, a, b)) for a, b in zip(self.rows, other.rows, strict=True)]
        return Value(rows, (self, lambda g: g), (other, lambda g: g))

    def __mul__(self, other: Value | float) -> Value:  # number by number
        other = self.match(other)
        rows = [list(map(mul, a, b)) for a, b in zip(self.rows, other.rows, strict=True)]
        return Value(rows, (self, lambda g: g * other), (other, lambda g: g * self))

    def __matmul__(self, other: Value) -> Value:
        """Each row times each column: c[i][k] = sum_j a[i][j] b[j][k]. So the gradient of a[i][j]
        is sum_k g[i][k] b[j][k], or g times b transposed. That of b is a transposed times g."""
        assert self.shape[1] == other.shape[0], f'{self.shape} and {other.shape}'
        columns = other.T.rows
        rows = [[sum(map(mul, row, column)) for column in columns] for row in self.rows]
        return Value(rows, (self, lambda g: g @ other.T), (other, lambda g: self.T @ g))

    def each(self, f: Callable[[float], float], derivative: Callable[[Value], Value]) -> Value:
        """Return f of each number. f takes a number, and its derivative takes a Value."""
        rows = [list(map(f, row)) for row in self.rows]
        return Value(rows, (self, lambda g: g * derivative(self)))

    @property
    def T(self) -> Value: return Value(list(zip(*self.rows, strict=True)), (self, lambda g: g.T))
    def exp(self) -> Value: return self.each(math.exp, lambda x: x.exp())
    def log(self) -> Value: return self.each(math.log, lambda x: x ** -1)
    def __pow__(self, n: float) -> Value: return self.each(lambda a: a**n, lambda x: n * x**(n - 1))
    def __neg__(self) -> Value: return self * -1
    def __sub__(self, other: Value | float) -> Value: return self + -other
    def __truediv__(self, other: Value | float) -> Value: return self * other ** -1
    __radd__, __rmul__ = __add__, __mul__  # for 1 + x, 2 * x, and sum(), which begins with 0


def full(rows: int, columns: int, number: float) -> Value:
    return Value([[number] * columns for _ in range(rows)])

def row_sums(x: Value) -> Value: return x @ full(x.shape[1], 1, 1.0)         # (rows, 1)
def total(x: Value) -> Value: return row_sums(row_sums(x).T)                 # (1, 1)
def logsumexp(x: Value) -> Value: return row_sums(x.exp()).log()             # (rows, 1)
def silu(x: Value) -> Value: return x / (1 + (-x).exp())                     # a smooth ReLU
def phi(x: Value) -> Value: return x.each(phi_of_number, silu)               # its integral

def gradients(y: Value, xs: list[Value]) -> list[Value]:
    """Return dy / dx for each of the xs that y was made from. These can be differentiated again:

    >>> x = Value([[3.0]])
    >>> slope, = gradients(x ** 3, [x])
    >>> slope.rows, gradients(slope, [x])[0].rows
    ([[27.0]], [[18.0]])"""
    # List all Values between the xs and y, each after its parents. The others pass no gradient on:
    # this is how h stays fixed while u is differentiated
    order, seen, has_x = [], set(), set(xs)
    def visit(value: Value) -> None:
        seen.add(value)
        for parent, _ in value.parents:
            if parent not in seen:
                visit(parent)
            if parent in has_x:
                has_x.add(value)
        if value in has_x:
            order.append(value)
    visit(y)
    # Go back from y. Everything made from a Value comes before it, so its gradient is complete
    gradient = {y: full(1, 1, 1.0)}  # dy / dy
    for value in reversed(order):
        for parent, turn_back in value.parents:
            if parent in has_x:
                part = turn_back(gradient[value])
                gradient[parent] = gradient[parent] + part if parent in gradient else part
    return [gradient[x] for x in xs]


# Energies: what a layer lowers. Both take the states of J letters twice, as u and as h: (J, D). u
# moves, and h is what it looks at. They start equal, but the gradient is with respect to u
# alone, and h stays fixed. w holds all weights of the model, and n is the number of the layer.
D, K, WIDTH = 16, 4, 32  # numbers in a state, heads of attention, features of the MLP
Weights = dict[str | tuple, Value]

def scores(u: Value, h: Value, w: Weights, n: int, k: int) -> Value:
    """How well the query of each letter matches the key of each letter, in head k: (J, J)."""
    queries = u @ w['W_Q', n, k].T                                           # (J, D / K)
    keys = h @ w['W_K', n, k].T                                              # (J, D / K)
    # A key counts less the further back it is, and not at all if it is in the future. This is
    # ALiBi, attention with linear biases. It replaces learned positions
    J, slope = len(u.rows), 2.0 ** -k
    bias = [[slope * (j - i) if j <= i else -math.inf for j in range(J)] for i in range(J)]
    return queries @ keys.T / D ** 0.5 + Value(bias)

def interaction(u: Value, h: Value, w: Weights, n: int) -> Value:
    """-tau sum_k log sum_j exp(scores), with tau = sqrt(D), as in the paper: (J, D) -> (J, 1). It
    is low if u matches its own key or an earlier one. The derivative of log-sum-exp is softmax, so
    minus the gradient is attention."""
    return -D ** 0.5 * sum(logsumexp(scores(u, h, w, n, k)) for k in range(1, K + 1))

def elementwise(u: Value, h: Value, w: Weights, n: int) -> Value:
    """-gamma . phi(V u), with gamma = W h: (J, D) -> (J, 1). V u are features, and gamma, the gate,
    says how much each of them lowers the energy. The derivative of phi is SiLU, so minus the
    gradient is a gated MLP: SiLU in place of microgpt's ReLU, and times the gate."""
    gamma = h @ w['W', n].T                                                  # (J, WIDTH)
    return -row_sums(gamma * phi(u @ w['V', n].T))


# Model: two layers, each a step down its energy, turn letters into scores for the next letter.
LAYERS = [interaction, elementwise]

def randn(rows: int, columns: int, std: float = D ** -0.5) -> Value:
    return Value([[random.gauss(0, std) for _ in range(columns)] for _ in range(rows)])

def new_weights(n_letters: int) -> Weights:
    w: Weights = {'embedding': randn(n_letters, D, 1.0), 'head': randn(n_letters, D)}
    w['gain'] = full(1, D, 1.0)
    for n, energy in enumerate(LAYERS):
        w['gain', n] = full(1, D, 1.0)
        if energy is interaction:
            for k in range(1, K + 1):
                w['W_Q', n, k], w['W_K', n, k] = randn(D // K, D), randn(D // K, D)
        else:
            w['W', n], w['V', n] = randn(WIDTH, D), randn(WIDTH, D)
    return w

def norm(x: Value, gain: Value) -> Value:
    """RMSNorm: divide each row by the root of its mean square, and multiply it by the gain."""
    mean_square = row_sums(x * x) / D                                        # (J, 1)
    return x * ((mean_square + 1e-5) ** -0.5 @ gain)                         # (J, 1) @ (1, D)

def descend(x: Value, w: Weights, n: int, T: int = 1, eta: float = 1.0) -> Value:
    """Layer n: move the states x down an energy, in T steps of size eta. As in the paper, the
    gradient is with respect to u = norm(x), not x. The energy still falls, as the output shows."""
    h = norm(x, w['gain', n])
    for _ in range(T):
        u = norm(x, w['gain', n])  # in the first step u equals h
        # Letter i's energy depends on no other letter's u, so one gradient serves all letters
        energy = total(LAYERS[n](u, h, w, n))
        # The first of two differentiations: this is the layer. Its result can be differentiated
        gradient = gradients(energy, [u])[0]
        x = x - eta * gradient  # the old x plus a step: the residual connection
    return x

def one_hot(ids: list[int], n_letters: int) -> Value:  # a 1 in each row, at the letter's number
    return Value([[float(i == letter) for i in range(n_letters)] for letter in ids])

def logits(ids: list[int], w: Weights) -> Value:
    """Map the numbers of J letters to scores for the letter after each: (J, letters)."""
    # Look up letters by a matrix product, which has a gradient here. Python's indexing has none
    x = one_hot(ids, len(w['embedding'].rows)) @ w['embedding']              # (J, D)
    for n in range(len(LAYERS)):
        x = descend(x, w, n)
    return norm(x, w['gain']) @ w['head'].T

def word_loss(ids: list[int], w: Weights) -> Value:
    """Sum -log p over all letters except the first: (1, 1). p is the softmax of the scores."""
    of_all = logits(ids[:-1], w)                                             # (J, letters)
    of_next = row_sums(of_all * one_hot(ids[1:], of_all.shape[1]))           # (J, 1)
    return total(logsumexp(of_all) - of_next)


# Training: Adam moves the weights down the loss.
def train(words: list[list[int]], w: Weights, steps: int, batch_size: int = 4,
          learning_rate: float = 0.02) -> Iterator[float]:
    """Train the weights `w`, and yield the loss of each step. A word is its letters' numbers."""
    m = {name: 0 * w[name] for name in w}  # the mean of recent gradients
    v = {name: 0 * w[name] for name in w}  # the mean of their squares
    for step in range(1, steps + 1):
        batch = random.choices(words, k=batch_size)
        loss = sum(word_loss(ids, w) for ids in batch) / sum(len(ids) - 1 for ids in batch)
        rate = learning_rate * (1 - (step - 1) / steps)  # it falls to zero
        # The second differentiation goes through the first, since the layers are gradients
        for name, g in zip(w, gradients(loss, list(w.values())), strict=True):
            # Adam divides the mean gradient by the root of the mean square. Both means start at
            # zero, which is corrected. Value(x.rows) is x without its parents
            m[name] = Value((0.9 * m[name] + 0.1 * g).rows)
            v[name] = Value((0.95 * v[name] + 0.05 * g * g).rows)
            mean = m[name] / (1 - 0.9 ** step)
            root = (v[name] / (1 - 0.95 ** step)) ** 0.5 + 1e-8
            w[name] = Value((w[name] - rate * mean / root).rows)
        yield loss.rows[0][0]


# Sampling: the model invents a word, letter by letter.
def sample(letters: list[str], w: Weights, temperature: float = 0.5) -> str:
    ids = [letters.index(END)]
    while len(ids) == 1 or (ids[-1] != ids[0] and len(ids) < 31):
        chances = [math.exp(score / temperature) for score in logits(ids, w).rows[-1]]
        if len(ids) == 1:
            chances[ids[0]] = 0  # a word has at least one letter
        ids.append(random.choices(range(len(letters)), chances)[0])
    return ''.join(letters[i] for i in ids).strip(END)


# Proof: the same layers written by hand. The model does not use them; `main` compares the two.
def attention(u: Value, h: Value, w: Weights, n: int) -> Value:
    heads = []
    for k in range(1, K + 1):
        alpha = scores(u, h, w, n, k).exp()
        alpha = alpha / (row_sums(alpha) @ full(1, len(u.rows), 1.0))        # softmax
        values = h @ w['W_K', n, k].T                                        # which are the keys
        heads.append(alpha @ values @ w['W_Q', n, k])                        # no output matrix
    return sum(heads)

def mlp(u: Value, h: Value, w: Weights, n: int) -> Value:
    return (h @ w['W', n].T * silu(u @ w['V', n].T)) @ w['V', n]


def main(path: str | None = None, steps: int = 700) -> None:
    random.seed(0)
    words = read_words(path) if path else TOWNS.split()
    letters = sorted(set(END.join(words) + END))
    ids = [[letters.index(letter) for letter in END + word + END] for word in words]
    w = new_weights(len(letters))
    n_weights = sum(x.shape[0] * x.shape[1] for x in w.values())
    print(f'{len(words)} words, {len(letters)} letters with the end mark, {n_weights} weights')
    losses = []
    for loss in train(ids, w, steps):
        losses.append(loss)
        if len(losses) == 1 or len(losses) % 50 == 0:
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f'step {len(losses)}: loss {mean:.2f}, as uncertain as a guess among '
                  f'{math.exp(mean):.1f} letters; it writes {sample(letters, w)}', flush=True)
    written = [sample(letters, w) for _ in range(16)]
    marked = [f'{word} (in the list)' if word in words else word for word in written]
    print('more words:', ', '.join(marked))
    print('Four small steps down each energy, and its gradient beside the layer written by hand:')
    x = one_hot(ids[0], len(letters)) @ w['embedding']
    for n, energy in enumerate(LAYERS):
        h = norm(x, w['gain', n])
        energies = []
        for T in range(5):
            after = descend(x, w, n, T, eta=1 / 4)
            u = norm(after, w['gain', n])
            energies.append(total(energy(u, h, w, n)).rows[0][0])
        print(f'{words[0]} goes down the {energy.__name__} energy:',
              ', '.join(f'{E - energies[0]:.3g}' for E in energies))
        # Compare the layer by hand with minus the gradient, where the steps end
        by_hand = {interaction: attention, elementwise: mlp}.get(energy)
        if by_hand:
            sum_of_both = by_hand(u, h, w, n) + gradients(total(energy(u, h, w, n)), [u])[0]
            apart = max(abs(number) for row in sum_of_both.rows for number in row)
            print(f'{by_hand.__name__} by hand and minus the gradient: at most {apart:.1g} apart')
        x = after


# The rest: the value of phi, which the printed energies need, and the words.
def phi_of_number(z: float) -> float:
    """z log(1 + e^z) + Li2(-e^z), the integral of SiLU, by a short series, to ten decimals."""
    if z > 0:
        return z ** 2 / 2 - math.pi ** 2 / 6 - phi_of_number(-z)
    L = math.log1p(math.exp(z))
    return z * L - L - L**2 / 4 - L**3 / 36 + L**5 / 3600 - L**7 / 211680 + L**9 / 10886400

def read_words(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding='utf-8-sig').splitlines()
    except (OSError, UnicodeError) as error:
        sys.exit(f'microcem.py: {path}: {getattr(error, "strerror", "expected a text in UTF-8")}')
    words = [line.strip() for line in lines if line.strip()]
    longest = max(words, key=len, default='')
    if not 1 <= len(longest) <= 30:
        sys.exit(f'microcem.py: {path}: expected words of 1 to 30 letters, not "{longest:.40}"')
    return words

END = '\n'  # the letter before and after each word
TOWNS = '''abingdon alcester alfreton alton ambleside amesbury andover arundel ashburton ashford
attleborough axminster aylsham bampton barking barnoldswick barnstaple basildon bath beaconsfield
bebington bedale bedlington belper berkeley berwick bewdley bicester bideford billericay bingham
birkenhead blackpool blaydon bodmin bolton borough bottesford brackley bradford braintree brandon
brentford bridgnorth bridlington brierfield brighouse brighton brixham bromley bromyard broughton
buckfastleigh bude buntingford burnham burntwood burton buxton calne camelford canterbury carnforth
castleford charlbury chatteris cheddar chesham chester chichester chorley chudleigh cirencester
cleckheaton clevedon clun cockermouth colchester colne conisbrough corby cotgrave cowes cranbrook
crediton crewkerne cromer crowland croydon cullompton dartford darwen dawley denton dereham devizes
didcot diss dorchester dover driffield dronfield dudley dulverton durham earley eastbourne eccles
edenbridge ellesmere ely epping epworth esher exeter failsworth falmouth faringdon farnham faversham
filey fordingbridge framlingham frome garstang gillingham glossop godalming goole grantham grimsby
guisborough hailsham halesworth halstead harlow harrogate hartlepool haslemere hastings hatherleigh
haverhill heanor hebburn helston henley hertford hexham highworth hingham hoddesdon holmfirth
honiton horncastle horsforth horwich howden hucknall hungerford huntingdon ilchester ilkeston
ilminster ipswich ivybridge keighley kendal keswick keynsham kidsgrove kingston kirkham knottingley
lancaster launceston lechlade leeds leicester leominster lewes leyland lincoln littlehampton loddon
longridge lostwithiel louth ludlow lutterworth lydney lynton mablethorpe maidenhead maldon malton
manchester marazion marlborough maryport matlock middlesbrough midhurst millom mirfield morley
mossley nailsworth newark newcastle newlyn newport northallerton northfleet norwich nuneaton
okehampton oldham olney orpington oswestry oundle padiham paignton penryn pershore petersfield
pickering pontefract portishead potton prestwich radcliffe ramsbottom ramsgate rawtenstall redcar
redhill reigate richmond ripley rochdale romford rotherham royston rugeley rushden salford saltash
sandown sawbridgeworth scarborough seaford seaton selby shaftesbury sheffield sherborne shipley
sidmouth skegness skipton slough snodland somerton southampton southport southwold spennymoor
stalbridge stalybridge staveley stockport stourbridge stowmarket stroud sunderland swaffham swanley
tadcaster tamworth tavistock telford tenterden tewkesbury thatcham thirsk thorne tidworth tipton
todmorden torquay towcester trowbridge twickenham uckfield uppingham ventnor wadhurst wallasey
wallsend waltham wantage warminster warwick watford wellingborough wells weston weymouth whitchurch
whitstable wigan willenhall wilton wincanton winchester windsor wirksworth witham witney woking
wolverhampton woodstock worcester worksop wotton yarm yateley york'''

if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    if len(sys.argv) > 2:
        sys.exit(f'microcem.py: expected one file of words, and not {sys.argv[2]} beside it')
    if sys.argv[1:] in (['-h'], ['--help']):
        print(__doc__)
    else:
        main(*sys.argv[1:])

# Try LAYERS = [interaction, elementwise] * 2, or an energy of your own. An MLP without SiLU is
#
#     def squares(u, h, w, n):  # put it above LAYERS = [interaction, squares]
#         return -row_sums(h @ w['W', n].T * (u @ w['V', n].T) ** 2) / 2
