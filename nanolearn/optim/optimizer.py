"""The mixed optimizer: Muon for the matrices inside the blocks, AdamW for tables, head and scalars.

One class holds both, because they share a step, a schedule and a checkpoint. Muon's matrices are kept in stacks of one
shape, so that each shape is orthogonalised in one batched product. State is fp32 and is saved under parameter names,
never under positions, so that a checkpoint outlives a change in the order of modules.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nanolearn.model.gpt import GPT
from nanolearn.optim.muon import moment_shape, muon_update

ADAM_EPS = 1e-10


@dataclass(frozen=True)
class Rates:
    """Peak learning rates by group, and Muon's weight decay. Units: change a step; see chapter 09_scaling_rules."""

    matrix: float
    token_table: float
    value_tables: float
    head: float
    x0: float
    residual: float
    smear: float
    decay: float


@dataclass(frozen=True)
class AdamGroup:
    """What AdamW needs for one kind of parameter: its rate's name in `Rates`, its betas, its weight decay."""

    rate: str
    betas: tuple[float, float]
    decay: float


ADAM_GROUPS = {
    "token_table": AdamGroup("token_table", (0.8, 0.995), 0.001),
    "value_tables": AdamGroup("value_tables", (0.8, 0.995), 0.01),
    "head": AdamGroup("head", (0.8, 0.96), 0.01),
    "first_scales": AdamGroup("x0", (0.96, 0.95), 0.0),
    "residual_scales": AdamGroup("residual", (0.8, 0.95), 0.05),
    "smear_gate": AdamGroup("smear", (0.8, 0.95), 0.0),
    "smear_scale": AdamGroup("smear", (0.8, 0.95), 0.0),
    "backout_scale": AdamGroup("smear", (0.8, 0.95), 0.0),
}


class Optimizer:
    """Muon and AdamW over one model; `step` takes the schedule's numbers, it has no schedule of its own.

    A parameter without a gradient is stepped with a zero one, so that momentum and decay go on. Taught in chapter
    08_muon.
    """

    def __init__(self, model: GPT, rates: Rates) -> None:
        self.rates = rates
        self.named = dict(model.named_parameters())
        self.stacks: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self.adam_names: list[str] = []
        for name, p in self.named.items():
            if name.startswith("blocks.") and p.ndim == 2:
                self.stacks[tuple(p.shape)].append(name)
            else:
                self.adam_names.append(name)
        self.state: dict[str, Tensor] = {}
        for shape, names in self.stacks.items():
            like = self.named[names[0]]
            n = torch.Size((len(names), *shape))
            self._keep(names, "momentum", torch.zeros(n, dtype=like.dtype, device=like.device))
            self._keep(names, "second_moment", torch.zeros(moment_shape(n), dtype=like.dtype, device=like.device))
        for name in self.adam_names:
            p = self.named[name]
            self.state[f"{name}.exp_avg"] = torch.zeros_like(p, requires_grad=False)
            self.state[f"{name}.exp_avg_sq"] = torch.zeros_like(p, requires_grad=False)
            self.state[f"{name}.step"] = torch.zeros((), dtype=torch.float32, device=p.device)

    def _keep(self, names: list[str], slot: str, stack: Tensor) -> None:
        # One stack is worked on, its slices are what a checkpoint sees: the same memory under two names.
        self.state[f"stack.{names[0]}.{slot}"] = stack
        self.state |= {f"{name}.{slot}": part for name, part in zip(names, stack.unbind(), strict=True)}

    @torch.no_grad()
    def step(self, rate_scale: float, momentum: float, decay_scale: float) -> None:
        """Change the weights once. `rate_scale` multiplies every rate, `decay_scale` Muon's decay."""
        for names in self.stacks.values():
            self._muon_step(names, rate_scale * self.rates.matrix, momentum, decay_scale * self.rates.decay)
        for name in self.adam_names:
            self._adam_step(name, rate_scale)

    def _gradient(self, name: str) -> Tensor:
        p = self.named[name]
        return torch.zeros_like(p) if p.grad is None else p.grad

    def _muon_step(self, names: list[str], rate: float, momentum: float, decay: float) -> None:
        weights: list[Tensor] = [self.named[name] for name in names]
        gradient = torch.stack([self._gradient(name).to(weights[0].dtype) for name in names])  # (n, rows, cols)
        buffer, second_moment = (self.state[f"stack.{names[0]}.{s}"] for s in ("momentum", "second_moment"))
        update = muon_update(gradient, buffer, second_moment, momentum)
        rows, cols = weights[0].shape
        rate *= max(1.0, rows / cols) ** 0.5
        stack = torch.stack(weights)
        # Cautious decay: only where the step also shrinks the weight, so that decay never fights the gradient.
        update.addcmul_(stack, (update * stack >= 0).to(stack.dtype), value=decay)
        torch._foreach_add_(weights, list(update.unbind()), alpha=-rate)

    def _adam_step(self, name: str, rate_scale: float) -> None:
        group = ADAM_GROUPS[name.split(".")[0]]
        exp_avg, exp_avg_sq, step = (self.state[f"{name}.{slot}"] for slot in ("exp_avg", "exp_avg_sq", "step"))
        adamw(
            params=[self.named[name]], grads=[self._gradient(name)],
            exp_avgs=[exp_avg], exp_avg_sqs=[exp_avg_sq], max_exp_avg_sqs=[], state_steps=[step],
            fused=True, amsgrad=False, maximize=False, eps=ADAM_EPS,
            beta1=group.betas[0], beta2=group.betas[1], weight_decay=group.decay,
            lr=rate_scale * getattr(self.rates, group.rate),
        )  # fmt: skip

    def zero_grad(self) -> None:
        """Forget the gradients; the next backward writes new ones instead of adding."""
        for p in self.named.values():
            p.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """All state as fp32 tensors under parameter names: `blocks.0.mlp.fc.weight.momentum`, ..."""
        return {name: tensor for name, tensor in self.state.items() if not name.startswith("stack.")}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy saved state in. Raises KeyError when a name is missing or unknown: another model's state."""
        own = self.state_dict()
        if own.keys() != state.keys():
            raise KeyError(f"optimizer state does not match the model: {sorted(own.keys() ^ state.keys())[:4]}")
        for name, tensor in own.items():
            tensor.copy_(state[name])
