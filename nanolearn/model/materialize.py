"""From a model without storage to real weights: meta device, then memory, then initial values, then a check.

A module built on the meta device has shapes and no memory, so a model larger than the host's memory can be planned
and built on the device that will hold it. What can go wrong is silent: `to_empty` leaves whatever was in memory, and a
parameter whose initialisation was forgotten trains on garbage or on zeros. So every parameter is first poisoned with
NaN, and a NaN that is left afterwards is an error that names it.
"""

from collections.abc import Callable

import torch
from torch import nn

from nanolearn.model.gpt import GPT, GPTConfig, initialise


def materialize(
    config: GPTConfig,
    device: torch.device | str,
    seed: int,
    compute_dtype: torch.dtype = torch.float32,
    fill: Callable[[GPT, int], None] = initialise,
    recompute: str = "none",
    attention: str = "blocked",
) -> GPT:
    """Build a GPT on `device` with its initial weights: fp32 (float64 when that is the compute dtype).

    Peak memory is the model itself and one block of weights: nothing is built twice. The weights are a function of
    (seed, name) alone, the same on every device. Raises AssertionError if `fill` leaves a parameter unset: a fault
    of the code, not of a person. Taught in chapter 03_meta_init.

    >>> config = GPTConfig(n_layer=1, n_embd=32, n_head=2, n_kv_head=2, head_dim=16, sequence_len=8, vocab_size=64)
    >>> model = materialize(config, "cpu", seed=0)
    >>> float(model.backout_scale.detach())
    0.20000000298023224
    """
    with torch.device("meta"):
        model = GPT(config, compute_dtype, recompute, attention)
    if compute_dtype == torch.float64:
        model = model.double()
    model.to_empty(device=device)
    poison(model)
    fill(model, seed)
    left = unset(model)
    if left:
        raise AssertionError(f"no initial value for {', '.join(left)}: set it in nanolearn.model.gpt.initialise")
    return model


@torch.no_grad()
def poison(model: nn.Module) -> None:
    """Fill every parameter and floating buffer with NaN.

    >>> layer = nn.Linear(2, 2)
    >>> poison(layer)
    >>> unset(layer)
    ['weight', 'bias']
    """
    for _, tensor in _floating(model):
        tensor.fill_(float("nan"))


@torch.no_grad()
def unset(model: nn.Module) -> list[str]:
    """Names of parameters and floating buffers that still hold a NaN, even a single one.

    A sum with a NaN in it is NaN, and takes no memory; a mask of NaNs would take a quarter of the largest table.
    """
    return [name for name, tensor in _floating(model) if bool(tensor.sum().isnan())]


def _floating(model: nn.Module):
    yield from model.named_parameters()
    yield from ((name, b) for name, b in model.named_buffers() if b.is_floating_point())
