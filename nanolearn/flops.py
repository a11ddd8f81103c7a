"""Counting FLOPs, and the share of a machine's peak that they reach (MFU).

One model has five published counts that differ by up to a factor of two, so a count is never shown without
its name. Ours ("canonical") takes 6 FLOPs for every weight that multiplies the token stream (2 forward, 4
backward) and adds the two attention products over the keys that a window lets through. Tables are looked
up, not multiplied: they count nothing. The counts are of weights and shapes, not of layer classes, so
swapping a layer for an FP8 one changes nothing. Plain numbers come in; no model is needed.
"""

from dataclasses import dataclass

from nanolearn.errors import UserError

DEFINITIONS = ("canonical", "palm", "nanogpt", "llmc", "exact_causal")


@dataclass(frozen=True)
class Shape:
    """What the counts need to know of a model.

    matmul_params multiply the token stream (blocks, gates, head); table_params are looked up;
    position_params are a table of positions (GPT-2's); windows holds for each layer how far back a query
    sees, sequence_len for everything.
    """

    matmul_params: int
    total_params: int
    table_params: int
    position_params: int
    n_layer: int
    n_head: int
    head_dim: int
    n_embd: int
    sequence_len: int
    windows: tuple[int, ...]


def visible_keys(window: int, sequence_len: int) -> float:
    """Mean number of keys that a query sees: min(i, window) + 1 over all positions i.

    >>> visible_keys(4, 4), visible_keys(1, 4)
    (2.5, 1.75)
    """
    rising = min(window, sequence_len)  # positions that see everything before them
    return (rising * (rising + 1) / 2 + (sequence_len - rising) * (rising + 1)) / sequence_len


def per_token(shape: Shape, definition: str = "canonical") -> float:
    """FLOPs of training on one token, forward and backward, by a named definition.

    canonical: 6 x weights that multiply + 12 x heads x head_dim x min(window, T) a layer. palm: 6N +
    12LHQT, N with all tables (Chowdhery et al., 2022, arXiv 2204.02311). nanogpt: the same without the
    position table. llmc: 6N + 6LCT. exact_causal: canonical with the keys that are really visible. Raises
    UserError for another name.

    >>> tiny = Shape(10, 14, 4, 0, n_layer=1, n_head=1, head_dim=2, n_embd=2, sequence_len=4, windows=(4,))
    >>> [per_token(tiny, name) for name in DEFINITIONS]
    [156.0, 180.0, 180.0, 132.0, 120.0]

    Taught in chapter 06_mfu.
    """
    width = shape.n_head * shape.head_dim
    full = 12.0 * shape.n_layer * width * shape.sequence_len
    if definition == "canonical":
        keys: float = sum(min(window, shape.sequence_len) for window in shape.windows)
        return 6.0 * shape.matmul_params + 12.0 * width * keys
    if definition == "palm":
        return 6.0 * shape.total_params + full
    if definition == "nanogpt":
        return 6.0 * (shape.total_params - shape.position_params) + full
    if definition == "llmc":
        return 6.0 * shape.total_params + 6.0 * shape.n_layer * shape.n_embd * shape.sequence_len
    if definition == "exact_causal":
        keys = sum(visible_keys(window, shape.sequence_len) for window in shape.windows)
        return 6.0 * shape.matmul_params + 12.0 * width * keys
    raise UserError(f"FLOP definition {definition!r}", f"give one of {', '.join(DEFINITIONS)}")


def mfu(flops_per_token: float, tokens_per_second: float, peak: float | None, count: int = 1) -> float | None:
    """Share of the peak of `count` devices that is reached; None when the peak isn't known (never 0, never
    a guess).

    >>> round(mfu(5.2848e9, 524288 / 7.7, 1.3074e15), 4), mfu(1.0, 1.0, None)
    (0.2752, None)

    Taught in chapter 06_mfu.
    """
    return flops_per_token * tokens_per_second / (peak * count) if peak else None
