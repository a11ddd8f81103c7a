"""The three families of recipes that depth turns: full, gpu and laptop, each a row of numbers at one reference.

`full` is the published rule for large runs, where everything follows from depth. Below the scale of a
depth-12 run its square-root batch rule asks for rates far too small (a depth-4 run at batch 4,096 ended at
2.540 bits per byte, the same model at batch 2,048 with rates not scaled down reached 2.176 in half the
tokens), so `gpu` and `laptop` carry a batch, rates and decay of their own, at a reference width and
horizon. What a preset is never depends on the device; only `choose_preset` looks at one. Chapter 09_scaling_rules
measures what these rules are worth.
"""

from dataclasses import dataclass

from nanolearn.errors import UserError
from nanolearn.hardware import Choice, Machine

FULL_MEMORY = 40e9  # bytes of a device from which on a full recipe is sensible: 40 GB cards of data centres do train


@dataclass(frozen=True)
class Preset:
    """One recipe family. Rates and decay hold at `ref_batch`, `ref_width` and `ref_tokens`.

    The horizon is given by one of: steps; flops (at most `max_ratio` tokens a weight); else ratio, tokens a
    weight of blocks and head. batch_tokens 0: from the horizon, by the rule. ref_tokens 0: the horizon of
    depth 12 at the same ratio and vocabulary.
    """

    head_dim: int
    vocab_size: int
    sequence_len: int
    window: str
    ref_batch: int
    ref_width: int
    ref_tokens: int
    rate_matrix: float
    rate_token_table: float
    rate_value_tables: float
    rate_head: float
    rate_x0: float
    rate_residual: float
    rate_smear: float
    decay: float
    warmup: int = 40
    warmdown: float = 0.65
    final: float = 0.05
    momentum_ramp: int = 400
    batch_tokens: int = 0
    ratio: float = 12.0
    steps: int = 0
    flops: float = 0.0
    max_ratio: float = 100.0
    data: str = "climbmix"
    layer_width: int = 64

    def width(self, depth: int) -> int:
        """`layer_width` a layer, up to a whole number of heads.

        >>> FULL.width(24), FULL.width(3), LAPTOP.width(3)
        (1536, 256, 128)
        """
        return -(-self.layer_width * depth // self.head_dim) * self.head_dim


FULL = Preset(
    head_dim=128, vocab_size=32768, sequence_len=2048, window="SSSL",
    ref_batch=2**19, ref_width=768, ref_tokens=0,
    rate_matrix=0.02, rate_token_table=0.3, rate_value_tables=0.15, rate_head=0.008,
    rate_x0=0.5, rate_residual=0.005, rate_smear=0.2, decay=0.28,
)  # fmt: skip

# An hour on an RTX 4090 at 35% of its 165.2 TFLOP/s is 2.08e17 FLOPs. Not measured: no such card was at hand. Rates
# are those of FULL at its reference; decay keeps rate x decay, summed over a run, where FULL has it (about 14.1).
GPU = Preset(
    head_dim=64, vocab_size=16384, sequence_len=1024, window="SSSL",
    ref_batch=2**16, ref_width=768, ref_tokens=2**16 * 8000,
    rate_matrix=0.02, rate_token_table=0.3, rate_value_tables=0.15, rate_head=0.008,
    rate_x0=0.5, rate_residual=0.005, rate_smear=0.2, decay=0.088,
    batch_tokens=2**16, flops=2.08e17,
)  # fmt: skip

# Searched on a CPU at equal processor time (bench/results/preset_search.json): narrow layers and short rows show the
# model more text in eight minutes, and a larger vocabulary puts more text into a token.
LAPTOP = Preset(
    head_dim=64, vocab_size=6144, sequence_len=128, window="SSSL", layer_width=32,
    ref_batch=2048, ref_width=128, ref_tokens=2048 * 900,
    rate_matrix=0.05, rate_token_table=0.85, rate_value_tables=0.42, rate_head=0.023,
    rate_x0=0.7, rate_residual=0.005, rate_smear=0.2, decay=0.05,
    batch_tokens=2048, steps=900, data="embedded",
)  # fmt: skip

PRESETS = {"full": FULL, "gpu": GPU, "laptop": LAPTOP}


def choose_preset(machine: Machine, wanted: str = "auto") -> Choice:
    """The preset's name for a machine, and why. Raises UserError for a name that doesn't exist.

    >>> from nanolearn.hardware import named
    >>> choose_preset(named("8 x H100")).value, choose_preset(named("RTX 4090")).value
    ('full', 'gpu')

    Taught in chapter 09_scaling_rules.
    """
    if wanted in PRESETS:
        return Choice(wanted, "asked for")
    if wanted != "auto":
        raise UserError(f"preset {wanted!r}", f"give auto, {', '.join(PRESETS)}")
    if machine.type == "cpu":
        return Choice("laptop", "no accelerator here: a small model in minutes")
    if machine.type == "cuda" and machine.memory >= FULL_MEMORY:
        return Choice("full", f"{machine.label} has {machine.memory / 1e9:.0f} GB a device: the full recipe")
    said = "sized for an hour on an RTX 4090 at depths 8 to 16, not measured"
    return Choice("gpu", f"{machine.label} has less than {FULL_MEMORY / 1e9:.0f} GB for a model: {said}")


def choose_data(preset: str, wanted: str = "auto") -> Choice:
    """The corpus for a preset, and why: the embedded one is far too small for anything but `laptop`.

    >>> choose_data("laptop").value, choose_data("full").value, choose_data("full", "my/texts").value
    ('embedded', 'climbmix', 'my/texts')
    """
    if wanted != "auto":
        return Choice(wanted, "asked for")
    return Choice(PRESETS[preset].data, f"the corpus of the {preset} preset")
