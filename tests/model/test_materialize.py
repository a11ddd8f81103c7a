"""Meta device to weights: nothing left unset (T1), the same weights for a seed, no second copy."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanolearn.model import gpt
from nanolearn.model.gpt import GPTConfig, initialise
from nanolearn.model.materialize import materialize, poison, unset

CONFIG = GPTConfig(n_layer=2, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, sequence_len=16, vocab_size=64)


def test_t1_a_forgotten_module_is_named():
    def forgetful(model, seed):
        with torch.no_grad():
            kept = model.blocks[1].mlp.fc.weight.clone()
            initialise(model, seed)
            model.blocks[1].mlp.fc.weight.copy_(kept)

    with pytest.raises(AssertionError, match=r"blocks\.1\.mlp\.fc\.weight"):
        materialize(CONFIG, "cpu", 0, fill=forgetful)


def test_t1_a_module_added_later_is_caught_by_the_poison(monkeypatch):
    class WithExtra(gpt.GPT):
        def __init__(self, *args):
            super().__init__(*args)
            self.extra = nn.Parameter(torch.empty(3))

    monkeypatch.setattr("nanolearn.model.materialize.GPT", WithExtra)
    with pytest.raises(AssertionError, match="extra"):
        materialize(CONFIG, "cpu", 0)


def test_poison_reaches_buffers_too():
    layer = nn.BatchNorm1d(2)
    poison(layer)
    assert set(unset(layer)) == {"weight", "bias", "running_mean", "running_var"}


def test_a_single_nan_is_found_without_a_copy_of_the_parameter():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            views = isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() in held
            if isinstance(out, torch.Tensor) and not views:
                self.elements = max(self.elements, out.numel())
            return out

    layer = nn.Linear(100, 100)
    with torch.no_grad():
        layer.weight[99, 99] = float("nan")
    held = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    with Largest() as largest:
        assert unset(layer) == ["weight"]
    assert largest.elements == 1


def test_same_seed_same_weights_other_seed_other_weights():
    a, b, c = (dict(materialize(CONFIG, "cpu", s).named_parameters()) for s in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["token_table.weight"], c["token_table.weight"])
    assert not torch.equal(a["blocks.0.attention.q.weight"], a["blocks.0.attention.k.weight"])


def test_the_compute_dtype_leaves_master_weights_fp32():
    model = materialize(CONFIG, "cpu", 0, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    x = torch.zeros(1, 16, dtype=torch.long)
    assert model.hidden(x).dtype == torch.bfloat16 and model(x).dtype == torch.float32
