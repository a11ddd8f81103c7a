"""What changes during a run: the rate, Muon's momentum and Muon's weight decay, as functions of the step.

All lengths are steps of this run, derived from its horizon by the recipe, so that a short run is a small copy of a
long one: ramps in fixed numbers of steps would collide (momentum jumped from .970 to .922 in one step at 500 steps).
"""

import math
from dataclasses import dataclass

MOMENTUM_START, MOMENTUM_PEAK, MOMENTUM_END = 0.85, 0.97, 0.90


@dataclass(frozen=True)
class Schedule:
    """Multipliers by step: warm up, stay, warm down to `final`.

    `warmup`, `momentum_ramp` are steps; `warmdown` is the share of the run over which the rate falls; `final` the
    share of the peak rate that is left at the last step.

    >>> s = Schedule(steps=100, warmup=5, warmdown=0.65, final=0.05, momentum_ramp=35)
    >>> [round(s.rate(i), 3) for i in (0, 4, 35, 100)]
    [0.2, 1.0, 1.0, 0.05]

    Taught in chapter 00_model.
    """

    steps: int
    warmup: int
    warmdown: float
    final: float
    momentum_ramp: int

    def _fallen(self, step: int) -> float:
        """Share of the warm-down that is behind us, 0 to 1."""
        start = self.steps * (1 - self.warmdown)
        return min(max((step - start) / max(self.steps - start, 1e-9), 0.0), 1.0) if self.warmdown else 0.0

    def rate(self, step: int) -> float:
        """The factor on every learning rate at a step counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 1.0 - (1.0 - self.final) * self._fallen(step)

    def momentum(self, step: int) -> float:
        """Muon's momentum: up while gradients are large and alike, down again as the rate falls."""
        rise = min(step / self.momentum_ramp, 1.0) if self.momentum_ramp else 1.0
        up = MOMENTUM_START + (MOMENTUM_PEAK - MOMENTUM_START) * rise
        return up + (MOMENTUM_END - MOMENTUM_PEAK) * self._fallen(step)

    def decay(self, step: int) -> float:
        """The factor on Muon's weight decay: half a cosine from 1 to 0."""
        return 0.5 * (1.0 + math.cos(math.pi * min(step / max(self.steps, 1), 1.0)))
