"""Plans side by side, for machines that need not be here."""

from collections.abc import Sequence

from nanolearn import hardware
from nanolearn.lab import plots
from nanolearn.plan import make_plan
from nanolearn.recipe import build


def compare_plans(depth: int, machines: Sequence[str], overrides: str = "") -> None:
    """Show what the full recipe of a depth would take on machines that need not be here.

    Taught in chapter 09_scaling_rules.
    """
    columns, notes = [], []
    for name in machines:
        machine = hardware.named(name)
        plan = make_plan(*build(depth, "full", "auto", 0, overrides, machine), machine)
        numbers = plan.numbers()
        columns.append(
            {
                "": machine.label,
                "parameters": f"{sum(numbers['parameters'].values()):,}",
                "tokens": f"{plan.recipe.tokens:,}",
                "steps": f"{plan.recipe.steps:,} of {plan.recipe.batch_tokens:,} tokens",
                "rows at once": f"{plan.micro_batch} on each device, {plan.accumulation} times a step",
                "memory of a device": f"{plan.memory.total / 1e9:.0f} of {plan.available / 1e9:.0f} GB",
                "hours": f"{plan.hours:.1f}",
                "cost": f"${plan.cost:,.0f}",
                "download": f"{numbers['data']['download'] / 1e9:.0f} GB",
                "disk": f"{numbers['disk']['total'] / 1e9:.0f} GB",
            }
        )
        price = f"${plan.price:.2f} for a device and hour, {plan.price_basis}"
        notes.append(f"{machine.label}: {plan.speed.basis}; {price}.")
    lines = [f"| {row} | {' | '.join(column[row] for column in columns)} |" for row in columns[0]]
    lines.insert(1, "|---" * (len(columns) + 1) + "|")
    plots.show_text("\n".join(lines) + "\n\n" + "\n".join(notes))
