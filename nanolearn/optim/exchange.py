"""Gradients to their owners while the backward still runs, new weights from their owners while others still step.

Messages have to leave in one order on every rank, or the ranks wait for each other for ever. So the order is fixed
before the first step (the order in which a backward finishes, about), a message leaves when its gradient and all
before it are done, and `collect` sends what is left: a parameter that this rank never touched takes part with zeros.
With one rank there is nobody to talk to, and nothing here does anything. Taught in chapter 14_scaling_out.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from nanolearn.optim.shards import Piece


class Exchange:
    """What the ranks tell each other in one step. `pieces` holds, in order of sending, the parameters that have
    owners; every other parameter is summed on all ranks.

    >>> p = Parameter(torch.ones(2, 2))
    >>> exchange = Exchange({"p": p}, {"p": [Piece("p", 0, 0, 2)]})
    >>> exchange.expect()
    >>> (p * 3).sum().backward()
    >>> exchange.collect()
    >>> p.grad[0]
    tensor([3., 3.])
    """

    def __init__(self, parameters: Mapping[str, Parameter], pieces: Mapping[str, Sequence[Piece]]) -> None:
        self.parameters, self.pieces = parameters, pieces
        self.everybodys = [p for name, p in parameters.items() if name not in pieces]
        self.waiting: deque[str] | None = None  # None: micro-steps that are not the last only add up
        self.done: set[str] = set()
        self.works: list[dist.Work] = []
        self.alone = not dist.is_initialized()
        if not self.alone:
            for name in pieces:
                parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: self._finished(name))

    def expect(self) -> None:
        """The backward that comes is the last of this step: what it finishes may leave."""
        self.waiting, self.done = deque(self.pieces), set()

    def _finished(self, name: str) -> None:
        if self.waiting is None:
            return
        self.done.add(name)
        while self.waiting and self.waiting[0] in self.done:
            self._sum(self.waiting.popleft())

    def _sum(self, name: str) -> None:
        gradient = self._gradient(self.parameters[name])
        for piece in self.pieces[name]:
            self.works.append(dist.reduce(piece.of(gradient), dst=piece.owner, async_op=True))

    @staticmethod
    def _gradient(parameter: Parameter) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def collect(self) -> None:
        """Wait until each owner holds the sum of its gradients over all ranks; the others' are then worthless."""
        if self.alone:
            return
        if self.waiting is None:
            self.expect()
        while self.waiting:
            self._sum(self.waiting.popleft())
        self.waiting = None
        gradients = [self._gradient(p) for p in self.everybodys]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) if gradients else torch.zeros(0)
        self.works.append(dist.all_reduce(flat, async_op=True))
        self.settle()
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def send(self, names: Iterable[str]) -> None:
        """Start to send the owners' new weights of these parameters to all; every rank names the same ones."""
        if not self.alone:
            for piece in (piece for name in names for piece in self.pieces[name]):
                self.works.append(dist.broadcast(piece.of(self.parameters[piece.name]), src=piece.owner, async_op=True))

    def settle(self) -> None:
        """Wait until all that was started has arrived (on a GPU its stream waits, not the host)."""
        for work in self.works:
            work.wait()
        self.works.clear()
