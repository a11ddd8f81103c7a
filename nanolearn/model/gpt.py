"""The modern GPT: one dial (depth) away from 36 million or 1.4 billion parameters, the same code.

What it adds to the GPT-2 of 2019, each part in one or two lines of `Block` or `GPT`: RMSNorm without weights, rotary
positions, normalised queries and keys, windows, squared ReLU, value embeddings, a smeared embedding, two learned
scalars a layer that mix the first embedding back in, a "backout" of the middle layer, an untied softcapped head.
Weights are fp32 and are cast to the activations' dtype where they are used, so that small updates are never lost.
Chapter 00_model takes each of these apart.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanolearn.errors import UserError
from nanolearn.model import loss
from nanolearn.model.attention import attend
from nanolearn.model.ops import mix, norm, relu_squared, rotary_table, rotate
from nanolearn.rng import fill_normal_, fill_uniform_

QK_SCALE = 1.2  # times the unit-norm queries and keys: a sharper softmax than 1/sqrt(head_dim) alone allows
VALUE_GATE_INPUTS = 12
SMEAR_INPUTS = 24
ROPE_BASE = 100_000.0


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; everything that decides how many parameters it has.

    >>> c = GPTConfig(n_layer=24, n_embd=1536, n_head=12, n_kv_head=12, head_dim=128,
    ...               sequence_len=2048, vocab_size=32768)
    >>> sum(c.parameter_groups().values())
    1384122122

    Raises UserError for shapes that no model can have. Taught in chapter 00_model.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    sequence_len: int
    vocab_size: int
    window: str = "SSSL"

    def __post_init__(self) -> None:
        if min(self.n_layer, self.n_embd, self.n_head, self.n_kv_head, self.vocab_size, self.sequence_len) < 1:
            raise UserError(f"a model with a size below 1 ({self})", "give sizes of 1 or more")
        if self.n_head % self.n_kv_head:
            raise UserError(
                f"{self.n_head} heads can't share {self.n_kv_head} key-value heads", "give a divisor of n_head"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd", "rotary positions need pairs: give an even number")
        if not self.window or set(self.window) - set("SL"):
            raise UserError(f"window pattern {self.window!r}", "use the letters S (short) and L (long), as in SSSL")
        if self.n_embd < SMEAR_INPUTS:
            raise UserError(f"n_embd {self.n_embd} is below {SMEAR_INPUTS}", "the smear gate reads that many inputs")

    @property
    def padded_vocab(self) -> int:
        """Rows of the tables: the vocabulary up to a multiple of 64, which tensor cores want."""
        return -(-self.vocab_size // 64) * 64

    @property
    def windows(self) -> tuple[int, ...]:
        """For each layer how far back a query sees; `sequence_len` where it sees everything."""
        short = min(-(-self.sequence_len // 4 // 128) * 128, self.sequence_len)
        letters = [self.window[i % len(self.window)] for i in range(self.n_layer - 1)] + ["L"]
        return tuple(self.sequence_len if letter == "L" else short for letter in letters)

    def has_value_table(self, layer: int) -> bool:
        """Every second layer has a value table, counted so that the last one has."""
        return layer % 2 == (self.n_layer - 1) % 2

    def parameter_groups(self) -> dict[str, int]:
        """Number of parameters by group, in closed form (a test compares it with the built model)."""
        table_layers = sum(map(self.has_value_table, range(self.n_layer)))
        kv_dim = self.n_kv_head * self.head_dim
        attention_block = 2 * self.n_embd * self.n_head * self.head_dim + 2 * self.n_embd * kv_dim
        return {
            "token_table": self.padded_vocab * self.n_embd,
            "value_tables": table_layers * self.padded_vocab * kv_dim,
            "head": self.padded_vocab * self.n_embd,
            "matrices": self.n_layer * (attention_block + 8 * self.n_embd**2)
            + table_layers * self.n_kv_head * VALUE_GATE_INPUTS,
            "scalars": 2 * self.n_layer + SMEAR_INPUTS + 2,
        }


class Linear(nn.Linear):
    """A matrix without bias: fp32 weights, cast to the dtype of what comes in (no autocast)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal attention with rotary positions, normalised queries and keys, and a gate for the value table."""

    def __init__(self, config: GPTConfig, layer: int, backend: str) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.window, self.backend = config.windows[layer], backend
        self.q = Linear(config.n_embd, config.n_head * config.head_dim)
        self.k = Linear(config.n_embd, config.n_kv_head * config.head_dim)
        self.v = Linear(config.n_embd, config.n_kv_head * config.head_dim)
        self.out = Linear(config.n_head * config.head_dim, config.n_embd)
        has_table = config.has_value_table(layer)
        self.value_gate = Linear(VALUE_GATE_INPUTS, config.n_kv_head) if has_table else None

    def forward(self, x: Tensor, value: Tensor | None, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        B, T, _ = x.shape
        q = self.q(x).view(B, T, self.n_head, self.head_dim)  # (B, T, H, D)
        k = self.k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.v(x).view(B, T, self.n_kv_head, self.head_dim)
        if self.value_gate is not None and value is not None:
            gate = 3.0 * torch.sigmoid(self.value_gate(x[..., :VALUE_GATE_INPUTS]))  # (B, T, KV)
            v = v + gate.unsqueeze(-1) * value.view_as(v)
        # A rotation keeps the norm, so normalising first is the same as after it, and spares a copy.
        q, k = (rotate(norm(t, QK_SCALE), rope) for t in (q, k))
        y = attend(q, k, v, self.window, self.backend, documents)  # (B, T, H, D)
        return self.out(y.reshape(B, T, -1))


class MLP(nn.Module):
    """Two matrices with a squared ReLU between them (So et al., 2021, arXiv 2109.08668)."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.fc = Linear(n_embd, 4 * n_embd)
        self.out = Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(relu_squared(self.fc(x)))


