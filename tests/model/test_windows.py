"""The portable windows: masks counted by hand, memory, and that a masked row is worth nothing and no NaN."""

import pytest
import torch
import torch.nn.functional as F

from nanolearn.model import windows
from nanolearn.model.windows import BLOCKED, CAUSAL, MASKED, blocked, document_ids, way, whole, window_mask

CPU = torch.device("cpu")


def test_a_mask_holds_what_the_definition_says():
    mask = window_mask(7, 10, 2, 3, CPU)
    for i in range(7):
        for j in range(10):
            assert bool(mask[i, j]) == (i + 3 - 2 <= j <= i + 3)


@pytest.mark.parametrize(
    ("queries", "keys", "window", "documents", "expected"),
    [
        (16, 16, 16, False, CAUSAL),
        (16, 16, 15, False, CAUSAL),
        (16, 16, 14, False, MASKED),
        (16, 16, 8, False, MASKED),
        (17, 17, 8, False, BLOCKED),
        (16, 16, 16, True, MASKED),
        (17, 17, 8, True, BLOCKED),
        (1, 16, 16, False, CAUSAL),
        (4, 16, 16, False, MASKED),
        (3, 3, 0, False, BLOCKED),
        (1, 1, 0, False, CAUSAL),
    ],
)
def test_the_way_by_shape(queries, keys, window, documents, expected):
    assert way(queries, keys, window, documents) == expected


def kept(attend, T: int, window: int) -> int:
    """Numbers of the largest tensor that autograd keeps."""
    saved = []
    q = torch.randn(1, T, 1, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        attend(q, q, q, window)
    return max(saved)


def test_a3_memory_grows_with_the_window_and_not_with_the_square():
    T, window = 4096, 64
    assert kept(blocked, T, window) <= 2 * T * 8  # keys beside the block before: twice (T, D), and no mask is larger
    assert kept(whole, T, window) >= T * T


def test_one_mask_serves_every_block_row_and_layer(monkeypatch):
    made = []
    monkeypatch.setattr(windows, "kept_mask", lambda *key: made.append(key) or window_mask(*key))
    q = torch.randn(3, 64, 2, 4)
    for _ in range(4):
        blocked(q, q, q, 8)
    assert set(made) == {(8, 16, 8, 8, CPU)}


def test_a_cache_longer_than_the_window_is_cut_before_anything_is_computed(monkeypatch):
    shapes = []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(
        windows.F,
        "scaled_dot_product_attention",
        lambda q, k, v, **rest: shapes.append((k.size(2), rest["attn_mask"])) or sdpa(q, k, v, **rest),
    )
    k = torch.randn(1, 1000, 1, 4)
    blocked(k[:, :1], k, k, window=9)
    assert shapes == [(10, None)]  # one query and the ten keys that it sees: no mask is needed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a4_a_fully_masked_row_gives_zeros_and_no_nan(dtype):
    """Only padding meets it here, but a NaN there would spoil every gradient. It is torch's promise, since 2.5."""
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    q = torch.randn(1, 2, 4, 8, dtype=dtype, requires_grad=True)
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    y.sum().backward()
    assert torch.equal(y[:, :, 2], torch.zeros(1, 2, 8, dtype=dtype))
    assert not q.grad.isnan().any()


def test_documents_are_numbered_from_their_first_token():
    tokens = torch.tensor([[9, 1, 2, 9, 3], [4, 9, 9, 5, 6]])
    assert document_ids(tokens, bos=9).tolist() == [[1, 1, 1, 2, 2], [0, 1, 2, 2, 2]]
