"""The model against its definition: counts in closed form, causality, each part's start value, exact accumulation."""

import math
from dataclasses import replace

import pytest
import torch

from nanolearn.errors import UserError
from nanolearn.model.gpt import GPT, GPTConfig
from nanolearn.model.materialize import materialize

SMALL = GPTConfig(
    n_layer=4, n_embd=32, n_head=4, n_kv_head=2, head_dim=8, sequence_len=24, vocab_size=70, window="SSSL"
)


def tokens(config=SMALL, batch=2, seed=0):
    g = torch.manual_seed(seed)
    return torch.randint(0, config.vocab_size, (2, batch, config.sequence_len), generator=g).unbind()


def trained(config=SMALL, seed=0):
    """A model whose zero-initialised parts hold something too, so that every path is seen."""
    model = materialize(config, "cpu", seed, torch.float64)
    g = torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.1)
    return model


def test_depth_24_to_the_parameter():
    config = GPTConfig(24, 1536, 12, 12, 128, 2048, 32768)
    assert config.parameter_groups() == {
        "token_table": 50_331_648,
        "value_tables": 603_979_776,
        "head": 50_331_648,
        "matrices": 679_478_976,
        "scalars": 74,
    }


@pytest.mark.parametrize("n_layer", [1, 2, 5])
def test_closed_form_counts_equal_the_built_model(n_layer):
    config = replace(SMALL, n_layer=n_layer)
    with torch.device("meta"):
        model = GPT(config)
    groups = config.parameter_groups()
    assert sum(p.numel() for p in model.parameters()) == sum(groups.values())
    # the smear gate's 24 weights multiply the stream too, but are no block matrix
    assert model.matmul_parameters() == groups["matrices"] + groups["head"] + 24


def test_windows_tile_and_the_last_layer_sees_everything():
    deep = replace(SMALL, n_layer=6, sequence_len=2048)
    assert deep.windows == (512, 512, 512, 2048, 512, 2048)
    assert replace(deep, sequence_len=512).windows[0] == 128
    assert set(replace(deep, sequence_len=128).windows) == {128}
    assert set(replace(deep, window="L").windows) == {2048}


def test_first_loss_is_the_log_of_the_vocabulary():
    x, y = tokens()
    model = materialize(SMALL, "cpu", 0)
    # The head starts at N(0, .001): logits of size .006, so 48 targets average to ln V within 6 x .006 / sqrt(48).
    assert float(model.loss_sum(x, y).detach()) / y.numel() == pytest.approx(math.log(70), abs=5e-3)


def test_initial_scales_follow_their_formulas():
    model = materialize(SMALL, "cpu", 0)
    torch.testing.assert_close(model.residual_scales.data, torch.tensor([1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05]))
    torch.testing.assert_close(model.first_scales.data, torch.tensor([0.2, 0.15, 0.1, 0.05]))
    assert float(model.smear_scale.detach()) == 0 and float(model.backout_scale.detach()) == pytest.approx(0.2)
    wide = materialize(replace(SMALL, n_embd=256, n_layer=2), "cpu", 0)
    block = wide.blocks[0]
    # 65,536 draws: the standard deviation is known to 1/sqrt(2n) = .3%; bands of 2%.
    assert float(block.attention.q.weight.detach().std()) == pytest.approx(1 / 16, rel=0.05)
    assert float(block.mlp.fc.weight.detach().std()) == pytest.approx(0.4 / 16, rel=0.02)
    assert float(wide.token_table.weight.detach().std()) == pytest.approx(0.8, rel=0.02)
    assert block.mlp.out.weight.abs().max() == 0 and block.attention.out.weight.abs().max() == 0


def test_e9_no_position_sees_a_later_one():
    model, (x, _) = trained(), tokens()
    changed = x.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % SMALL.vocab_size
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15], rtol=0, atol=1e-12)
    assert (before[:, 15:] - after[:, 15:]).abs().max() > 1e-3


def test_loss_and_token_nats_agree_with_the_logits():
    model, (x, y) = trained(), tokens()
    y[0, :5] = -1
    logits = model(x)
    assert logits.shape == (2, 24, 70)
    nats = -logits.log_softmax(-1).gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1).masked_fill(y == -1, 0)
    # forward() casts its logits to fp32, the loss stays in float64: 15 * 2^-24 a logit.
    torch.testing.assert_close(model.token_nats(x, y).float(), nats.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(model.loss_sum(x, y), model.token_nats(x, y).sum())


def test_every_parameter_gets_a_gradient_once_the_model_has_left_its_start():
    model, (x, y) = trained(), tokens()
    model.loss_sum(x, y).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0] == []


def test_gradients_by_finite_differences():
    model, (x, y) = trained(replace(SMALL, n_layer=2, sequence_len=6)), tokens(replace(SMALL, sequence_len=6), 1)
    model.loss_sum(x, y).backward()
    h = 1e-6
    for p in model.parameters():
        flat, i = p.data.view(-1), int(p.grad.abs().argmax())
        flat[i] += h
        up = float(model.loss_sum(x, y))
        flat[i] -= 2 * h
        down = float(model.loss_sum(x, y))
        flat[i] += h
        assert (up - down) / (2 * h) == pytest.approx(float(p.grad.view(-1)[i]), rel=1e-4, abs=1e-6)


