"""
A language model from two energies, without any package: the idea of CEM (arXiv 2605.07588).

One autograd does two jobs below. It writes the layers: a layer moves each letter's state by minus
the gradient of an energy. Then it trains the layers, through these gradients. energy.py has the
same layers in PyTorch, and tests/test_micro.py compares the two. Read downwards: data, autograd,
energies, model, training, sampling.

    python microcem.py              learn names of English towns, and invent some, in about a minute
    python microcem.py words.txt    learn words of yours, one a line
"""
from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from operator import add, mul
from pathlib import Path

# Data: names of towns, because even a very small model can learn what they sound like.
TOWNS = '''
abingdon alcester alfreton alton ambleside amesbury andover arundel ashburton ashford attleborough
axminster aylsham bampton barking barnoldswick barnstaple basildon bath beaconsfield bebington
bedale bedlington belper berkeley berwick bewdley bicester bideford billericay bingham birkenhead
blackpool blaydon bodmin bolton borough bottesford brackley bradford braintree brandon brentford
bridgnorth bridlington brierfield brighouse brighton brixham bromley bromyard broughton
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
wolverhampton woodstock worcester worksop wotton yarm yateley york
'''
END = '\n'  # the letter before and after each word


def read_words(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding='utf-8-sig').splitlines()
    except OSError as error:
        sys.exit(f'microcem.py: {path}: {error.strerror}')
    except ValueError:  # no text
        lines = []
    words = [line.strip() for line in lines if line.strip()]
    if not words or max(map(len, words)) > 30:
        sys.exit(f'microcem.py: {path}: expected a text file of words of at most 30 letters, '
                 'one a line')
    return words


# Autograd: each result remembers how it was made, so that its gradient can be computed. The unit is
# a matrix, because plain Python multiplies matrices much faster than it keeps track of each number.
class Value:
    """A matrix of numbers, and its parents: the Values that it was made of. With each parent comes
    a function that turns g, the gradient of the result, into the gradient of this parent. The
    function uses the operations below, so a gradient has parents, too, and can be differentiated
    again."""
    def __init__(self, rows: list, *parents: tuple[Value, Callable[[Value], Value]]):
        self.rows = rows
        self.parents = parents

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.rows[0])

    def match(self, other: Value | float) -> Value:
        """Return a Value as it is, and a number as a matrix that is full of it."""
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

    __radd__ = __add__
    __rmul__ = __mul__

    def __sub__(self, other: Value | float) -> Value:
        return self + -1 * other

    def __matmul__(self, other: Value) -> Value:  # each row times each column
        assert self.shape[1] == other.shape[0], f'{self.shape} and {other.shape}'
        columns = other.T.rows
        rows = [[sum(map(mul, row, column)) for column in columns] for row in self.rows]
        return Value(rows, (self, lambda g: g @ other.T), (other, lambda g: self.T @ g))

    @property
    def T(self) -> Value:
        return Value(list(zip(*self.rows, strict=True)), (self, lambda g: g.T))

    def each(self, f: Callable[[float], float], derivative: Callable[[Value], Value]) -> Value:
        """Return f of each number. f takes a number, and its derivative takes a Value."""
        rows = [list(map(f, row)) for row in self.rows]
        return Value(rows, (self, lambda g: g * derivative(self)))

    def __pow__(self, n: float) -> Value:
        return self.each(lambda a: a ** n, lambda x: n * x ** (n - 1))

    def exp(self) -> Value:
        return self.each(math.exp, lambda x: x.exp())

    def log(self) -> Value:
        return self.each(math.log, lambda x: x ** -1)


def full(rows: int, columns: int, number: float) -> Value:
    return Value([[number] * columns for _ in range(rows)])


def row_sums(x: Value) -> Value:  # (rows, columns) -> (rows, 1)
    return x @ full(x.shape[1], 1, 1.0)


def total(x: Value) -> Value:  # (rows, columns) -> (1, 1)
    return row_sums(row_sums(x).T)


def gradients(y: Value, xs: list[Value]) -> list[Value]:
    """Return dy / dx for each of the xs. y is a single number that was made of them."""
    # List all that y was made of, each Value after its parents, and note whether an x is in it
    wanted = set(xs)
    has_x: dict[Value, bool] = {}

    def visit(value: Value) -> None:
        if value not in has_x:
            for parent, _ in value.parents:
                visit(parent)
            has_x[value] = value in wanted or any(has_x[p] for p, _ in value.parents)

    visit(y)
    # Go through the list from its end, which is y. All that was made of a Value comes before it, so
    # that its gradient is complete when its turn comes
    gradient = {y: full(1, 1, 1.0)}
    for value in reversed(has_x):
        for parent, turn_back in value.parents:
            if has_x[parent]:
                part = turn_back(gradient[value])
                gradient[parent] = gradient[parent] + part if parent in gradient else part
    return [gradient[x] for x in xs]


