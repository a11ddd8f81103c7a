"""Bits per byte against a sum written out by hand."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from nanolearn.errors import UserError
from nanolearn.evaluate.bits import bits_per_byte

TOKEN_BYTES = np.array([1, 1, 3, 7, 0])  # the last one is a special token


@dataclass
class Rows:
    inputs: torch.Tensor
    targets: torch.Tensor


class Table:
    """A 'model' whose nats are a fixed function of the target, NaN where nothing may be counted."""

    def token_nats(self, tokens, targets):
        nats = torch.tensor([0.5, 1.0, 2.0, 4.0, 1e6])
        return nats[targets.clamp_min(0)].masked_fill(targets == -1, math.nan)


def rows(targets):
    targets = torch.tensor(targets)
    return Rows(torch.zeros_like(targets), targets)


def by_hand(flat):
    nats = {0: 0.5, 1: 1.0, 2: 2.0, 3: 4.0}
    kept = [t for t in flat if t in nats]
    return sum(nats[t] for t in kept) / (math.log(2) * sum(int(TOKEN_BYTES[t]) for t in kept))


def test_special_and_ignored_targets_count_in_neither_sum():
    targets = [[0, 1, 4, -1], [2, 3, 4, 4]]
    bits = bits_per_byte(Table(), [rows(targets)], TOKEN_BYTES)
    assert bits.bpb == pytest.approx(by_hand(sum(targets, [])), rel=1e-12)
    assert (bits.bytes, bits.tokens) == (12, 4)


def test_the_value_does_not_depend_on_how_rows_are_batched():
    targets = [[0, 1, 2, 3], [3, 3, 0, -1], [1, 4, 4, 4]]
    whole = bits_per_byte(Table(), [rows(targets)], TOKEN_BYTES)
    parts = bits_per_byte(Table(), [rows([row]) for row in targets], TOKEN_BYTES)
    assert parts == whole


def test_sums_are_wide_enough_for_many_batches():
    class Tenth:
        def token_nats(self, tokens, targets):
            return torch.full(targets.shape, 0.1)

    bits = bits_per_byte(Tenth(), [rows([[2] * 4096])] * 300, TOKEN_BYTES)
    expected = float(torch.tensor(0.1)) * 4096 * 300  # an fp32 running sum is off by 1e-6 of this
    assert bits.nats == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("batches", [[], [rows([[-1, 4]])]])
def test_e3_no_scored_token_is_an_error_not_infinity(batches):
    with pytest.raises(UserError, match="at least one batch"):
        bits_per_byte(Table(), batches, TOKEN_BYTES)
