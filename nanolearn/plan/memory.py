"""How much memory one device needs to train: counted from what the optimizer holds and what autograd keeps.

Activations, per token and layer, in elements of the compute dtype (C the width, Q = heads x head_dim, K =
kv heads x head_dim; model/gpt.py names the tensors):

    residual mix keeps the stream before it                 C
    norm before attention, read by q, k and v               C
    normalised q and k; rotated q and k; v; attention out   3Q + 3K
    the row of the value table, in layers that have one     K
    norm before the MLP, read by its first matrix           C
    positive part of the hidden layer, and its square       8C
    a window in blocks: keys and values twice but for the
      first block, the output joined from its parts         Q + 2K (1 - window/T)
    a norm that keeps its own input (fused kernels)         2C
    a norm composed of fp32 steps (16 bits on a CPU)        4C + Q + K

That is 17.5 C on a CPU in fp32 and 19.5 C on an accelerator, without windows (a test counts the saved
tensors on a CPU). Not measured on an accelerator: for a depth-24 run in a public log (MI300X, 32 rows of
2,048, peak 105 GB, another implementation, compiled) this count says 121 GB.

Recomputation trades some of it for time; what is computed again exists for one layer at a time:

    recompute=1 keeps all but the positive part and its square    8C less a layer, 8C once
    recompute=2 keeps the stream before a block, nothing in it    C a layer, one layer's lines once

Micro-steps measured on a CPU in fp32 (bench/recompute.py, two small shapes of 8 and 12 layers) peak at about
0.6 and 0.2 of what "none" takes, and the count is 1% to 7% above them.
"""

from dataclasses import dataclass

from nanolearn.model.gpt import GPTConfig
from nanolearn.model.loss import ACCELERATOR_CHUNK, CPU_CHUNK
from nanolearn.optim.optimizer import STACK_ELEMENTS

FP32 = 4
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RESERVE = {"cpu": 0.45e9, "mps": 1e9, "cuda": 1.5e9}  # Python and torch; on a GPU its context and allocator gaps
OUTSIDE = 6  # C a token kept outside the blocks: embedding, smear, last norm, gradient of the hidden states
IN_FLIGHT = 4  # C a token of gradients on their way through one block
STEP_COPIES = 6  # fp32 copies of one stack of matrices while Muon works on it


@dataclass(frozen=True)
class Memory:
    """Bytes on one device by kind.

    The optimizer's step comes when the activations are gone: the larger of the two counts.

    >>> Memory(4, 4, 8, 100, 10, step=20, reserve=1).total
    127
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    step: int
    reserve: int

    @property
    def total(self) -> int:
        fixed = self.weights + self.gradients + self.optimizer + self.reserve
        return fixed + max(self.activations + self.logits, self.step)


def layer_elements(config: GPTConfig, layer: int, kind: str, dtype: str) -> float:
    """Elements that one layer keeps for each token until its backward; `kind` is the device's type.

    >>> c = GPTConfig(24, 1536, 12, 12, 128, 2048, 32768, window="L")
    >>> [layer_elements(c, layer, "cuda", "bfloat16") / 1536 for layer in (22, 23)]
    [19.0, 20.0]

    Taught in chapter 06_mfu.
    """
    width, queries = config.n_embd, config.n_head * config.head_dim
    keys = config.n_kv_head * config.head_dim
    kept: float = 11 * width + 3 * queries + 3 * keys + (keys if config.has_value_table(layer) else 0)
    if kind != "cpu":
        kept += 2 * width
    elif BYTES[dtype] < FP32:
        kept += 4 * width + queries + keys
    window = config.windows[layer]
    if window < config.sequence_len - 1 and config.sequence_len > 2 * window:
        kept += queries + 2 * keys * (1 - window / config.sequence_len)
    return kept


def _activations(config: GPTConfig, tokens: int, kind: str, dtype: str, recompute: str) -> tuple[float, float]:
    """Bytes that wait for the backward, and those of the one part that is computed again at a time."""
    layers = [layer_elements(config, layer, kind, dtype) for layer in range(config.n_layer)]
    # Row sums in fp32: two norms, q's and k's norms, attention's log-sum-exp.
    small: float = FP32 * config.n_layer * (2 + 2 * config.n_head + config.n_kv_head)
    cast: float = config.parameter_groups()["matrices"] * BYTES[dtype] if BYTES[dtype] < FP32 else 0
    hidden, masks = 8 * config.n_embd, _masks(config, dtype)
    kept, again, square = sum(layers), 0.0, sum(masks)
    if recompute == "1":
        kept, again = kept - hidden * config.n_layer, hidden
    elif recompute == "2":
        kept, again, square = config.n_embd * config.n_layer, max(layers), max(masks)
        small, cast = small / config.n_layer, cast / config.n_layer
    around = (OUTSIDE + IN_FLIGHT) * config.n_embd
    waiting = tokens * ((kept + around) * BYTES[dtype] + small) + cast + square
    return waiting, tokens * again * BYTES[dtype]


def _masks(config: GPTConfig, dtype: str) -> list[int]:
    """Bytes of each layer's mask, as numbers: (window, 2 x window) for all blocks; (T, T) in rows too short for two."""
    T = config.sequence_len
    return [0 if w >= T - 1 else (T * T if T <= 2 * w else 2 * w * w) * BYTES[dtype] for w in config.windows]


