"""Who takes which parameter, and both halves against independent rewrites."""

from dataclasses import asdict

import pytest
import torch

from nanolearn.errors import UserError
from nanolearn.model.gpt import GPTConfig
from nanolearn.model.materialize import materialize
from nanolearn.optim import optimizer as optimizer_module
from nanolearn.optim.muon import moment_shape, muon_update
from nanolearn.optim.optimizer import ADAM_GROUPS, Optimizer, Rates

CONFIG = GPTConfig(n_layer=2, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, sequence_len=16, vocab_size=64)
RATES = Rates(matrix=0.02, token_table=0.3, value_tables=0.15, head=0.008, x0=0.5, residual=0.005, smear=0.2, decay=0.1)


def build(dtype=torch.float64):
    model = materialize(CONFIG, "cpu", 0, dtype)
    return model, Optimizer(model, RATES)


def give_gradients(model, seed):
    g = torch.manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)


def test_muon_takes_every_matrix_of_the_blocks_and_nothing_else():
    model, optimizer = build()
    muon = {n for names in optimizer.shapes.values() for n in names}
    assert muon == {n for n, p in model.named_parameters() if n.startswith("blocks.")}
    assert "blocks.1.attention.value_gate.weight" in muon
    assert {n.split(".")[0] for n in (*optimizer.tables, *optimizer.scalars)} == set(ADAM_GROUPS)


def test_adamw_groups_equal_torchs_own_optimizer():
    model, optimizer = build()
    copies = {n: torch.nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    groups = []
    for name in (*optimizer.tables, *optimizer.scalars):
        group = ADAM_GROUPS[name.split(".")[0]]
        rate = asdict(RATES)[group.rate]
        of_group = {"lr": rate, "betas": group.betas, "weight_decay": group.decay, "eps": 1e-10}
        groups.append({"params": [copies[name]]} | of_group)
    oracle = torch.optim.AdamW(groups)
    for step in range(3):
        give_gradients(model, step)
        for name, p in model.named_parameters():
            copies[name].grad = p.grad.clone()
        optimizer.step(1.0, 0.95, 1.0)
        oracle.step()
    for name in (*optimizer.tables, *optimizer.scalars):
        torch.testing.assert_close(model.get_parameter(name).data, copies[name].data, rtol=1e-9, atol=1e-12)


def test_muon_step_is_rate_times_update_with_cautious_decay():
    model, optimizer = build()
    name = "blocks.0.mlp.fc.weight"  # 128 x 32: its rate is doubled
    with torch.no_grad():
        model.get_parameter(name).mul_(3)
    before = model.get_parameter(name).detach().clone()
    give_gradients(model, 0)
    g = model.get_parameter(name).grad.unsqueeze(0)
    u = muon_update(g, torch.zeros_like(g), torch.zeros(moment_shape(g.shape), dtype=g.dtype), 0.95)[0]
    optimizer.step(0.5, 0.95, 0.25)
    rate = 0.5 * RATES.matrix * 2
    decayed = torch.where(u * before >= 0, before, torch.zeros_like(before))
    expected = before - rate * u - rate * 0.25 * RATES.decay * decayed
    torch.testing.assert_close(model.get_parameter(name).data, expected)


def test_t5_a_missing_gradient_is_a_zero_gradient():
    (a, optimizer_a), (b, optimizer_b) = build(), build()
    for step in range(2):
        for model in (a, b):
            give_gradients(model, step)
        for name in ("value_tables.1.weight", "blocks.0.attention.q.weight"):
            a.get_parameter(name).grad = None
            b.get_parameter(name).grad.zero_()
        optimizer_a.step(1, 0.95, 1)
        optimizer_b.step(1, 0.95, 1)
    for name, p in a.named_parameters():
        assert torch.equal(p, b.get_parameter(name)), name


def test_t12_state_and_tables_are_fp32_so_that_small_updates_add_up():
    # A weight of .5, rate 5e-4, 1,000 equal steps: bf16 never moves, fp32 ends near 0.
    model = materialize(CONFIG, "cpu", 0, torch.bfloat16)
    rates = Rates(**(asdict(RATES) | {"token_table": 5e-4}))
    optimizer = Optimizer(model, rates)
    assert {t.dtype for t in optimizer.state_dict().values()} == {torch.float32}
    with torch.no_grad():
        model.token_table.weight.fill_(0.5)
    low = torch.tensor(0.5, dtype=torch.bfloat16)
    for _ in range(1000):
        model.token_table.weight.grad = torch.ones_like(model.token_table.weight)
        optimizer._adam_step("token_table.weight", 1.0)
        low -= 5e-4
    assert float(low) == 0.5
    assert float(model.token_table.weight.detach().abs().max()) < 0.01


def copy_state(source, target):
    for name, tensor in target.state_dict().items():
        tensor.copy_(source.state_dict()[name])


def test_state_round_trip_continues_bit_for_bit():
    (a, first), (b, second) = build(torch.float32), build(torch.float32)
    give_gradients(a, 0)
    first.step(1, 0.9, 1)
    b.load_state_dict(a.state_dict())
    copy_state(first, second)
    for model, optimizer in ((a, first), (b, second)):
        give_gradients(model, 1)
        optimizer.step(1, 0.9, 1)
    assert all(torch.equal(p, b.get_parameter(n)) for n, p in a.named_parameters())


def test_a_stack_is_cut_where_it_would_be_too_large(monkeypatch):
    (a, whole), (b, cut) = build(), build()
    monkeypatch.setattr(optimizer_module, "STACK_ELEMENTS", 3 * 32 * 32)
    cut = Optimizer(b, RATES)
    assert max(len(names) for stacks in cut.stacks.values() for names in stacks) == 3
    for step in range(2):
        for model, optimizer in ((a, whole), (b, cut)):
            give_gradients(model, step)
            optimizer.step(1, 0.9, 1)
    for name, p in a.named_parameters():
        torch.testing.assert_close(p, b.get_parameter(name), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("master", ["sharded", "none"])
def test_sixteen_bit_weights_and_what_becomes_of_a_small_step(master):
    model = materialize(CONFIG, "cpu", 0, torch.bfloat16)
    fp32 = {name: p.detach().clone() for name, p in model.named_parameters()}
    rates = Rates(**(asdict(RATES) | {"token_table": 5e-4}))
    optimizer = Optimizer(model, rates, master)
    assert model.token_table.weight.dtype == model.blocks[0].mlp.fc.weight.dtype == torch.bfloat16
    assert model.residual_scales.dtype == torch.float32
    assert {t.dtype for t in optimizer.state_dict().values()} == {torch.float32}
    saved = optimizer.weights()
    assert saved.keys() == fp32.keys()
    for name, tensor in saved.items():
        kept = fp32[name] if master == "sharded" else fp32[name].to(tensor.dtype)
        assert torch.equal(tensor, kept), name
    weight = saved["token_table.weight"].fill_(0.5)
    optimizer.restored()
    for _ in range(200):
        model.token_table.weight.grad = torch.ones_like(model.token_table.weight)
        optimizer._adam_step("token_table.weight", 1.0)
    assert abs(float(weight[0, 0]) - (0.4 if master == "sharded" else 0.5)) < 1e-3
    assert torch.equal(model.token_table.weight.detach(), weight.bfloat16())


def test_masters_beside_fp32_weights_are_refused():
    with pytest.raises(UserError, match="master=sharded is for 16-bit weights.*dtype=bfloat16"):
        Optimizer(materialize(CONFIG, "cpu", 0, torch.float32), RATES, "sharded")
