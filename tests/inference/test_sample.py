"""Sampling: equals the distribution it draws from, is a function of its seed, and has no input that crashes it."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from nanolearn.errors import UserError
from nanolearn.inference.sample import choose, context, generate, generate_ids

V, T = 20, 8


@dataclass
class Config:
    sequence_len: int = T


class Causal(nn.Module):
    """Logits of a position depend on all tokens up to it and on nothing behind it."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(V, V, generator=generator))

    def forward(self, tokens):
        assert tokens.size(1) <= self.config.sequence_len
        return self.table[tokens].cumsum(1)  # (B, T, V)


class Letters:
    """Token i is the letter i; token 19 is special."""

    bos = 19

    def encode_ordinary(self, text):
        return [ord(c) - ord("a") for c in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)

    def token_bytes(self):
        return np.array([1] * 19 + [0])


@pytest.fixture
def model():
    return Causal()


def one_by_one(model, prompt, n):
    ids = list(prompt)
    for _ in range(n):
        logits = model(torch.tensor([context(ids, T)]))[0, -1]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_prompts_of_unequal_length_give_what_each_gives_alone(model):
    prompts = [[19], [19, 3, 4, 5], [19, 1]]
    together = generate_ids(model, prompts, 12, temperature=0)  # longer than the context: it slides
    assert together == [one_by_one(model, prompt, 12) for prompt in prompts]


def test_e7_a_text_beyond_the_context_keeps_bos_and_the_newest():
    assert context(list(range(10)), 4) == [0, 7, 8, 9]
    assert context([5], 4) == [5]


def test_a_seed_gives_one_text_and_rows_differ(model):
    first = generate_ids(model, [[19]] * 3, 8, seed=1)
    assert first == generate_ids(model, [[19]] * 3, 8, seed=1)
    assert first != generate_ids(model, [[19]] * 3, 8, seed=2)
    assert len(set(map(tuple, first))) > 1
    assert generate_ids(model, [[19]], 8, seed=1) == first[:1]  # a row does not depend on its neighbours


@pytest.mark.parametrize("top_k", [0, V, 10 * V])
def test_e8_top_k_of_zero_or_above_the_vocabulary_keeps_all(top_k):
    logits = torch.zeros(1, V)
    chosen = {int(choose(logits, 1.0, top_k, torch.tensor([u]))) for u in np.linspace(0, 0.999, 200)}
    assert chosen == set(range(V))


def test_e8_lone_bos_and_temperature_zero(model):
    text = generate(model, Letters(), [""], 5, temperature=0)
    assert len(text[0]) == 5
    assert text == generate(model, Letters(), [""], 5, temperature=0, seed=9)


def test_draws_follow_the_softmax():
    logits = torch.tensor([[1.0, 0.0, 2.0, -torch.inf]])
    n = 4000
    uniform = (torch.arange(n) + 0.5) / n  # every part of the distribution once: an exact check, no luck
    chosen = choose(logits.expand(n, -1), 0.7, 0, uniform)
    share = torch.bincount(chosen, minlength=4) / n
    assert share.tolist() == pytest.approx(torch.softmax(logits[0] / 0.7, -1).tolist(), abs=1.5 / n)


def test_top_k_never_leaves_the_k_likeliest():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert {int(choose(logits, 5.0, 2, torch.tensor([u]))) for u in (0.0, 0.3, 0.6, 0.999999)} == {1, 2}


def test_special_tokens_are_masked_unless_asked_for(model):
    with torch.no_grad():
        model.table[:, 19] = 50.0
    assert "t" not in generate(model, Letters(), ["abc"], 6)[0]
    assert generate(model, Letters(), ["abc"], 6, specials=True)[0] == "tttttt"
    assert generate(model, Letters(), ["abc"], 6, specials=True, stop={19})[0] == ""


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"max_tokens": -1}])
def test_negative_dials_are_refused(model, wrong):
    with pytest.raises(UserError, match="negative"):
        generate_ids(model, [[19]], **{"max_tokens": 2, **wrong})


def test_an_empty_prompt_is_refused_and_none_at_all_is_fine(model):
    with pytest.raises(UserError, match="begin it with BOS"):
        generate_ids(model, [[]], 2)
    assert generate_ids(model, [], 2) == []
