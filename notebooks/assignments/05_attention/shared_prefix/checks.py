"""Checks of shared_prefix. The expected values come from loops over queries in float64."""

import torch

# One document, none, no prefix, short and long documents; the ways they ask for.
ROWS = {
    "one document": (3, [5]),
    "no document": (6, []),
    "no prefix": (0, [4, 3, 5]),
    "many short ones": (2, [3, 1, 4, 2, 3]),
    "a long prefix": (20, [2, 3, 1]),
    "one long one": (1, [14, 2]),
}
WAYS = {
    "one document": "causal",
    "no document": "causal",
    "no prefix": "split",
    "many short ones": "split",
    "a long prefix": "masked",
    "one long one": "masked",
}


def visible(prefix, lengths, i):
    owner = [-1] * prefix + [n for n, length in enumerate(lengths) for _ in range(length)]
    return [j for j in range(i + 1) if owner[j] == -1 or owner[j] == owner[i]]


def expected(q, k, v, prefix, lengths):
    q, k, v = q.double(), k.double(), v.double()
    group = q.size(2) // k.size(2)
    rows = []
    for i in range(q.size(1)):
        seen = visible(prefix, lengths, i)
        heads = []
        for h in range(q.size(2)):
            scores = k[:, seen, h // group] @ q[:, i, h].unsqueeze(-1) / q.size(3) ** 0.5
            heads.append((scores.softmax(1) * v[:, seen, h // group]).sum(1))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows, 1)


def drawn(prefix, lengths, seed=0, dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    T = prefix + sum(lengths)
    return [scale * torch.randn(2, T, n, 8, generator=g, dtype=dtype) for n in (4, 2, 2)]


def check_mask(answer):
    """Every query sees the prefix and its own document up to itself."""
    for name, (prefix, lengths) in ROWS.items():
        mask = answer.shared_prefix_mask(prefix, lengths)
        T = prefix + sum(lengths)
        assert isinstance(mask, torch.Tensor) and mask.shape == (T, T), f"{name}: one line a query, one column a key"
        for i in range(T):
            got = [j for j in range(T) if bool(mask[i, j])]
            assert got == visible(prefix, lengths, i), (
                f"{name}, query {i}: ask of each key whether it is later, in the prefix, or another document's"
            )


def check_route(answer):
    """The way follows from the number of scores."""
    for name, (prefix, lengths) in ROWS.items():
        assert answer.route(prefix, lengths) == WAYS[name], f"{name}: count the scores that each way forms"
    # At the border: 2 documents of 4 after no prefix form exactly half.
    assert answer.route(0, [4, 4]) == "split", "at most half includes half"
    assert answer.route(1, [4, 4]) == "masked", "the prefix counts twice: for itself, and before each document"


def check_values(answer):
    """Right in float64 and float32 on every kind of row, grouped queries included."""
    for name, (prefix, lengths) in ROWS.items():
        for dtype, allowed in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            q, k, v = drawn(prefix, lengths, dtype=dtype)
            y = answer.attend(q, k, v, prefix, lengths)
            assert y.shape == q.shape and y.dtype == dtype, f"{name}: shape and dtype are the queries'"
            error = float((y.double() - expected(q, k, v, prefix, lengths)).abs().max())
            assert error < allowed, f"{name}, {dtype}: {error:.1e} off; compare a row with a loop over its queries"


def check_gradients(answer):
    """The backward reaches queries, keys and values, the shared ones from every document."""
    for name, (prefix, lengths) in ROWS.items():
        inputs = [t.requires_grad_() for t in drawn(prefix, lengths, seed=1)]
        upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        y = answer.attend(*inputs, prefix, lengths)
        assert y.requires_grad, f"{name}: the output must know where it came from"
        got = torch.autograd.grad(y, inputs, upstream, allow_unused=True)
        wanted = torch.autograd.grad(expected(*inputs, prefix, lengths), inputs, upstream)
        for part, a, b in zip("qkv", got, wanted, strict=True):
            assert a is not None and float((a - b).abs().max()) < 1e-9, (
                f"{name}: the gradient of {part}; a shared key hears from everybody who looks at it"
            )


def check_hidden_keys(answer):
    """Large scores do not get through a mask."""
    for prefix, lengths in ROWS.values():
        if len(lengths) < 2:
            continue
        q, k, v = drawn(prefix, lengths, seed=3, scale=40.0)
        first = slice(prefix, prefix + lengths[0])
        k2, v2 = k.clone(), v.clone()
        k2[:, first], v2[:, first] = 1e4, 1e4
        a, b = (answer.attend(q, *kv, prefix, lengths) for kv in ((k, v), (k2, v2)))
        after = prefix + lengths[0]
        assert torch.equal(a[:, after:], b[:, after:]), "a hidden score needs a value that no score can be below"
        assert torch.equal(a[:, :prefix], b[:, :prefix]), "the prefix sees no document"


def check_memory(answer):
    """Split keeps no square for the backward."""
    prefix, lengths = 8, [8] * 40
    T = prefix + sum(lengths)
    assert answer.route(prefix, lengths) == "split", "count the scores that each way forms"
    kept = []
    inputs = [t.requires_grad_() for t in drawn(prefix, lengths, dtype=torch.float32)]
    small = [t[:1, :, :1, :4] for t in inputs]

    def keep(tensor):
        kept.append(max(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        answer.attend(*small, prefix, lengths)
    assert kept and max(kept) < T * T, "a square of all queries by all keys is kept: compute each document apart"
