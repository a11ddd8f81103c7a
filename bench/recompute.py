"""What recomputation saves and costs, and what 16-bit gradients lose: measured on this CPU, beside the plan's counts.

Memory is the most that torch's allocator had handed out at once in one micro-step, forward and backward, beyond
weights and gradients. Time is the median of some micro-steps. The published figures of the kind (GPT-2 1558M, 16 rows
of 1,024 on a GPU: 39.5, 30.3 and 25.6 GiB) are another model's. Gradients: one step's, accumulated over 8 micro-steps
in bf16 and in fp32, against float64. On an accelerator nothing of this was measured.
`python bench/recompute.py` takes two minutes.
"""

import statistics
import time

import record
import torch
from torch.profiler import ProfilerActivity, profile

from nanolearn.host import reuse_freed_memory
from nanolearn.model.gpt import GPTConfig
from nanolearn.model.materialize import materialize
from nanolearn.plan.ladder import _work
from nanolearn.plan.memory import estimate

SHAPES = {
    "8 layers, width 256, 4 x 256": (GPTConfig(8, 256, 2, 2, 128, 256, 4096, "L"), 4),
    "12 layers, width 256, 2 x 512, windows": (GPTConfig(12, 256, 2, 2, 128, 512, 4096, "SSSL"), 2),
}
ROUNDS, MICRO_STEPS = 5, 8


def peak_bytes(work) -> int:
    """The most that the allocator had handed out at once, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    now = top = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


def micro_step(model, tokens):
    """Forward and backward, as the trainer does them."""
    (model.loss_sum(tokens, tokens.roll(-1, 1)) / tokens.numel()).backward()


def measure(shape: GPTConfig, rows: int) -> dict:
    """Peak and time for each way, and what the plan counts."""
    found: dict = {}
    tokens = torch.randint(0, shape.vocab_size, (rows, shape.sequence_len), generator=torch.manual_seed(0))
    for recompute in ("none", "1", "2"):
        model = materialize(shape, "cpu", seed=0, recompute=recompute)
        micro_step(model, tokens)
        counted = estimate(shape, rows, kind="cpu", dtype="float32", recompute=recompute)
        peak = peak_bytes(lambda model=model: micro_step(model, tokens))
        seconds = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            micro_step(model, tokens)
            seconds.append(time.perf_counter() - begun)
        found[recompute] = {
            "peak_megabytes": round(peak / 1e6, 1),
            "counted_over_peak": round((counted.activations + counted.logits) / peak, 3),
            "seconds": round(statistics.median(seconds), 3),
            "time_counted_from_flops": round(_work(shape, recompute) / _work(shape, "none"), 3),
        }
    for figures in found.values():
        figures["memory_of_none"] = round(figures["peak_megabytes"] / found["none"]["peak_megabytes"], 3)
        figures["time_of_none"] = round(figures["seconds"] / found["none"]["seconds"], 3)
    return found


def gradient_error() -> dict:
    """Relative error of the accumulated gradient of all matrices, weights and activations in bf16."""
    shape = GPTConfig(2, 128, 2, 2, 64, 64, 512, "L")
    parts = torch.randint(0, 512, (MICRO_STEPS, 2, 64), generator=torch.manual_seed(0))

    def total(compute: torch.dtype, stored: torch.dtype) -> torch.Tensor:
        model = materialize(shape, "cpu", seed=0, compute_dtype=compute)
        for name, p in model.named_parameters():
            if name.endswith("out.weight"):  # they start at zero, and would hide what comes before
                p.data.copy_(torch.randn(p.shape, generator=torch.manual_seed(1)) * 0.02)  # drawn in fp32 for all
            if p.ndim == 2 and stored == torch.bfloat16 and "smear" not in name:
                p.data = p.data.to(stored)
        for tokens in parts:
            micro_step(model, tokens)
        return torch.cat([p.grad.double().flatten() for n, p in model.named_parameters() if "blocks." in n])

    exact = total(torch.float64, torch.float64)
    wide, narrow = (total(torch.bfloat16, stored) for stored in (torch.float32, torch.bfloat16))
    return {
        "micro_steps": MICRO_STEPS,
        "relative_error_of_fp32_gradients": round(float((wide - exact).norm() / exact.norm()), 5),
        "relative_error_of_bf16_gradients": round(float((narrow - exact).norm() / exact.norm()), 5),
    }


def main() -> None:
    about = record.machine()
    reuse_freed_memory()
    figures: dict = {name: measure(shape, rows) for name, (shape, rows) in SHAPES.items()}
    record.write("recompute", "python bench/recompute.py", figures | {"gradients in bf16": gradient_error()}, about)


if __name__ == "__main__":
    main()
