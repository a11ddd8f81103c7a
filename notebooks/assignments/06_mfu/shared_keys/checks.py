"""Checks of the FLOP count: pairs against a list of all pairs, costs against differences between two models."""

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class _Layer:
    n_kv_head: int
    window: int
    sinks: int
    keys_from: int | None = None


@dataclass(frozen=True)
class _Model:
    n_embd: int
    n_head: int
    head_dim: int
    hidden: int
    vocab_size: int
    layers: tuple[_Layer, ...]


def _pairs(length, window, sinks):
    return sum(1 for i in range(length) for j in range(i + 1) if j >= i - window or j < sinks)


def _drawn(seed):
    draw = random.Random(seed)
    kv, group = draw.randint(1, 3), draw.randint(1, 4)
    layers = []
    for number in range(draw.randint(1, 5)):
        source = draw.choice([None, draw.randrange(number)]) if number else None
        layers.append(_Layer(kv, draw.randint(0, 30), draw.randint(0, 6), source))
    model = _Model(
        draw.randint(1, 40), kv * group, draw.randint(1, 8), draw.randint(1, 90), draw.randint(1, 99), tuple(layers)
    )
    return model, draw.randint(1, 24)


def _wanted(model, length):
    weights, looked = model.n_embd * model.vocab_size, 0
    for layer in model.layers:
        own = 0 if layer.keys_from is not None else 2 * layer.n_kv_head
        weights += model.n_embd * model.head_dim * (2 * model.n_head + own) + 2 * model.n_embd * model.hidden
        looked += _pairs(length, layer.window, layer.sinks) * 2 * model.n_head * model.head_dim
    return 6 * (weights * length + looked)


def check_worked_example(answer):
    """five tokens, one key back, two sinks: 1 + 2 + 3 + 4 + 4 pairs"""
    found = answer.visible_pairs(5, 1, 2)
    assert found == 14, f"{found} pairs for 5 tokens, window 1, 2 sinks: write down what each of the five queries sees"


def check_pairs(answer):
    """pairs are those of a list of all pairs, whatever window and sinks are"""
    cases = [(1, 0, 0), (7, 0, 0), (7, 0, 3), (7, 99, 0), (7, 2, 99), (7, 99, 99), (6, 2, 3), (12, 3, 1)]
    draw = random.Random(1)
    cases += [(draw.randint(1, 40), draw.randint(0, 45), draw.randint(0, 45)) for _ in range(200)]
    for length, window, sinks in cases:
        found, wanted = answer.visible_pairs(length, window, sinks), _pairs(length, window, sinks)
        hint = "is the query's own key in it, and is a key that is both sink and in the window counted once?"
        assert found == wanted, f"{length} tokens, window {window}, {sinks} sinks: {found} pairs; {hint}"


def check_weights(answer):
    """doubling the head or the MLP adds three products of its size"""
    for seed in range(40):
        model, length = _drawn(100 + seed)
        base = answer.training_flops(model, length)
        grown = answer.training_flops(replace(model, vocab_size=2 * model.vocab_size), length)
        assert grown - base == 6 * length * model.n_embd * model.vocab_size, (
            "twice the vocabulary: which tables multiply, which are looked up, and how many products has a backward?"
        )
        grown = answer.training_flops(replace(model, hidden=2 * model.hidden), length)
        added = 6 * length * 2 * model.n_embd * model.hidden * len(model.layers)
        assert grown - base == added, (
            "twice the hidden size of the MLP: two matrices in each layer, three products each"
        )


def check_grouped_queries(answer):
    """fewer key-value heads make the projections cheaper, and attention not"""
    for seed in range(40):
        draw = random.Random(seed)
        one = _Layer(1, draw.randint(0, 9), draw.randint(0, 3))
        model, length = _Model(16, 12, 4, 20, 30, (one, one)), draw.randint(2, 30)
        many = replace(model, layers=(replace(one, n_kv_head=12), replace(one, n_kv_head=12)))
        saved = answer.training_flops(many, length) - answer.training_flops(model, length)
        assert saved == 6 * length * 2 * (16 * 2 * 11 * 4), (
            "1 instead of 12 key-value heads: every query head still looks at every visible key; what gets smaller?"
        )


def check_shared_keys(answer):
    """a layer that uses another's keys saves the two matrices, and no pair"""
    for seed in range(40):
        draw = random.Random(seed)
        layers = tuple(_Layer(2, draw.randint(0, 9), draw.randint(0, 3)) for _ in range(3))
        model, length = _Model(10, 4, 6, 8, 12, layers), draw.randint(2, 30)
        shared = replace(model, layers=(layers[0], replace(layers[1], keys_from=0), layers[2]))
        saved = answer.training_flops(model, length) - answer.training_flops(shared, length)
        assert saved == 6 * length * 2 * 10 * 2 * 6, (
            "a layer with keys_from set: it makes no keys and values, and its queries look at as many as before"
        )


def check_whole_models(answer):
    """all parts together, for models of all shapes"""
    for seed in range(200):
        model, length = _drawn(1000 + seed)
        found, wanted = answer.training_flops(model, length), _wanted(model, length)
        assert found == wanted, (
            f"{model} on {length} tokens: {found}, and {wanted} is right; count one layer by hand: q and out, k and v "
            "if its own, two of the MLP, pairs twice"
        )


def check_large_numbers(answer):
    """exact whole numbers for a large model on a long row"""
    layers = tuple(_Layer(8, 1023 + number, 4) for number in range(3))
    model, length = _Model(53249, 128, 129, 212993, 262147, layers), 4099
    weights = model.n_embd * model.vocab_size
    weights += 3 * model.n_embd * (model.head_dim * (2 * 128 + 2 * 8) + 2 * model.hidden)
    pairs = 0
    for layer in layers:
        pairs += sum(min(i, layer.window) + 1 + min(4, max(0, i - layer.window)) for i in range(length))
    found = answer.training_flops(model, length)
    assert isinstance(found, int), f"{type(found).__name__}: FLOPs are counted, so the result is a whole number"
    assert found == 6 * (weights * length + pairs * 2 * 128 * 129), (
        "close is not equal: above 2^53 a float no longer holds every whole number, and a mean over queries is rounded"
    )
