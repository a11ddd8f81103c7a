"""The chunked loss against torch's cross-entropy on full logits in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from nanolearn.model import loss


def setup(n=37, width=8, vocab=50, padded=64, dtype=torch.float64):
    g = torch.manual_seed(0)
    x = torch.randn(n, width, generator=g, dtype=dtype, requires_grad=True)
    w = torch.randn(padded, width, generator=g, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocab, (n,), generator=g)
    targets[::5] = loss.IGNORE
    return x, w, targets, vocab


def full(x, w, targets, vocab):
    logits = loss.softcap(x @ w.t())[:, :vocab]
    return F.cross_entropy(logits, targets, ignore_index=loss.IGNORE, reduction="sum")


@pytest.mark.parametrize("chunk", [64, 64 * 10, 1 << 20], ids=["one row", "ten rows", "all"])
def test_loss_and_gradients_equal_full_logits(monkeypatch, chunk):
    monkeypatch.setattr(loss, "CPU_CHUNK", chunk)
    x, w, targets, vocab = setup()
    got, wanted = loss.chunked_loss(x, w, targets, vocab), full(x, w, targets, vocab)
    torch.testing.assert_close(got, wanted)
    for a, b in zip(torch.autograd.grad(2 * got, (x, w)), torch.autograd.grad(2 * wanted, (x, w)), strict=True):
        torch.testing.assert_close(a, b)


def test_nats_of_each_token_sum_to_the_loss_and_ignored_ones_are_zero():
    x, w, targets, vocab = setup()
    nats = loss.chunked_nats(x, w, targets, vocab)
    torch.testing.assert_close(nats.sum(), loss.chunked_loss(x, w, targets, vocab))
    assert nats[targets == loss.IGNORE].abs().max() == 0 and nats[targets != loss.IGNORE].min() > 0


def test_padding_rows_of_the_table_take_no_probability_and_no_gradient():
    x, w, targets, vocab = setup()
    (grad,) = torch.autograd.grad(loss.chunked_loss(x, w, targets, vocab), w)
    assert grad[vocab:].abs().max() == 0


def test_logits_at_the_cap_stay_finite():
    x, w = torch.full((1, 4), 1e4), torch.ones(64, 4)
    w[0] = -1
    # one logit at -15 and 63 at 15
    assert float(loss.chunked_loss(x, w, torch.tensor([0]), 64)) == pytest.approx(30 + math.log(63), rel=1e-6)


def test_promise_6_full_logits_never_exist(monkeypatch):
    monkeypatch.setattr(loss, "CPU_CHUNK", 64 * 8)
    x, w, targets, vocab = setup(n=256)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() != x.untyped_storage().nbytes():
                    largest = max(largest, t.numel())
            return out

    with Watch():
        loss.chunked_loss(x, w, targets, vocab).backward()
    assert largest <= 256 * 8 < 256 * 64  # the hidden states' own size, never tokens x vocabulary


def test_bf16_inputs_keep_an_fp32_loss_and_weight_gradient():
    x, w, targets, vocab = setup(n=64)
    low, high = x.detach().bfloat16().requires_grad_(), w.detach().float().requires_grad_()
    got = loss.chunked_loss(low, high, targets, vocab)
    got.backward()
    assert got.dtype == torch.float32 and high.grad.dtype == torch.float32 and low.grad.dtype == torch.bfloat16
    # bf16 logits carry 8 bits: 1/256 of a logit of size ~8 is .03 nats a token.
    assert float(got) == pytest.approx(float(full(x, w, targets, vocab)), rel=0.01)
