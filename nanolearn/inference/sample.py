"""Text from a model, one token at a time, with nothing cached: the plain definition that faster engines must equal.

Prompts of different lengths go through the model together, filled up on the right: attention is causal, so
what stands behind a row's last token can't reach it. The random number for a token is a function of (seed,
row, position), so a text can be had again, whatever was generated before it.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanolearn import rng
from nanolearn.errors import UserError
from nanolearn.model.gpt import GPT


class TextTokenizer(Protocol):
    """What is needed of nanolearn.tokenizer.Tokenizer. Taught in chapter 13_inference."""

    bos: int

    def encode_ordinary(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self): ...


def context(ids: Sequence[int], sequence_len: int) -> list[int]:
    """What the model sees of a text: all of it, or its first token (BOS) and its newest sequence_len - 1 tokens.

    BOS stays because every row that was trained on begins with it. Taught in chapter 13_inference.

    >>> context([0, 1, 2, 3, 4], 3)
    [0, 3, 4]
    """
    if len(ids) <= sequence_len:
        return list(ids)
    return [ids[0], *ids[len(ids) - (sequence_len - 1) :]]


def choose(logits: Tensor, temperature: float, top_k: int, uniform: Tensor) -> Tensor:
    """One token for each row: (B, V) logits and (B,) uniform numbers in [0, 1) -> (B,).

    A temperature of 0 takes the likeliest token (the first of equals); top_k keeps the k likeliest, and 0 or
    more than V keeps all. The draw inverts the distribution function in float64 on the CPU, so that one seed
    gives one text on every device (up to the rounding of its logits).

    >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), temperature=0.0, top_k=0, uniform=torch.zeros(1))
    tensor([1])

    Taught in chapter 13_inference.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if 0 < top_k < logits.size(-1):
        floor = logits.topk(top_k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < floor, -torch.inf)
    share = torch.softmax(logits.cpu().double() / temperature, -1).cumsum(-1)  # (B, V)
    target = uniform.double().unsqueeze(1) * share[:, -1:]
    # right=True: a token of probability 0 has an empty interval and can't be drawn
    return torch.searchsorted(share, target, right=True).squeeze(1).clamp_max(logits.size(-1) - 1)


@torch.no_grad()
def generate_ids(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    banned: Collection[int] = (),
    stop: Collection[int] = (),
) -> list[list[int]]:
    """Continue each prompt by up to max_tokens tokens; the continuations, without their prompts.

    `banned` tokens are never chosen; a row ends before a token in `stop`. Beyond the model's context the rule
    of `context` applies. Raises UserError for an empty prompt or a negative dial. Taught in chapter
    13_inference.
    """
    if temperature < 0 or top_k < 0 or max_tokens < 0:
        raise UserError("temperature, top_k and max_tokens can't be negative", "give 0 or more")
    if not all(prompts):
        raise UserError("a prompt has no token", "begin it with BOS")
    device = next(model.parameters()).device
    rows = [list(prompt) for prompt in prompts]
    open_rows = list(range(len(rows)))
    for position in range(max_tokens):
        if not open_rows:
            break
        logits = _next_logits(model, [rows[r] for r in open_rows], device)  # (B, V)
        if banned:
            logits[:, torch.tensor(sorted(banned), device=device)] = -torch.inf
        uniform = torch.tensor([rng.stream(seed, "sample", r, position).random() for r in open_rows])
        chosen = choose(logits, temperature, top_k, uniform).tolist()
        for r, token in zip(open_rows, chosen, strict=True):
            if token not in stop:
                rows[r].append(token)
        open_rows = [r for r, token in zip(open_rows, chosen, strict=True) if token not in stop]
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _next_logits(model: GPT, rows: list[list[int]], device: torch.device) -> Tensor:
    seen = [context(row, model.config.sequence_len) for row in rows]
    longest = max(map(len, seen))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in seen], device=device)  # (B, T)
    last = torch.tensor([len(row) - 1 for row in seen], device=device)
    return model(tokens)[torch.arange(len(seen), device=device), last].float()  # (B, V)


def generate(
    model: GPT,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    max_tokens: int = 64,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    specials: bool = False,
    stop: Collection[int] = (),
) -> list[str]:
    """Continue texts; each begins with BOS, and an empty one is BOS alone.

    Special tokens are never chosen unless `specials` is true, and end a text only when listed in `stop`.

    Taught in chapter 13_inference.
    """
    banned = () if specials else [i for i, size in enumerate(tokenizer.token_bytes().tolist()) if not size]
    ids = generate_ids(
        model,
        [[tokenizer.bos, *tokenizer.encode_ordinary(prompt)] for prompt in prompts],
        max_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        banned=banned,
        stop=stop,
    )
    return [tokenizer.decode(row) for row in ids]