def test_accumulated_micro_batches_give_the_gradient_of_the_whole():
    model, (x, y) = trained(), tokens(batch=4)
    grads = []
    for split in (4, 2, 1):
        model.zero_grad()
        for part in range(0, 4, split):
            (model.loss_sum(x[part : part + split], y[part : part + split]) / y.numel()).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"n_layer": 0}, "below 1"),
        ({"n_kv_head": 3}, "can't share"),
        ({"head_dim": 7}, "odd"),
        ({"window": "SX"}, "letters S"),
        ({"window": ""}, "letters S"),
        ({"n_embd": 16}, "smear gate"),
    ],
)
def test_impossible_shapes_are_refused_in_one_line(change, words):
    with pytest.raises(UserError, match=words):
        replace(SMALL, **change)


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(UserError, match="do not fit"):
        materialize(SMALL, "cpu", 0)(torch.zeros(1, 25, dtype=torch.long))


@pytest.mark.slow
@pytest.mark.parametrize("T", [256, 320])
def test_the_compiled_model_is_the_eager_one(T, recwarn):
    """Two models, so that nothing eager is cached in the compiled one; one mask for the whole row, and blocks.

    aot_eager is all of torch.compile but the code generator: what it captures is what a GPU would run.
    """
    config = GPTConfig(2, 64, 2, 1, 32, T, 128, window="SL")
    tokens, targets = torch.randint(0, 128, (2, 2, T), generator=torch.manual_seed(0))
    targets[0, :5] = -1
    eager, compiled = (materialize(config, torch.device("cpu"), 0) for _ in range(2))
    for model in (eager, compiled):  # the initial weights leave most gradients zero
        for i, weight in enumerate(model.parameters()):
            weight.data.add_(torch.randn(weight.shape, generator=torch.manual_seed(i)), alpha=0.02)
    torch._dynamo.reset()
    losses = [eager.loss_sum(tokens, targets), torch.compile(compiled.loss_sum, backend="aot_eager")(tokens, targets)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for (name, weight), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        scale = float(weight.grad.abs().max())
        torch.testing.assert_close(other.grad, weight.grad, rtol=0, atol=1e-5 * scale, msg=name)
    assert not [str(warning.message) for warning in recwarn if "Dynamo" in str(warning.message)]


def gradients(recompute, dtype=torch.float32, through=lambda function: function):
    model = materialize(SMALL, "cpu", seed=0, compute_dtype=dtype, recompute=recompute)
    tokens = torch.randint(0, SMALL.vocab_size, (2, SMALL.sequence_len), generator=torch.manual_seed(0))
    for part in model.blocks:  # output projections start at zero, and would hide what comes before them
        for layer in (part.attention.out, part.mlp.out):
            torch.nn.init.normal_(layer.weight, std=0.1, generator=torch.manual_seed(1))
    loss = through(model.loss_sum)(tokens, tokens.roll(-1, 1))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["1", "2"])
def test_what_is_computed_again_is_the_same_to_the_bit(recompute, dtype):
    loss, expected = gradients("none", dtype)
    again, found = gradients(recompute, dtype)
    assert again == loss
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["1", "2"])
def test_recomputation_inside_a_compiled_model(recompute):
    loss, expected = gradients("none")
    again, found = gradients(recompute, through=lambda function: torch.compile(function, backend="aot_eager"))
    assert again == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("recompute", "calls"), [("none", 1), ("1", 2), ("2", 2)])
def test_the_hidden_layer_is_computed_once_more_in_training_and_not_in_evaluation(recompute, calls):
    model = materialize(SMALL, "cpu", seed=0, recompute=recompute)
    seen = []
    model.blocks[0].mlp.fc.register_forward_hook(lambda *_: seen.append(1))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model.loss_sum(tokens, tokens).backward()
    assert len(seen) == calls
    seen.clear()
    model.token_nats(tokens, tokens)
    assert len(seen) == 1


@pytest.mark.parametrize("recompute", ["none", "2"])
def test_with_documents_a_packed_row_is_its_documents_alone(recompute):
    """Attention, positions, the smear: nothing of one document reaches another. The losses of the texts read alone."""
    config = replace(SMALL, sequence_len=300, n_layer=2)  # windows of 128: in blocks
    model = trained(config)
    model.recompute = recompute
    g = torch.manual_seed(3)
    lengths = [140, 1, 30, 129]
    row, targets = torch.randint(0, config.vocab_size, (2, 1, sum(lengths)), generator=g)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    packed = model.token_nats(row, targets, documents)
    alone = [model.token_nats(a, b) for a, b in zip(row.split(lengths, 1), targets.split(lengths, 1), strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=2e-6)  # summed in float32
    assert (model.token_nats(row, targets) - packed)[:, lengths[0] :].abs().max() > 0.01
    torch.testing.assert_close(model.loss_sum(row, targets, documents).detach(), packed.sum(), rtol=1e-6, atol=0)
