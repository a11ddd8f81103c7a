"""FLOPs of a model with sinks and shared keys: your answer goes here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """One layer: `window` keys before a query are visible, and the first `sinks` tokens of the row."""

    n_kv_head: int
    window: int
    sinks: int
    keys_from: int | None  # number of the earlier layer whose keys and values it uses; None: its own


@dataclass(frozen=True)
class Model:
    """The sizes that count; all layers have the same number of query heads."""

    n_embd: int
    n_head: int
    head_dim: int
    hidden: int  # of the MLP
    vocab_size: int
    layers: tuple[Layer, ...]


def visible_pairs(sequence_len: int, window: int, sinks: int) -> int:
    """Pairs of query and visible key in one row of `sequence_len` tokens."""
    raise NotImplementedError


def training_flops(model: Model, sequence_len: int) -> int:
    """FLOPs of the forward and the backward of one row."""
    raise NotImplementedError
