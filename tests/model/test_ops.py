"""The hand-written backwards against autograd in float64, and the forwards against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolearn.model.ops import mix, norm, relu_squared, rotary_table, rotate


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.manual_seed(seed), dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("scale", [1.0, 1.2])
def test_norm_equals_torchs_and_its_gradient_is_right(scale):
    x = randn(2, 3, 8)
    torch.testing.assert_close(norm(x, scale), F.rms_norm(x, (8,), eps=1e-6) * scale)
    assert torch.autograd.gradcheck(lambda t: norm(t, scale), x)


def test_norm_in_bf16_is_computed_in_fp32_with_a_small_epsilon():
    # torch's default epsilon is the dtype's own, .0078 in bf16: on inputs of size .01 the result would be 8 times
    # too small. One bf16 rounding of the result is 2^-9.
    x = (torch.randn(4, 64, generator=torch.manual_seed(1)) * 0.01).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8, atol=1e-6)


def test_norm_of_zeros_is_zero_with_a_finite_gradient():
    x = torch.zeros(1, 4, requires_grad=True)
    norm(x).sum().backward()
    assert norm(x).abs().max() == 0 and x.grad.isfinite().all()


def test_relu_squared_gradient_is_right():
    x = randn(50)
    torch.testing.assert_close(relu_squared(x), F.relu(x).square())
    assert torch.autograd.gradcheck(relu_squared, x)


def test_rotation_equals_complex_multiplication():
    B, T, H, D = 2, 5, 3, 8
    x = randn(B, T, H, D)
    angles = torch.outer(torch.arange(T).double(), 100_000.0 ** -(torch.arange(0, D, 2).double() / D))
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).view(T, 1, D // 2)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    # The table is stored in fp32: its rounding is 6e-8 of a unit vector.
    torch.testing.assert_close(rotate(x, rotary_table(T, D, 1e5, "cpu").double()), expected, rtol=0, atol=1e-6)


def test_rotation_gradient_is_right():
    table = rotary_table(5, 8, 1e5, "cpu").double()
    assert torch.autograd.gradcheck(lambda t: rotate(t, table), randn(2, 5, 2, 8))


@settings(max_examples=20, deadline=None)
@given(shift=st.integers(1, 20), i=st.integers(0, 20), j=st.integers(0, 20))
def test_rotated_products_depend_on_distance_alone(shift, i, j):
    table = rotary_table(64, 16, 1e5, "cpu").double()
    q, k = (randn(1, 1, 1, 16, seed=s).detach() for s in (2, 3))

    def score(a, b):
        return (rotate(q, table[a : a + 1]) * rotate(k, table[b : b + 1])).sum()

    torch.testing.assert_close(score(i, j), score(i + shift, j + shift), rtol=0, atol=1e-5)


def test_mix_is_the_sum_it_says():
    x, first = randn(2, 3, 4), randn(2, 3, 4, seed=1)
    keep, add = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.1, 0.2))
    torch.testing.assert_close(mix(x, first, keep, add), 1.1 * x + 0.2 * first)
    assert torch.autograd.gradcheck(mix, (x, first, keep, add))