def again(part: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """A part of the model of which only the inputs are kept: the backward computes it once more, and then only as
    far as it needs. The same numbers, since nothing in the model is random.

    Source: Chen et al., 2016, arXiv 1604.06174. Taught in chapter 14_scaling_out.
    """
    return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)


class Block(nn.Module):
    """Attention, then MLP, each reading a normalised copy of the stream and adding to it."""

    def __init__(self, config: GPTConfig, layer: int, recompute: str, backend: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention = Attention(config, layer, backend)
        self.mlp = MLP(config.n_embd)

    def forward(self, x: Tensor, value: Tensor | None, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention(norm(x), value, rope, documents)
        return x + (again(self.mlp, norm(x)) if self.recompute == "1" else self.mlp(norm(x)))


class GPT(nn.Module):
    """The model. Build it with `nanolearn.model.materialize.materialize`, which also sets its initial weights.

    `forward(tokens)` gives logits, `loss_sum(tokens, targets)` the summed loss without ever holding all logits,
    `token_nats` the loss of each token for evaluation. `recompute` trades time for memory, never results: "1" computes
    each MLP's hidden layer again in the backward, "2" each whole block. `attention` is the backend (chapter 05). With
    `documents` (B, T), the numbers of the documents of packed rows, each document is as if alone. Taught in chapter
    00_model.
    """

    def __init__(
        self,
        config: GPTConfig,
        compute_dtype: torch.dtype = torch.float32,
        recompute: str = "none",
        attention: str = "blocked",
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.recompute = recompute
        L, V = config.n_layer, config.padded_vocab
        self.token_table = nn.Embedding(V, config.n_embd)
        self.value_tables = nn.ModuleDict(
            {str(i): nn.Embedding(V, config.n_kv_head * config.head_dim) for i in range(L) if config.has_value_table(i)}
        )
        self.blocks = nn.ModuleList(Block(config, i, recompute, attention) for i in range(L))
        self.head = Linear(config.n_embd, V)
        self.smear_gate = Linear(SMEAR_INPUTS, 1)
        self.smear_scale = nn.Parameter(torch.zeros(1))
        self.residual_scales = nn.Parameter(torch.zeros(L))
        self.first_scales = nn.Parameter(torch.zeros(L))
        self.backout_scale = nn.Parameter(torch.zeros(1))

    @cached_property
    def rope(self) -> Tensor:
        """Cosines and sines (T, D/2, 2), computed once in fp32 on the weights' device."""
        config = self.config
        return rotary_table(config.sequence_len, config.head_dim, ROPE_BASE, self.head.weight.device)

    def _smear(self, x: Tensor, documents: Tensor | None) -> Tensor:
        # Each position gets a gated share of the embedding before it: bigrams before the first attention.
        gate = torch.sigmoid(self.smear_gate(x[:, 1:, :SMEAR_INPUTS]))  # (B, T-1, 1)
        gate = gate * self.smear_scale.to(x.dtype)
        if documents is not None:  # a document's first token is nobody's second
            gate = gate * (documents[:, 1:] == documents[:, :-1]).unsqueeze(-1)
        return torch.cat([x[:, :1], torch.addcmul(x[:, 1:], gate, x[:, :-1])], dim=1)

    def hidden(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """The stream before the head: (B, T) token numbers to (B, T, n_embd), normalised."""
        if tokens.size(1) > self.config.sequence_len:
            raise UserError(
                f"{tokens.size(1)} tokens do not fit a context of {self.config.sequence_len}", "give fewer tokens"
            )
        dtype = self.compute_dtype
        x = x0 = self._smear(norm(self.token_table(tokens).to(dtype)), documents)  # (B, T, C)
        rope = self.rope[: tokens.size(1)].to(dtype)
        middle = x0
        for i in range(self.config.n_layer):
            parts = (i, x, x0, tokens, rope, documents)
            x = again(self._layer, *parts) if self.recompute == "2" else self._layer(*parts)
            middle = x if i == self.config.n_layer // 2 else middle
        return norm(torch.addcmul(x, middle, self.backout_scale.to(dtype), value=-1))

    def _layer(
        self, i: int, x: Tensor, x0: Tensor, tokens: Tensor, rope: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        x = mix(x, x0, self.residual_scales[i], self.first_scales[i])
        value = self.value_tables[str(i)](tokens).to(x.dtype) if str(i) in self.value_tables else None
        return self.blocks[i](x, value, rope, documents)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) token numbers -> (B, T, vocab_size) fp32 logits, softcapped."""
        logits = self.head(self.hidden(tokens))[..., : self.config.vocab_size]
        return loss.softcap(logits.float())

    def loss_sum(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Summed nats of the targets that are not -1: (B, T), (B, T) -> scalar fp32, with gradients."""
        x = self.hidden(tokens, documents).flatten(0, 1)  # (B*T, C)
        return loss.chunked_loss(x, self.head.weight, targets.flatten(), self.config.vocab_size)

    @torch.no_grad()
    def token_nats(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Nats of each target, 0 where it is -1: (B, T), (B, T) -> (B, T) fp32, without gradients."""
        x = self.hidden(tokens, documents).flatten(0, 1)
        nats = loss.chunked_nats(x, self.head.weight, targets.flatten(), self.config.vocab_size)
        return nats.view_as(targets)

    def matmul_parameters(self) -> int:
        """Weights that multiply the token stream (blocks, gates, head), counted from the modules that hold them."""
        return sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))


def initialise(model: GPT, seed: int) -> None:
    """Set every weight of a model whose storage holds nothing yet.

    Output projections start at zero, so each block starts as the identity and the head sees the embedding; the head
    is nearly zero, so the first loss is ln(vocab_size). Taught in chapter 03_meta_init.
    """
    config = model.config
    std = 1.0 / math.sqrt(config.n_embd)
    bound = math.sqrt(3.0) * std  # U(-b, b) has standard deviation b / sqrt(3)
    L = config.n_layer
    with torch.no_grad():
        for name, p in model.named_parameters():
            last = name.split(".")[-2] if "." in name else name
            if name == "token_table.weight":
                fill_normal_(p, 0.8, seed, name)
            elif name == "head.weight":
                fill_normal_(p, 0.001, seed, name)
            elif name.startswith("value_tables."):
                fill_uniform_(p, -bound, bound, seed, name)
            elif last in ("value_gate", "smear_gate"):
                fill_uniform_(p, 0.0, 0.02, seed, name)
            elif last in ("q", "k", "v"):
                fill_uniform_(p, -bound, bound, seed, name)
            elif last == "fc":
                fill_uniform_(p, -0.4 * bound, 0.4 * bound, seed, name)
            elif last == "out":
                p.zero_()
        depth = torch.arange(L, dtype=torch.float64) / max(L - 1, 1)
        model.residual_scales.copy_(1.15 - 0.10 * depth)
        model.first_scales.copy_(0.20 - 0.15 * depth)
        model.smear_scale.zero_()
        model.backout_scale.fill_(0.2)
