"""Every backend against a float64 loop over queries, at every shape that takes another path.

What no CPU runs is simulated: FlashAttention's kernels by the loop itself behind their own signatures, FlexAttention by
torch's uncompiled form with its refusal of a CPU's backward taken away.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from nanolearn.errors import UserError
from nanolearn.model import kernels
from nanolearn.model.attention import BACKENDS, attend


def reference(q, k, v, window, documents=None):
    """Float64, one loop over queries: no mask and no kernel to share a fault with."""
    q, k, v = q.double(), k.double(), v.double()
    B, T, H, D = q.shape
    S, out = k.size(1), []
    for b in range(B):
        for i in range(T):
            at = i + S - T
            seen = list(range(max(0, at - window), at + 1))
            if documents is not None:
                seen = [j for j in seen if documents[b, j] == documents[b, at]]
            for h in range(H):
                kv = h // (H // k.size(2))
                scores = k[b, seen, kv] @ q[b, i, h] / D**0.5
                out.append(scores.softmax(0) @ v[b, seen, kv])
    return torch.stack(out).view(B, T, H, D)


def fake_package(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
    """flash_attn_varlen_func, by the reference. Causal is aligned at the end, as in FlashAttention from 2.1 on."""
    assert causal and window_size[1] == 0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    back = window_size[0] if window_size[0] >= 0 else max_seqlen_k
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q >= max(b - a for a, b in zip(ends_q, ends_q[1:], strict=False))
    spans = zip(zip(ends_q, ends_q[1:], strict=False), zip(ends_k, ends_k[1:], strict=False), strict=True)
    parts = [reference(q[None, a:b], k[None, c:d], v[None, c:d], back)[0] for (a, b), (c, d) in spans]
    return torch.cat(parts).to(q.dtype)


def fake_torch(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    """torch.nn.attention.varlen.varlen_attn: grouped queries must be announced."""
    assert enable_gqa == (q.size(1) != k.size(1))
    return fake_package(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, True, window_size)


def install(monkeypatch, name: str, **contents) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def simulated(monkeypatch):
    """Kernels of other machines."""
    from torch.nn.attention import flex_attention

    kernels.loaded.cache_clear()
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    # As FlashAttention 3 did at first, the row sums come back as well.
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=lambda *a, **k: (fake_package(*a, **k), None))
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=fake_package)
    yield monkeypatch
    kernels.loaded.cache_clear()


# B, T_q, T_k, H, KV, window, documents
SHAPES = {
    "full": (2, 16, 16, 4, 4, 16, False),
    "window in one masked call": (2, 16, 16, 4, 4, 10, False),
    "window in blocks": (2, 16, 16, 4, 4, 4, False),
    "ragged blocks, grouped queries": (2, 17, 17, 4, 2, 4, False),
    "one token": (1, 1, 1, 4, 4, 4, False),
    "window of one": (2, 9, 9, 2, 1, 1, False),
    "window of nothing but oneself": (2, 5, 5, 2, 2, 0, False),
    "packed, full": (2, 16, 16, 4, 2, 16, True),
    "packed, window in one masked call": (2, 12, 12, 2, 2, 7, True),
    "packed, window in ragged blocks": (2, 19, 19, 2, 1, 4, True),
    "cache, full": (2, 5, 16, 4, 2, 16, False),
    "cache, one query": (2, 1, 16, 4, 2, 16, False),
    "cache, one query and a window": (2, 1, 16, 2, 2, 4, False),
    "cache, window in one masked call": (2, 5, 16, 2, 2, 4, False),
    "cache, window in ragged blocks": (2, 11, 16, 2, 1, 3, False),
    "cache shorter than the window, in blocks": (2, 11, 13, 2, 2, 4, False),
    "cache and documents, in blocks": (2, 11, 16, 2, 1, 3, True),
}


def drawn(B, T, S, H, KV, documents, dtype):
    g = torch.manual_seed(0)
    shapes = ((B, T, H, 8), (B, S, KV, 8), (B, S, KV, 8))
    q, k, v = (torch.randn(shape, generator=g, dtype=dtype, requires_grad=True) for shape in shapes)
    # Boundaries at other places in each row, one of them between a block's keys and its queries.
    ids = (torch.rand(B, S, generator=g) < 0.3).cumsum(1) if documents else None
    return q, k, v, torch.randn(B, T, H, 8, generator=g, dtype=dtype), ids


def compare(backend, shape, dtype, tolerance):
    B, T, S, H, KV, window, documents = shape
    q, k, v, upstream, ids = drawn(B, T, S, H, KV, documents, dtype)
    y = attend(q, k, v, window, backend, ids)
    assert y.shape == q.shape and y.dtype == dtype
    expected = reference(q, k, v, window, ids)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=tolerance)
    got = torch.autograd.grad(y, (q, k, v), upstream)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream.double())
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
def test_what_runs_everywhere_matches_float64(backend, shape, dtype, tolerance):
    compare(backend, shape, dtype, tolerance)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", ["flex", "flash2", "flash3"])
def test_what_needs_a_gpu_is_asked_the_same_question(simulated, backend, shape):
    *_, T, S, _, _, _, documents = (None, *shape)
    if documents and T != S and backend != "flex":
        with pytest.raises(UserError, match="whole rows only"):
            compare(backend, shape, torch.float64, 1e-12)
        return
    compare(backend, shape, torch.float64, 1e-12)


def test_torchs_own_flash_is_taken_where_the_package_is_missing(simulated):
    simulated.delitem(sys.modules, "flash_attn")
    simulated.setattr("torch.nn.attention.varlen.varlen_attn", fake_torch)
    assert kernels.source("flash2") == "torch.nn.attention.varlen"
    for name in ("ragged blocks, grouped queries", "packed, full", "cache, one query and a window"):
        compare("flash2", SHAPES[name], torch.float64, 1e-12)


def test_a_kernel_of_the_hub_is_called_like_the_package(simulated):
    asked = []
    simulated.delitem(sys.modules, "flash_attn_interface")
    hub = ModuleType("hub")
    hub.flash_attn_varlen_func = fake_package
    install(simulated, "kernels", get_kernel=lambda name, version: asked.append((name, version)) or hub)
    compare("flash3", SHAPES["packed, full"], torch.float64, 1e-12)
    assert asked == [(kernels.HUB, 1)]


@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
def test_a4_large_scores_do_not_leak_through_the_mask(backend):
    # A mask of -20 or -1e4 instead of -inf lets a hidden key with a score of 1e5 through.
    q = torch.full((1, 4, 1, 1), 1e3)
    k = torch.tensor([1e2, 1.0, 1.0, 1.0]).view(1, 4, 1, 1)
    v = torch.tensor([100.0, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)
    y = attend(q, k, v, 1, backend)
    assert y[0, 2:, 0, 0].max() <= 3.0
    documents = torch.tensor([[0, 1, 1, 1]])
    assert attend(q, k, v, 4, backend, documents)[0, 1:, 0, 0].max() <= 3.0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_no_backend_sees_the_future_or_another_document(simulated, backend):
    g = torch.manual_seed(1)
    q, k, v = (torch.randn(1, 20, 2, 8, generator=g) for _ in range(3))
    documents = torch.tensor([[0] * 7 + [1] * 13])
    before = attend(q, k, v, 5, backend, documents)
    for changed, untouched in ((slice(14, 20), slice(0, 14)), (slice(0, 7), slice(7, 20))):
        k2, v2 = k.clone(), v.clone()
        k2[:, changed], v2[:, changed] = 50.0, 50.0
        after = attend(q, k2, v2, 5, backend, documents)
        assert torch.equal(after[:, untouched], before[:, untouched])
        assert not torch.equal(after[:, changed], before[:, changed])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_keeps_its_mask_by_shape_and_not_with_documents(simulated):
    made = []
    block_mask = kernels.block_mask
    simulated.setattr(kernels, "block_mask", lambda *key: made.append("anew") or block_mask(*key))
    q = torch.randn(1, 16, 1, 8)
    kernels.flex(q, q, q, 4)
    misses = kernels._kept_block_mask.cache_info().misses
    kernels.flex(q, q, q, 4)
    assert kernels._kept_block_mask.cache_info().misses == misses and made == []
    kernels.flex(q, q, q, 4, torch.zeros(1, 16, dtype=torch.long))
    assert made == ["anew"]


@pytest.mark.slow  # dynamo traces each backend
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["blocked", "sdpa", "flex"])
def test_a_compiled_caller_gets_the_same_without_a_graph_break(backend):
    """Traced, not generated: what it finds are graph breaks and caches that a trace can't follow."""
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    g = torch.manual_seed(2)
    q, k, v = (torch.randn(1, 19, 2, 8, generator=g) for _ in range(3))
    for documents in (None, torch.tensor([[0] * 7 + [1] * 12])):
        torch.testing.assert_close(compiled(q, k, v, 4, backend, documents), attend(q, k, v, 4, backend, documents))
