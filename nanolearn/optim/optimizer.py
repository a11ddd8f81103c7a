"""The mixed optimizer: Muon for the matrices inside the blocks, AdamW for tables, head and scalars.

One class holds both, because they share a step, a schedule and a checkpoint, and the same class serves one rank and
many (`nanolearn.optim.shards` says who owns what). Muon's matrices are kept in stacks of one shape, so that each shape
is orthogonalised in one batched product. State is fp32 and is saved under parameter names, never under positions or
ranks, so that a checkpoint outlives a change in the order of modules and can be read by any number of ranks.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from nanolearn import distributed
from nanolearn.errors import UserError
from nanolearn.model.gpt import GPT
from nanolearn.optim.exchange import Exchange
from nanolearn.optim.muon import moment_shape, muon_update
from nanolearn.optim.shards import Piece, by_rows, deal

ADAM_EPS = 1e-10
STACK_ELEMENTS = 1 << 28  # a Muon step works on some copies of a whole stack: 1 GB each at most


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
    """What AdamW needs for one kind of parameter: its rate's name in `Rates`, its betas, its weight decay; and whether
    it is a table, large enough to be cut by rows."""

    rate: str
    betas: tuple[float, float]
    decay: float
    table: bool = False


ADAM_GROUPS = {
    "token_table": AdamGroup("token_table", (0.8, 0.995), 0.001, table=True),
    "value_tables": AdamGroup("value_tables", (0.8, 0.995), 0.01, table=True),
    "head": AdamGroup("head", (0.8, 0.96), 0.01, table=True),
    "first_scales": AdamGroup("x0", (0.96, 0.95), 0.0),
    "residual_scales": AdamGroup("residual", (0.8, 0.95), 0.05),
    "smear_gate": AdamGroup("smear", (0.8, 0.95), 0.0),
    "smear_scale": AdamGroup("smear", (0.8, 0.95), 0.0),
    "backout_scale": AdamGroup("smear", (0.8, 0.95), 0.0),
}


class Optimizer:
    """Muon and AdamW over one model; `step` takes the schedule's numbers, it has no schedule of its own.

    The order of a step: `expect` before the last backward, `collect` after it, then `step` with the gradients that
    `owned_gradients` gives. A parameter without a gradient is stepped with a zero one, so that momentum and decay go
    on. `master` says where the fp32 weights are: "fp32" on every rank; "sharded" only with their owner's state, the
    model itself being in 16 bits, gradients too; "none" nowhere (small updates are lost). Scalars are always fp32.

    Taught in chapters 08_muon and 14_scaling_out.
    """

    def __init__(self, model: GPT, rates: Rates, master: str = "fp32") -> None:
        self.rates, self.world = rates, distributed.world()
        self.named = dict(model.named_parameters())
        matrices = [name for name, p in self.named.items() if name.startswith("blocks.") and p.ndim == 2]
        others = [name for name in self.named if name not in set(matrices)]
        self.tables = [name for name in others if ADAM_GROUPS[name.split(".")[0]].table]
        self.scalars = [name for name in others if name not in self.tables]
        self.pieces = self._share_out(matrices)
        self.own = {p.name: p for pieces in self.pieces.values() for p in pieces if p.owner == self.world.rank}
        self.masters = self._set_master(master, model.compute_dtype)
        self.exchange = Exchange(self.named, self.pieces)
        device = next(model.parameters()).device.type
        self.mesh = init_device_mesh(device, (self.world.size,)) if self.world.size > 1 else None
        # In one order on all ranks, also where a rank owns nothing of a shape: (all names, what this rank stacks).
        self.shapes: dict[torch.Size, list[str]] = defaultdict(list)
        for name in matrices:
            self.shapes[self.named[name].shape].append(name)
        self.stacks = {shape: list(self._stacks(shape, names)) for shape, names in self.shapes.items()}
        self.state: dict[str, Tensor] = {}
        self._make_state()

    def _share_out(self, matrices: list[str]) -> dict[str, list[Piece]]:
        """Pieces by parameter, in the order in which a backward finishes them: head, blocks, tables."""
        owners = deal({name: self.named[name].numel() for name in matrices}, self.world.size)
        pieces = {name: [Piece(name, owners[name], 0, self.named[name].size(0))] for name in reversed(matrices)}
        cut = {name: by_rows(name, self.named[name].size(0), self.world.size) for name in reversed(self.tables)}
        return {name: cut[name] for name in cut if name.startswith("head.")} | pieces | cut

    def _set_master(self, master: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """The fp32 weights that this rank keeps beside a 16-bit model, by name."""
        if master != "fp32" and dtype.itemsize >= torch.float32.itemsize:
            raise UserError(f"master={master} is for 16-bit weights, and here they are {dtype}", "give dtype=bfloat16")
        kept = {}
        for name in self.pieces if master != "fp32" else ():
            p = self.named[name]
            if master == "sharded":
                kept[name] = self._own_rows(name, p.detach()).clone()
            p.data = p.data.to(dtype)
        return kept

    def _own_rows(self, name: str, tensor: Tensor) -> Tensor:
        """The rows of a parameter-shaped tensor that this rank owns: a view, of no rows where it owns none."""
        piece = self.own.get(name)
        return piece.of(tensor) if piece else tensor[:0]

    def _stacks(self, shape: torch.Size, names: list[str]) -> Iterator[list[str]]:
        mine = [name for name in names if name in self.own]
        most = max(1, STACK_ELEMENTS // shape.numel())
        for first in range(0, len(mine), most):
            yield mine[first : first + most]

    def _make_state(self) -> None:
        for shape, stacks in self.stacks.items():
            for names in stacks:
                like = self._weight(names[0])
                n = torch.Size((len(names), *shape))
                self._keep(names, "momentum", torch.zeros(n, dtype=like.dtype, device=like.device))
                self._keep(names, "second_moment", torch.zeros(moment_shape(n), dtype=like.dtype, device=like.device))
        for name in (*self.tables, *self.scalars):
            like = self._weight(name)
            self.state[f"{name}.exp_avg"] = torch.zeros_like(like)
            self.state[f"{name}.exp_avg_sq"] = torch.zeros_like(like)
            self.state[f"{name}.step"] = torch.zeros((), dtype=torch.float32, device=like.device)

    def _keep(self, names: list[str], slot: str, stack: Tensor) -> None:
        # One stack is worked on, its slices are what a checkpoint sees: the same memory under two names.
        self.state[f"stack.{names[0]}.{slot}"] = stack
        self.state |= {f"{name}.{slot}": part for name, part in zip(names, stack.unbind(), strict=True)}

    def _weight(self, name: str) -> Tensor:
        """What a step changes, in its own rows: the fp32 master, or the model's weights, or an fp32 copy of them."""
        if name in self.masters:
            return self.masters[name]
        p = self._model_rows(name)
        return p.float() if p.dtype.itemsize < torch.float32.itemsize else p

    def _model_rows(self, name: str) -> Tensor:
        p = self.named[name].detach()
        return p if name in self.scalars else self._own_rows(name, p)

    def _gradient(self, name: str) -> Tensor:
        p = self.named[name]
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        return p.grad if name in self.scalars else self._own_rows(name, p.grad)

    def expect(self) -> None:
        """The next backward is the last one of this step."""
        self.exchange.expect()

    def collect(self) -> None:
        """Wait until the gradients are summed over all ranks."""
        self.exchange.collect()

    def owned_gradients(self) -> list[Tensor]:
        """The summed gradients that this rank steps with: its pieces, and everybody's scalars."""
        return [self._gradient(name) for name in (*self.own, *self.scalars)]

    def square_sum(self) -> Tensor:
        """This rank's share of the squared gradient norm: added up over ranks, each number counts once. Shape ()."""
        names = [*self.own, *self.scalars] if self.world.main else list(self.own)
        gradients = [self._gradient(name) for name in names]
        return (
            get_total_norm(gradients).square()
            if gradients
            else torch.zeros((), device=self.named["head.weight"].device)
        )

    @torch.no_grad()
    def step(self, rate_scale: float, momentum: float, decay_scale: float) -> None:
        """Change the weights once. `rate_scale` multiplies every rate, `decay_scale` Muon's decay."""
        for name in self.tables:  # first: they are sent while the matrices are worked on
            self._adam_step(name, rate_scale)
            self.exchange.send([name])
        for shape, names in self.shapes.items():
            for mine in self.stacks[shape]:
                self._muon_step(mine, rate_scale * self.rates.matrix, momentum, decay_scale * self.rates.decay)
            self.exchange.send(names)
        for name in self.scalars:
            self._adam_step(name, rate_scale)
        self.exchange.settle()

    def _muon_step(self, names: list[str], rate: float, momentum: float, decay: float) -> None:
        weights = [self._weight(name) for name in names]
        gradient = torch.stack([self._gradient(name).to(weights[0].dtype) for name in names])  # (n, rows, cols)
        buffer, second_moment = (self.state[f"stack.{names[0]}.{s}"] for s in ("momentum", "second_moment"))
        update = muon_update(gradient, buffer, second_moment, momentum)
        rows, cols = weights[0].shape
        rate *= max(1.0, rows / cols) ** 0.5
        stack = torch.stack(weights)
        # Cautious decay: only where the step also shrinks the weight, so that decay never fights the gradient.
        update.addcmul_(stack, (update * stack >= 0).to(stack.dtype), value=decay)
        torch._foreach_add_(weights, list(update.unbind()), alpha=-rate)
        for name, weight in zip(names, weights, strict=True):
            self._publish(name, weight)

    def _adam_step(self, name: str, rate_scale: float) -> None:
        group = ADAM_GROUPS[name.split(".")[0]]
        exp_avg, exp_avg_sq, step = (self.state[f"{name}.{slot}"] for slot in ("exp_avg", "exp_avg_sq", "step"))
        weight = self._weight(name)
        adamw(
            params=[weight], grads=[self._gradient(name).to(weight.dtype)],
            exp_avgs=[exp_avg], exp_avg_sqs=[exp_avg_sq], max_exp_avg_sqs=[], state_steps=[step],
            fused=True, amsgrad=False, maximize=False, eps=ADAM_EPS,
            beta1=group.betas[0], beta2=group.betas[1], weight_decay=group.decay,
            lr=rate_scale * getattr(self.rates, group.rate),
        )  # fmt: skip
        self._publish(name, weight)

    def _publish(self, name: str, weight: Tensor) -> None:
        if weight.dtype != self.named[name].dtype:
            self._model_rows(name).copy_(weight)

    def zero_grad(self) -> None:
        """Forget the gradients; the next backward writes new ones instead of adding."""
        for p in self.named.values():
            p.grad = None

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of the model, by parameter name: fp32 masters where there are any.

        Of sharded masters a rank has its own matrices, and its rows of tables as DTensors.
        """
        if not self.masters:
            return {name: p.detach() for name, p in self.named.items()}
        return {name: self._global(name, self._weight(name)) for name in self.named if self._has(name)}

    def state_dict(self) -> dict[str, Tensor]:
        """All state of this rank as fp32 tensors under parameter names: `blocks.0.mlp.fc.weight.momentum`, ...

        Matrices' state is its owner's alone; tables' state is a DTensor of rows; scalars' state is the same everywhere.
        """
        named = {name: tensor for name, tensor in self.state.items() if not name.startswith("stack.")}
        return {name: self._global(name.rpartition(".")[0], tensor) for name, tensor in named.items()}

    def _has(self, name: str) -> bool:
        return name in self.own or name in self.tables or name in self.scalars

    def _global(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's rows of a table, with their place in the whole; anything else as it is."""
        if self.mesh is None or name not in self.tables or not tensor.ndim:
            return tensor
        whole = self.named[name]
        return DTensor.from_local(
            tensor, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def restored(self) -> None:
        """After `weights()` was filled from a checkpoint: give the model the masters' weights, on all ranks."""
        if self.masters:
            for name in self.own:
                self._publish(name, self.masters[name])
            self.exchange.send(self.pieces)
            self.exchange.settle()
