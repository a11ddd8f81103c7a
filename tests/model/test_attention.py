"""`attend` against a float64 softmax over an explicit mask, at every shape that takes another path."""

import pytest
import torch

from nanolearn.model import attention
from nanolearn.model.attention import attend, describe, window_mask


def reference(q, k, v, window):
    """Float64, one loop over queries: no mask and no kernel to share a fault with."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    per_kv = q.size(2) // k.size(2)
    for h in range(q.size(2)):
        for i in range(q.size(1)):
            start = max(0, i - window)
            scores = k[:, start : i + 1, h // per_kv] @ q[:, i, h].unsqueeze(-1) / q.size(-1) ** 0.5
            out[:, i, h] = (scores.softmax(1) * v[:, start : i + 1, h // per_kv]).sum(1)
    return out


SHAPES = [
    pytest.param(16, 4, 4, 16, id="full"),
    pytest.param(16, 4, 4, 10, id="window in one masked call"),
    pytest.param(16, 4, 4, 4, id="window in blocks"),
    pytest.param(17, 4, 2, 4, id="ragged blocks, grouped queries"),
    pytest.param(1, 4, 4, 4, id="one token"),
    pytest.param(9, 2, 1, 1, id="window of one"),
]


@pytest.mark.parametrize("T, H, KV, window", SHAPES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_forward_and_backward_match_float64(T, H, KV, window, dtype, tolerance):
    g = torch.manual_seed(0)
    q, k, v = (torch.randn(2, T, n, 8, generator=g, dtype=dtype, requires_grad=True) for n in (H, KV, KV))
    upstream = torch.randn(2, T, H, 8, generator=g, dtype=dtype)
    y = attend(q, k, v, window)
    expected = reference(q, k, v, window)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=tolerance)
    got = torch.autograd.grad(y, (q, k, v), upstream)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream.double())
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=10 * tolerance)


def test_a4_large_scores_do_not_leak_through_the_mask():
    # A mask of -20 or -1e4 instead of -inf lets a hidden key with a score of 1e5 through.
    q = torch.full((1, 4, 1, 1), 1e3)
    k = torch.tensor([1e2, 1.0, 1.0, 1.0]).view(1, 4, 1, 1)
    v = torch.tensor([100.0, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)
    y = attend(q, k, v, window=1)
    assert y[0, 2:, 0, 0].max() <= 3.0


def test_a3_memory_grows_with_the_window_and_not_with_the_square():
    T, window = 4096, 64
    masks = [window_mask(window, 2 * window, window, window, torch.device("cpu")).numel()]
    saved = []
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t)
    q = torch.randn(1, T, 1, 8, requires_grad=True)
    with pack:
        attend(q, q, q, window)
    assert max(saved + masks) <= 4 * T * window  # a dense mask alone would be T * T = 64 * T * window


@pytest.mark.parametrize(
    ("T", "windows", "device", "said"),
    [
        (256, (128, 128, 128, 256), "cpu", ["3 layers masked whole (window 128 of 256)", "1 layer causal"]),
        (2048, (512, 2048), "cuda", ["1 layer in blocks", "(window 512 of 2048)", "1 layer causal", "rules out"]),
        (2048, (2048, 2048), "cuda", ["scaled_dot_product_attention: 2 layers causal"]),
    ],
)
def test_a6_what_is_said_is_what_is_done(monkeypatch, T, windows, device, said):
    text = describe(T, windows, device)
    for words in said:
        assert words in text
    assert ("flash" in text) == (device == "cuda" and min(windows) < T)
    calls = []
    monkeypatch.setattr(attention, "_blocked", lambda q, *_: calls.append("in blocks") or q)
    sdpa = attention.F.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda q, k, v, is_causal=False, **rest: (
            calls.append("causal" if is_causal else "masked") or sdpa(q, k, v, is_causal=is_causal, **rest)
        ),
    )
    for window in windows:
        attend(*[torch.zeros(1, T, 1, 2)] * 3, window)
    for way in ("causal", "masked", "in blocks"):
        assert (way in calls) == (way in text)
