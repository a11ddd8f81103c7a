"""The plan: what a run needs and what it costs, before anything starts; refused if it can't fit or can't
finish.

A plan is arithmetic on a recipe, an execution and a machine, so that eight H100s can be planned on a
laptop. It chooses the micro-batch where that was left open. What it can't know, it says it doesn't know.
"""

from nanolearn.plan.make import choose_micro_batch, make_plan
from nanolearn.plan.plan import Plan

__all__ = ["Plan", "choose_micro_batch", "make_plan"]
