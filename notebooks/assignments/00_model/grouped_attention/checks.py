"""Checks of grouped attention against loops over single numbers in float64."""

import math

import torch


def _drawn(seed, B=2, T=7, H=5, G=3, D=4, dtype=torch.float64, size=1.0):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, T, n, D, generator=draw, dtype=torch.float64) * size for n in (H, G, G))
    owner = torch.randint(0, G, (H,), generator=draw).tolist()
    real = torch.randint(0, T + 1, (B,), generator=draw).tolist()
    return q.to(dtype), k.to(dtype), (v / size).to(dtype), owner, real


def _expected(q, k, v, owner, real):
    """The statement as loops: one query at a time, in float64."""
    B, T, H, D = q.shape
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(B, T, H, D, dtype=torch.float64)
    for b in range(B):
        for i in range(real[b]):
            for h in range(H):
                keys, values = k[b, : i + 1, owner[h]], v[b, : i + 1, owner[h]]
                scores = keys @ q[b, i, h] / math.sqrt(D)
                weights = (scores - scores.max()).exp()
                out[b, i, h] = (weights / weights.sum()) @ values
    return out


def _close(found, wanted, tolerance, said):
    assert isinstance(found, torch.Tensor), "return a tensor"
    assert found.shape == wanted.shape, f"the shape is {tuple(found.shape)}; one row for each query head is asked for"
    error = (found.double() - wanted).abs().max().item()
    assert math.isfinite(error), f"{said}: the output has NaN or infinity in it"
    assert error <= tolerance, f"{said}: off by {error:.2g}"


def check_two_tokens_by_hand(answer):
    """two positions, one head: the second averages both values by the softmax of its scores"""
    q = torch.tensor([[[[2.0]], [[2.0]]]])
    k = torch.tensor([[[[0.0]], [[math.log(3.0) / 2]]]])
    v = torch.tensor([[[[1.0]], [[5.0]]]])
    found = answer.grouped_attention(q, k, v, [0], [2]).flatten().tolist()
    assert abs(found[0] - 1.0) < 1e-6, (
        f"the first position sees itself alone, so it gives its own value, not {found[0]}"
    )
    assert abs(found[1] - 4.0) < 1e-5, f"scores 0 and ln 3 weigh 1/4 and 3/4: 1/4 + 15/4, not {found[1]}"


def check_against_float64(answer):
    """random inputs in float64 and float32, all positions real"""
    for seed in range(20):
        q, k, v, owner, _ = _drawn(seed)
        full = [q.size(1)] * q.size(0)
        wanted = _expected(q, k, v, owner, full)
        _close(answer.grouped_attention(q, k, v, owner, full), wanted, 1e-10, "float64 inputs")
        narrow = answer.grouped_attention(q.float(), k.float(), v.float(), owner, full)
        assert narrow.dtype == torch.float32, f"float32 came in, {narrow.dtype} came out"
        _close(narrow, wanted, 2e-5, "float32 inputs")
    q, k, v, owner, full = *_drawn(3, dtype=torch.bfloat16, size=4.0)[:4], [7, 7]
    found = answer.grouped_attention(q, k, v, owner, full)
    assert found.dtype == torch.bfloat16, f"bfloat16 came in, {found.dtype} came out"
    # The output alone is rounded: half a step of bfloat16 between 2 and 4 is 2^-7, rounded up.
    _close(found, _expected(q, k, v, owner, full), 0.012, "bfloat16 inputs, scores and softmax in float32")


def check_owners(answer):
    """heads share groups as owner says: in any order, unevenly, with a group that nobody reads"""
    for owner in ([2, 0, 2, 2, 1], [0, 0, 0, 0, 0], [1, 1, 2, 1, 2], [2, 1, 0, 1, 2]):
        q, k, v, _, _ = _drawn(11)
        found = answer.grouped_attention(q, k, v, owner, [7, 7])
        _close(found, _expected(q, k, v, owner, [7, 7]), 1e-10, f"owner {owner}: whose keys does each head read?")
    q, k, v, _, _ = _drawn(12, G=5)
    identity = answer.grouped_attention(q, k, v, list(range(5)), [7, 7])
    _close(identity, _expected(q, k, v, list(range(5)), [7, 7]), 1e-10, "as many groups as heads")


def check_large_scores(answer):
    """what is hidden stays hidden however large the scores are: change the future, the past stays"""
    for size in (10.0, 200.0):
        q, k, v, owner, _ = _drawn(21, size=size)
        before = answer.grouped_attention(q, k, v, owner, [7, 7])
        k2, v2 = k.clone(), v.clone()
        k2[:, 5:] = q.abs().max() * 3 * torch.sign(q[:, 4:5].mean(2, keepdim=True))
        v2[:, 5:] = 1e6
        after = answer.grouped_attention(q, k2, v2, owner, [7, 7])
        moved = (after[:, :5] - before[:, :5]).abs().max().item()
        assert moved == 0.0, (
            f"later keys moved earlier outputs by {moved:.2g}: how small is a weight that must be zero?"
        )
        _close(before, _expected(q, k, v, owner, [7, 7]), 1e-9, "large scores")
    down = torch.full((1, 3, 1, 2), -300.0, dtype=torch.float64)
    up = torch.full((1, 3, 1, 2), 300.0, dtype=torch.float64)
    found = answer.grouped_attention(
        down, up, torch.tensor([1.0, 2.0, 6.0]).double().view(1, 3, 1, 1).expand(1, 3, 1, 2), [0], [3]
    )
    _close(found[0, :, 0, 0], torch.tensor([1.0, 1.5, 3.0]).double(), 1e-9, "all visible scores are far below zero")


def check_rows_that_end_early(answer):
    """positions that are not real give zeros, and are seen by nobody; an empty row is all zeros"""
    for seed in range(20):
        q, k, v, owner, real = _drawn(30 + seed)
        _close(answer.grouped_attention(q, k, v, owner, real), _expected(q, k, v, owner, real), 1e-10, f"real {real}")
    q, k, v, owner, _ = _drawn(50)
    empty = answer.grouped_attention(q, k, v, owner, [0, 7])
    assert not empty[0].isnan().any(), "a row without a real position is NaN: what is the softmax of nothing?"
    assert empty[0].abs().max() == 0, "a row without a real position gives zeros"


def check_gradients(answer):
    """gradients are finite and right, for rows that end early too"""
    q, k, v, owner, _ = _drawn(60, T=4)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    answer.grouped_attention(*inputs, owner, [2, 0]).square().sum().backward()
    for name, t in zip("qkv", inputs, strict=True):
        assert t.grad is not None and t.grad.isfinite().all(), f"the gradient of {name} is not finite"
    assert inputs[2].grad[1].abs().max() == 0, "values of an empty row have no influence"
    step = 1e-6
    moved = v.clone()
    moved[0, 1, owner[0], 0] += step
    rise = _expected(q, k, moved, owner, [2, 0]).square().sum() - _expected(q, k, v, owner, [2, 0]).square().sum()
    assert abs(inputs[2].grad[0, 1, owner[0], 0].item() - rise.item() / step) < 1e-3, "the gradient of v is off"
