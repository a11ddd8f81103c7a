"""Which kernel torch's own scaled_dot_product_attention runs: flash, efficient, cudnn or math.

torch chooses by device, dtype, head size and whether there is a mask, and says nothing. Its choice can be asked, and
each kernel can be tried alone; the two answers together are what is printed. On ROCm "flash" may be AOTriton's or CK's.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanolearn.hardware import Machine, torch_device
from nanolearn.model.windows import window_mask

KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION", "math": "MATH"}
LENGTH, WINDOW = 64, 8  # of the trial: any will do, the choice doesn't go by them


@lru_cache(maxsize=16)
def kernels(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> tuple[str, tuple[str, ...]]:
    """The kernel that torch picks for training, and all that run here when alone; causal, or under a window's mask.

    "unknown" where torch doesn't tell. Source: torch.nn.attention.sdpa_kernel. Taught in chapter 05_attention.

    >>> picked, able = kernels(torch.device("cpu"), torch.float32, 64, masked=True)
    >>> picked in able and "math" in able
    True
    """
    q = torch.zeros(1, 1, LENGTH, head_dim, device=device, dtype=dtype, requires_grad=True)
    mask = window_mask(LENGTH, LENGTH, WINDOW, 0, device) if masked else None
    able = []
    for name, member in KERNELS.items():
        if member not in SDPBackend.__members__:
            continue
        try:
            with sdpa_kernel([SDPBackend.__members__[member]]):
                F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=not masked).sum().backward()
        except RuntimeError:  # not on this device, or not for such inputs
            continue
        able.append(name)
    return _picked(q, mask), tuple(able)


def _picked(q: torch.Tensor, mask: torch.Tensor | None) -> str:
    try:
        number = torch._fused_sdp_choice(q, q, q, mask, 0.0, mask is None)
    except (AttributeError, RuntimeError):  # a private function: a build may lack it, or have none for its device
        return "unknown"
    values = {member.value: name for name, member in SDPBackend.__members__.items()}
    return next((name for name, member in KERNELS.items() if member == values.get(number)), "unknown")


def describe(machine: Machine, dtype: str, head_dim: int) -> str:
    """Which kernel torch's own attention runs on a machine, in one line; a simulated one can't be asked.

    >>> describe(Machine("cpu", "a processor"), "float32", 64)
    "torch's own kernel is flash when causal, flash under a mask"

    Taught in chapter 05_attention.
    """
    if machine.simulated:
        return "torch's own kernel can't be asked for: the machine is simulated"
    which = (torch_device(machine), getattr(torch, dtype), head_dim)
    causal, masked = (kernels(*which, masked=masked)[0] for masked in (False, True))
    library = f" (flash from ROCm's library {rocm_library()})" if machine.hip else ""
    return f"torch's own kernel is {causal} when causal, {masked} under a mask{library}"


def rocm_library() -> str:
    """Whose flash kernels a ROCm build of torch takes: "AOTriton", "Ck", or "Default" where it wasn't decided yet.

    >>> rocm_library()
    'Default'
    """
    return str(torch.backends.cuda.preferred_rocm_fa_library()).rsplit(".", 1)[-1]
