"""What recomputation saves and costs, and what 16-bit gradients lose: measured on this CPU, beside the plan's counts.

Memory is the most that torch's allocator had handed out at once in one micro-step, forward and backward, beyond
weights and gradients. Time is CPU time of one thread, the median of some micro-steps, the ways taking turns: beside
other processes two threads wait for each other, and the clock on the wall then showed micro-steps 9 times as long.
CPU time still spreads by 15% or so there: it shows the cost of recompute=2, and is too coarse for that of recompute=1.
The published figures of the kind (GPT-2 1558M, 16 rows of 1,024 on a GPU: 39.5, 30.3 and 25.6 GiB) are another
model's. Gradients: one step's, accumulated over 8 micro-steps in bf16 and in fp32, against float64. On an accelerator
nothing of this was measured. `python bench/recompute.py` takes two minutes.
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
    """Peak and time for each way, and what the plan counts. The ways take turns: another process's work hits all."""
    tokens = torch.randint(0, shape.vocab_size, (rows, shape.sequence_len), generator=torch.manual_seed(0))
    models = {way: materialize(shape, "cpu", seed=0, recompute=way) for way in ("none", "1", "2")}
    for model in models.values():
        micro_step(model, tokens)
    peaks = {way: peak_bytes(lambda model=model: micro_step(model, tokens)) for way, model in models.items()}
    seconds: dict[str, list[float]] = {way: [] for way in models}
    for _ in range(ROUNDS):
        for way, model in models.items():
            begun = time.process_time()
            micro_step(model, tokens)
            seconds[way].append(time.process_time() - begun)
    found = {}
    for way, peak in peaks.items():
        counted = estimate(shape, rows, kind="cpu", dtype="float32", recompute=way)
        found[way] = {
            "peak_megabytes": round(peak / 1e6, 1),
            "memory_of_none": round(peak / peaks["none"], 3),
            "counted_over_peak": round((counted.activations + counted.logits) / peak, 3),
            "cpu_seconds": round(statistics.median(seconds[way]), 3),
            "cpu_seconds_from_to": [round(min(seconds[way]), 3), round(max(seconds[way]), 3)],
            "time_of_none": round(statistics.median(seconds[way]) / statistics.median(seconds["none"]), 3),
            "time_counted_from_flops": round(_work(shape, way) / _work(shape, "none"), 3),
        }
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
        "of_which_by_storing_and_adding_in_bf16": round(float((narrow - wide).norm() / wide.norm()), 5),
    }


def main() -> None:
    about = record.machine()
    reuse_freed_memory()
    torch.set_num_threads(1)
    figures: dict = {name: measure(shape, rows) for name, (shape, rows) in SHAPES.items()}
    record.write("recompute", "python bench/recompute.py", figures | {"gradients in bf16": gradient_error()}, about)


if __name__ == "__main__":
    main()