def _logits(config: GPTConfig, tokens: int, kind: str, dtype: str) -> int:
    chunk = CPU_CHUNK if kind == "cpu" else ACCELERATOR_CHUNK
    rows = min(tokens, max(1, chunk // config.padded_vocab))
    sixteen = BYTES[dtype] if BYTES[dtype] < FP32 else 0
    # tanh and exp in fp32; logits and their gradient in 16 bits; the head's gradient twice, and the head cast.
    live = rows * config.padded_vocab * (2 * FP32 + 2 * sixteen)
    return live + config.parameter_groups()["head"] * (2 * FP32 + sixteen)


def estimate(
    config: GPTConfig,
    rows: int,
    *,
    kind: str,
    dtype: str,
    recompute: str = "none",
    master: str = "fp32",
    world: int = 1,
) -> Memory:
    """Memory of one device for micro-batches of `rows` rows.

    Optimizer state is fp32 (Muon: momentum and a second moment a row; AdamW: two moments); each of `world` devices
    holds its share, and with sharded masters the fp32 weights of its share. On a CPU a save copies what the device
    writes into the same memory. Taught in chapters 06_mfu and 14_scaling_out.

    >>> c = GPTConfig(24, 1536, 12, 12, 128, 2048, 32768, window="L")
    >>> m = estimate(c, 32, kind="cuda", dtype="bfloat16")
    >>> round(m.weights / 1e9, 2), round(m.total / 1e9)
    (5.54, 121)
    """
    groups = config.parameter_groups()
    parameters, matrices = sum(groups.values()), groups["matrices"]
    stored = FP32 if master == "fp32" else BYTES[dtype]
    second_moments = config.n_layer * (9 * config.n_embd + (config.n_head + 2 * config.n_kv_head) * config.head_dim)
    state = FP32 * (matrices + second_moments + 2 * (parameters - matrices))
    masters = FP32 * parameters if master == "sharded" else 0
    # A rank's largest stack: its share of one shape, cut where the optimizer cuts it.
    largest_stack = 4 * config.n_embd**2 * -(-config.n_layer // world)
    tokens = rows * config.sequence_len
    waiting, again = _activations(config, tokens, kind, dtype, recompute)
    logits = _logits(config, tokens, kind, dtype)
    return Memory(
        weights=parameters * stored,
        gradients=parameters * stored,
        optimizer=(state + masters) // world,
        activations=int(waiting + max(again - logits, 0)),  # the logits are gone when a layer is computed again
        logits=logits,
        step=STEP_COPIES * FP32 * min(largest_stack, max(STACK_ELEMENTS, 4 * config.n_embd**2)),
        reserve=int(RESERVE[kind]) + ((FP32 * parameters + state) // world if kind == "cpu" else 0),
    )


def checkpoint_bytes(config: GPTConfig) -> int:
    """Bytes of one checkpoint: weights and optimizer state, all fp32.

    >>> round(checkpoint_bytes(GPTConfig(24, 1536, 12, 12, 128, 2048, 32768)) / 1e9, 1)
    13.9
    """
    whole = estimate(config, 1, kind="cuda", dtype="float32")
    return whole.weights + whole.optimizer