# Energies: what a layer lowers. u has the states of J letters, and h their context, which stays as
# it is: both are (J, D). w has all weights of the model, and n is the number of the layer.
D, K, WIDTH = 16, 4, 32  # numbers in a state, heads of attention, features of the MLP
Weights = dict[str | tuple, Value]


def logsumexp(x: Value) -> Value:
    return row_sums(x.exp()).log()


def interaction(u: Value, h: Value, w: Weights, n: int) -> Value:
    """-tau sum_k log sum_j exp(a_ijk): (J, D) -> (J, 1). Letter i has the score a_ijk for letter j
    in head k. The energy is low if u matches a key of its past, or its own. The derivative of
    log-sum-exp is softmax, so minus the gradient is attention, with keys as values."""
    J, tau = len(u.rows), D ** 0.5
    energies = []
    for k in range(1, K + 1):
        queries = u @ w['W_Q', n, k].T                                       # (J, D / K)
        keys = h @ w['W_K', n, k].T                                          # (J, D / K)
        # ALiBi: a key counts less the longer ago it is, and not at all if it is in the future
        slope = 2.0 ** -k
        bias = [[slope * (j - i) if j <= i else -math.inf for j in range(J)] for i in range(J)]
        scores = queries @ keys.T * (1 / tau) + Value(bias)                  # (J, J)
        energies.append(-tau * logsumexp(scores))
    return sum(energies)


def elementwise(u: Value, h: Value, w: Weights, n: int) -> Value:
    """-gamma . phi(V u), with gamma = W h: (J, D) -> (J, 1). The gate gamma says which features V u
    lower the energy, and how much. phi' is SiLU, so minus the gradient is a gated MLP."""
    gamma = h @ w['W', n].T                                                  # (J, WIDTH)
    return -1 * row_sums(gamma * phi(u @ w['V', n].T))


def phi(x: Value) -> Value:
    """The integral of SiLU, which is z sigmoid(z). Layers and training use this derivative alone;
    the value of phi is for the energies that are printed at the end."""
    return x.each(phi_of_number, lambda x: x * (1 + (-1 * x).exp()) ** -1)


def phi_of_number(z: float) -> float:
    """z log(1 + e^z) + Li2(-e^z), to ten decimals. If z < 0, Li2(-e^z) is a short series in
    L = log(1 + e^z). If not, phi(z) + phi(-z) = z^2 / 2 - pi^2 / 6."""
    if z > 0:
        return z ** 2 / 2 - math.pi ** 2 / 6 - phi_of_number(-z)
    L = math.log1p(math.exp(z))
    return z * L - L - L**2 / 4 - L**3 / 36 + L**5 / 3600 - L**7 / 211680 + L**9 / 10886400


