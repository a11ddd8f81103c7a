"""Documents that share a prefix: the mask, the route, the attention."""

from collections.abc import Sequence

from torch import Tensor


def shared_prefix_mask(prefix: int, lengths: Sequence[int]) -> Tensor:
    """True where a query looks: (T, T), T = prefix + sum(lengths)."""
    raise NotImplementedError


def route(prefix: int, lengths: Sequence[int]) -> str:
    """ "causal", "split" or "masked", by the statement's rule."""
    raise NotImplementedError


def attend(q: Tensor, k: Tensor, v: Tensor, prefix: int, lengths: Sequence[int]) -> Tensor:
    """Attention by the way that `route` names: q (B, T, H, D), k and v (B, T, KV, D) -> (B, T, H, D)."""
    raise NotImplementedError
