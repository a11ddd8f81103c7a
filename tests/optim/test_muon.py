"""The orthogonalisation's spectrum against an SVD, and the update against a plain float64 rewrite of its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolearn.optim.muon import POLAR_EXPRESS, balance, equilibrate, moment_shape, muon_update, orthogonalise

PLAIN_QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(1024, 256), (256, 1024)])
@pytest.mark.parametrize("seed", range(3))
def test_spectrum_of_a_four_to_one_gaussian(shape, seed):
    x = orthogonalise(gaussian(1, *shape, seed=seed))
    s = torch.linalg.svdvals(x.double())
    assert 0.84 <= s.min() and s.max() <= 1.16
    s = s * 256**0.5 / torch.linalg.matrix_norm(x.double())
    assert 0.81 <= s.min() and s.max() <= 1.16


def test_plain_quintic_is_wider():
    s = torch.linalg.svdvals(orthogonalise(gaussian(1, 256, 512), PLAIN_QUINTIC).double())
    assert 0.67 <= s.min() and s.max() <= 1.16


def test_square_inputs_keep_small_singular_values():
    # A square Gaussian's smallest singular value is near 0, and five steps can't lift it: so never assert 1 here.
    smallest = [float(torch.linalg.svdvals(orthogonalise(gaussian(1, 64, 64, seed=s))).min()) for s in range(5)]
    assert 0.0 < min(smallest) < 0.5


def test_singular_vectors_are_kept():
    u, _, vh = torch.linalg.svd(gaussian(1, 40, 10, dtype=torch.float64), full_matrices=False)
    x = u @ torch.diag_embed(torch.linspace(1, 2, 10, dtype=torch.float64).expand(1, 10)) @ vh
    core = u.mT @ orthogonalise(x) @ vh.mT
    torch.testing.assert_close(core, torch.diag_embed(core.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-10)


def test_matches_the_polynomial_applied_to_singular_values():
    x = gaussian(1, 30, 12, seed=4, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / (1.01 * s.norm())
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonalise(x), u @ torch.diag_embed(s) @ vh)


def test_equilibrated_rows_share_the_mean_norm():
    x = gaussian(3, 5, 7)
    norms = equilibrate(x).norm(dim=-1)
    torch.testing.assert_close(norms, x.norm(dim=-1).mean(-1, keepdim=True).expand_as(norms))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), cols=st.integers(1, 9), seed=st.integers(0, 99))
def test_balance_keeps_the_norm_of_the_whole(rows, cols, seed):
    x = gaussian(2, rows, cols, seed=seed) + 0.1
    moment = torch.zeros(moment_shape(x.shape))
    kept = torch.linalg.matrix_norm(balance(x, moment))
    torch.testing.assert_close(kept, torch.linalg.matrix_norm(x), rtol=1e-4, atol=1e-5)


def plain_update(gradients, momentum, beta=0.9):
    """One matrix, float64, straight from the definition, the polar factor by its singular values."""
    buffer, moment = torch.zeros_like(gradients[0]), 0.0
    for g in gradients:
        buffer = momentum * buffer + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * buffer
        norms = u.norm(dim=1, keepdim=True)
        left, s, right = torch.linalg.svd(u / norms * norms.mean(), full_matrices=False)
        s = s / (1.01 * s.norm())
        for a, b, c in POLAR_EXPRESS:
            s = a * s + b * s**3 + c * s**5
        u = left @ torch.diag(s * min(u.shape) ** 0.5 / s.norm()) @ right
        moment = beta * moment + (1 - beta) * u.square().mean(1 if u.size(0) >= u.size(1) else 0, keepdim=True)
        balanced = u / moment.sqrt()
        u = balanced * u.norm() / balanced.norm()
    return u


@pytest.mark.parametrize("rows, cols", [(12, 4), (4, 12), (6, 6)])
def test_update_equals_its_definition_over_several_steps(rows, cols):
    gradients = [gaussian(rows, cols, seed=s, dtype=torch.float64) for s in range(4)]
    buffer = torch.zeros(1, rows, cols, dtype=torch.float64)
    moment = torch.zeros(moment_shape(buffer.shape), dtype=torch.float64)
    for g in gradients:
        update = muon_update(g.unsqueeze(0), buffer, moment, momentum=0.9)
    torch.testing.assert_close(update[0], plain_update(gradients, 0.9), rtol=1e-6, atol=1e-8)


def test_a_zero_gradient_gives_a_zero_update_and_no_nan():
    g = torch.zeros(2, 8, 4)
    update = muon_update(g, torch.zeros_like(g), torch.zeros(moment_shape(g.shape)), 0.95)
    assert update.abs().max() == 0


def test_a_stack_is_the_same_as_one_by_one():
    g = gaussian(3, 8, 6, dtype=torch.float64)
    whole = muon_update(g, torch.zeros_like(g), torch.zeros(3, 8, 1, dtype=torch.float64), 0.95)
    for i in range(3):
        one = g[i : i + 1]
        single = muon_update(one, torch.zeros_like(one), torch.zeros(1, 8, 1, dtype=torch.float64), 0.95)
        torch.testing.assert_close(whole[i : i + 1], single)