# Model: two layers, each a step down its energy, turn letters into guesses of the next letters.
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
                w['W_Q', n, k] = randn(D // K, D)
                w['W_K', n, k] = randn(D // K, D)
        else:
            w['W', n] = randn(WIDTH, D)
            w['V', n] = randn(WIDTH, D)
    return w


def norm(x: Value, gain: Value) -> Value:
    """RMSNorm: divide each row by the root of its mean square, and multiply it by the gain."""
    mean_square = row_sums(x * x) * (1 / D)                               # (J, 1)
    return x * ((mean_square + 1e-5) ** -0.5 @ gain)


def descend(x: Value, w: Weights, n: int, T: int = 1, eta: float = 1.0) -> Value:
    """Layer n: move the states x down an energy, in T steps of length eta. A step is minus the
    gradient with respect to u = norm(x), without the norm's derivative, as in the paper."""
    h = norm(x, w['gain', n])
    for _ in range(T):
        u = norm(x, w['gain', n])  # in the first step u equals h
        energy = LAYERS[n](u, h, w, n)  # one gradient for all: no letter reads another's u
        gradient = gradients(total(energy), [u])[0]
        x = x - eta * gradient  # the old x plus a step: the residual connection
    return x


def one_hot(ids: list[int], n_letters: int) -> Value:  # a 1 in each row, at the letter's number
    return Value([[float(i == letter) for i in range(n_letters)] for letter in ids])


def logits(ids: list[int], w: Weights) -> Value:
    """Map the numbers of J letters to scores for the letter after each: (J, letters)."""
    x = one_hot(ids, len(w['embedding'].rows)) @ w['embedding']              # (J, D)
    for n in range(len(LAYERS)):
        x = descend(x, w, n)
    return norm(x, w['gain']) @ w['head'].T


def word_loss(ids: list[int], w: Weights) -> Value:
    """Add up -log p of all letters but the first: (1, 1). p is the softmax of the scores."""
    scores = logits(ids[:-1], w)                                             # (J, letters)
    scores_of_next = row_sums(scores * one_hot(ids[1:], scores.shape[1]))
    return total(logsumexp(scores) - scores_of_next)


# Training: Adam moves the weights down the loss, whose gradient goes through those in the layers.
def train(words: list[list[int]], w: Weights, steps: int, batch_size: int = 4,
          learning_rate: float = 0.02) -> list[float]:
    """Change the weights in `w`, and return the loss of each step, in nats a letter. Words are
    given by the numbers of their letters."""
    m = {name: 0 * w[name] for name in w}  # the mean of recent gradients
    v = {name: 0 * w[name] for name in w}  # the mean of their squares
    losses = []
    for step in range(1, steps + 1):
        batch = random.choices(words, k=batch_size)
        n_letters = sum(len(ids) - 1 for ids in batch)
        loss = sum(word_loss(ids, w) for ids in batch) * (1 / n_letters)
        rate = learning_rate * (1 - (step - 1) / steps)
        for name, g in zip(w, gradients(loss, list(w.values())), strict=True):
            # A step of Adam is the mean gradient over the root of the mean square. Both means start
            # from zero, which is corrected. Value(x.rows) is x without its parents
            m[name] = Value((0.9 * m[name] + 0.1 * g).rows)
            v[name] = Value((0.95 * v[name] + 0.05 * g * g).rows)
            mean = m[name] * (1 / (1 - 0.9 ** step))
            root = (v[name] * (1 / (1 - 0.95 ** step))) ** 0.5 + 1e-8
            w[name] = Value((w[name] - rate * mean * root ** -1).rows)
        losses.append(loss.rows[0][0])
        if step == 1 or step % 100 == 0:
            recent = losses[-100:]
            print(f'step {step}: training loss {sum(recent) / len(recent):.3f} nats a letter',
                  flush=True)
    return losses


# Sampling: the model writes words of its own, letter by letter, and shows how its energies fall.
def sample(letters: list[str], w: Weights, temperature: float = 0.7) -> str:
    ids = [letters.index(END)]
    for _ in range(30):
        scores = logits(ids, w).rows[-1]
        chances = [math.exp(score / temperature) for score in scores]
        ids.append(random.choices(range(len(letters)), chances)[0])
        if letters[ids[-1]] == END:
            break
    return ''.join(letters[i] for i in ids).strip(END)


def main(path: str | None = None, steps: int = 700) -> None:
    random.seed(0)
    words = read_words(path) if path else TOWNS.split()
    letters = sorted(set(END.join(words) + END))
    ids = [[letters.index(letter) for letter in END + word + END] for word in words]
    w = new_weights(len(letters))
    n_weights = sum(x.shape[0] * x.shape[1] for x in w.values())
    print(f'{len(words)} words of {len(letters) - 1} letters, {n_weights} weights')
    train(ids, w, steps)
    drawn = [sample(letters, w) for _ in range(16)]
    print('new:', ', '.join(word for word in drawn if word not in words))
    print('in the list:', ', '.join(word for word in drawn if word in words))
    # Divide each layer's step into four, and print the change of its energy after each of them, for
    # the first word. The layers were trained with one step
    x = one_hot(ids[0], len(letters)) @ w['embedding']
    for n, energy in enumerate(LAYERS):
        h = norm(x, w['gain', n])
        energies = []
        for T in range(5):
            after = descend(x, w, n, T, eta=1 / 4)
            u = norm(after, w['gain', n])
            energies.append(total(energy(u, h, w, n)).rows[0][0])
        changes = [round(E - energies[0], 2) for E in energies]
        print(f'{energy.__name__} energy of {words[0]}: {changes}')
        x = after


if __name__ == '__main__':
    print(__doc__) if '--help' in sys.argv else main(*sys.argv[1:2])
