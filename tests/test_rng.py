"""Streams are functions of their names: independent, repeatable, the same however a tensor is divided."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolearn import rng


@given(st.integers(0, 2**40), st.text(max_size=5), st.text(max_size=5))
def test_names_do_not_run_together(seed, a, b):
    # ("ab", "c") and ("a", "bc") must be two streams.
    keys = {rng.key(seed, "p", a, b), rng.key(seed, "p", a + b, ""), rng.key(seed, "p", a + b)}
    assert len(keys) == (2 if b == "" else 3)
    assert 0 <= min(keys)
    assert max(keys) < 2**63


def test_streams_differ_and_repeat():
    draws = [tuple(rng.stream(*names).integers(1 << 60, size=4)) for names in [(0, "a"), (0, "b"), (1, "a"), (0, "a")]]
    assert draws[0] == draws[3]
    assert len(set(draws)) == 3


def test_blocks_are_drawn_apart_so_a_shard_can_be_filled_alone(monkeypatch):
    monkeypatch.setattr(rng, "BLOCK", 64)
    whole = rng.fill_normal_(torch.empty(200), 1.0, seed=3, name="w")
    # The second block on its own, as a rank that owns only it would draw it.
    alone = torch.empty(64).normal_(0.0, 1.0, generator=rng.torch_generator(3, "init", "w", 1))
    assert torch.equal(whole[64:128], alone)


def test_moments_of_the_fills():
    normal = rng.fill_normal_(torch.empty(1 << 17), 0.5, seed=0, name="n")
    uniform = rng.fill_uniform_(torch.empty(1 << 17), -1.0, 3.0, seed=0, name="u")
    # 131,072 draws: the mean is known to std / 362, the deviation to std / 512; bands of five of those.
    assert abs(float(normal.mean())) < 5 * 0.5 / 362
    assert abs(float(normal.std()) - 0.5) < 5 * 0.5 / 512
    assert abs(float(uniform.mean()) - 1.0) < 5 * (4 / 12**0.5) / 362
    assert float(uniform.min()) >= -1
    assert float(uniform.max()) <= 3
