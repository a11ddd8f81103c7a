"""The probe, with every kind of machine and of broken kernel put before it."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from nanolearn.errors import UserError
from nanolearn.execution import Execution
from nanolearn.hardware import Machine, named
from nanolearn.model import attention, backends, kernels, sdpa
from nanolearn.model.backends import Need, barred, choose, describe, examine, plain, survey, trial

CPU = Machine("cpu", "a processor")
NEED = Need("bfloat16", 4, 4, 64, 512, (128, 128, 128, 512))
H100, MI300X, BLACKWELL, T4 = named("H100"), named("MI300X"), named("RTX PRO 6000 Blackwell"), named("T4")


@pytest.fixture
def everything(monkeypatch):
    """A machine where each kernel's package is installed, each answers as `blocked` does, and the device is the CPU."""
    monkeypatch.setattr(backends, "source", lambda name: next(iter(kernels.SOURCES[name])))
    monkeypatch.setattr(backends, "torch_device", lambda machine: torch.device("cpu"))
    for name in backends.FAST:
        monkeypatch.setitem(attention.BACKENDS, name, attention.BACKENDS["blocked"])
    return monkeypatch


def test_an_execution_may_ask_for_each_backend_and_for_nothing_else():
    for name in ("auto", *attention.BACKENDS):
        assert Execution(attention=name).attention == name
    with pytest.raises(ValueError, match="attention"):
        Execution(attention="flash")


def test_a_cpu_takes_blocks_and_says_what_it_tried():
    chosen = choose(CPU, replace(NEED, dtype="float32"))
    assert chosen.backend == "blocked"
    assert "a CPU" in chosen.reason and "forward and backward tried" in chosen.reason
    found = {one.backend: one for one in survey(CPU, replace(NEED, dtype="float32"))}
    assert [name for name, one in found.items() if one.works] == ["sdpa", "blocked"]
    assert "no backward" in found["flex"].said and "GPU" in found["flash2"].said


@pytest.mark.parametrize(
    ("machine", "need", "expected"),
    [
        (H100, NEED, "flash3"),
        (named("A100"), NEED, "flash2"),
        (MI300X, NEED, "flash2"),
        (BLACKWELL, NEED, "flex"),
        (T4, replace(NEED, dtype="float16"), "flex"),
        (H100, replace(NEED, dtype="float32"), "flex"),
        (named("A100"), replace(NEED, windows=(512, 512)), "sdpa"),
        (H100, replace(NEED, windows=(512, 512)), "flash3"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_each_device_gets_when_all_is_installed(everything, machine, need, expected):
    assert machine.capability
    chosen = choose(machine, need)
    assert chosen.backend == expected
    assert chosen.reason.startswith(f"{expected} on ") and "tried" in chosen.reason


def test_a1_an_mi300x_that_reports_9_4_is_no_hopper(everything):
    assert MI300X.capability == (9, 4) and MI300X.hip
    assert "AMD" in barred("flash3", MI300X, NEED)
    # Even if it reported a Hopper's very number: ROCm is asked first.
    assert "AMD" in barred("flash3", replace(MI300X, capability=(9, 0)), NEED)
    chosen = choose(MI300X, NEED)
    assert chosen.backend == "flash2" and "gfx942, ROCm" in chosen.reason and "flash3: no" in chosen.reason
    with pytest.raises(UserError, match="flash3: gfx942 is AMD's.* give auto, or what works here: .*flash2"):
        choose(MI300X, NEED, "flash3")


def test_a2_a_kernel_without_an_image_for_the_device_is_found_by_its_trial_call(everything):
    assert "12.0 is not on its list (9.0)" in barred("flash3", BLACKWELL, NEED)

    def no_image(*_):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    for name in backends.FAST:
        everything.setitem(attention.BACKENDS, name, no_image)
    chosen = choose(H100, NEED)
    assert chosen.backend == "blocked"
    for name in backends.FAST:
        assert f"{name}: no (its trial call failed: RuntimeError: CUDA error: no kernel image" in chosen.reason
    with pytest.raises(UserError, match="no kernel image.* give auto, or what works here: sdpa, blocked"):
        choose(H100, NEED, "flash2")


@pytest.mark.parametrize("fault", ["window", "scale", "gradient", "grouping"])
def test_a_kernel_that_answers_wrongly_is_not_chosen(everything, fault):
    right = attention.BACKENDS["blocked"]

    def wrong(q, k, v, window, documents):
        if fault == "window":  # off by one
            return right(q, k, v, window - 1, documents)
        if fault == "scale":
            return right(q * 1.2, k, v, window, documents)
        if fault == "gradient":
            return right(q, k.detach() + 0 * k, v, window, documents)
        return right(q.flip(2), k, v, window, documents)

    everything.setitem(attention.BACKENDS, "flash3", wrong)
    need = replace(NEED, n_kv_head=2)
    assert "off" in examine("flash3", H100, need).said
    assert choose(H100, need).backend == "flash2"


def test_what_is_not_installed_is_said_without_importing(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    for name in backends.FAST:
        found = examine(name, H100, NEED)
        assert found.works is False and "is installed" in found.said and next(iter(kernels.SOURCES[name])) in found.said


def test_a_name_is_looked_up_and_not_imported(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert kernels.source("flash2") == "flash_attn"
    assert "flash_attn" not in sys.modules


def test_nothing_is_fetched_from_a_hub_unless_it_is_asked_for_by_name(monkeypatch):
    module = ModuleType("kernels")
    module.__spec__ = ModuleSpec("kernels", loader=None)
    module.get_kernel = lambda *_, **__: pytest.fail("downloaded")
    monkeypatch.setitem(sys.modules, "kernels", module)
    kernels.loaded.cache_clear()
    assert "only downloaded for attention=flash3" in examine("flash3", H100, NEED, asked=False).said
    monkeypatch.setattr(backends, "trial", lambda *_: ("", 0.0))
    assert examine("flash3", H100, NEED).works


def test_nothing_is_tried_on_simulated_devices_nor_where_it_is_not_wanted(monkeypatch):
    monkeypatch.setattr(backends, "trial", lambda *_: pytest.fail("tried"))
    assert "simulated" in choose(replace(H100, simulated=True), NEED).reason
    chosen = choose(H100, NEED, trying=False)  # without packages here
    assert chosen.backend in ("flash2", "flex", "blocked") and "the run itself tries it" in chosen.reason


@pytest.mark.parametrize("need", [Need("float32", 4, 1, 8, 1, (1,)), Need("bfloat16", 2, 2, 64, 300, (128, 300))])
def test_the_trial_has_the_runs_dtype_heads_and_window(monkeypatch, need):
    seen = []
    right = attention.BACKENDS["blocked"]
    monkeypatch.setitem(
        attention.BACKENDS,
        "blocked",
        lambda q, k, v, window, d: seen.append((q, k, window)) or right(q, k, v, window, d),
    )
    assert trial("blocked", need, torch.device("cpu"))[0] == ""
    q, k, window = seen[0]
    assert q.dtype == k.dtype == getattr(torch, need.dtype)
    assert q.size(2) // k.size(2) == need.n_head // need.n_kv_head
    assert q.size(3) == need.head_dim and window == min(need.windows) and q.requires_grad
    assert q.size(1) == need.sequence_len or (q.size(1) > 2 * window and q.size(1) % window)


def test_plain_attention_equals_torchs_math_kernel():
    g = torch.manual_seed(0)
    q, k, v, up = (torch.randn(2, 9, n, 4, generator=g, dtype=torch.float64) for n in (4, 2, 2, 4))
    y, *gradients = plain(q, k, v, up, 9)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in inputs), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(y, theirs.transpose(1, 2))
    for a, b in zip(gradients, torch.autograd.grad(theirs.transpose(1, 2), inputs, up), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_that_torch_picks_is_the_one_it_runs(masked):
    """Asked of the profiler, which names the operator that ran."""
    picked, able = sdpa.kernels(torch.device("cpu"), torch.float32, 64, masked)
    assert picked in able and "efficient" not in able
    q = torch.randn(1, 2, 64, 64, requires_grad=True)
    mask = torch.ones(64, 64, dtype=torch.bool).tril() if masked else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=not masked)
    names = " ".join(event.key for event in seen.key_averages())
    assert f"_{picked}_" in names


def test_a_torch_that_does_not_tell_is_not_guessed(monkeypatch):
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    sdpa.kernels.cache_clear()
    assert sdpa.kernels(torch.device("cpu"), torch.float32, 64, masked=False)[0] == "unknown"
    sdpa.kernels.cache_clear()


def test_rocm_says_whose_kernels_it_takes(monkeypatch):
    monkeypatch.setattr(sdpa, "torch_device", lambda machine: torch.device("cpu"))
    monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", lambda: torch._C._ROCmFABackend.Ck)
    assert sdpa.describe(MI300X, "bfloat16", 128).endswith("(flash from ROCm's library Ck)")
    assert "simulated" in sdpa.describe(replace(MI300X, simulated=True), "bfloat16", 128)


@pytest.mark.parametrize(
    ("backend", "T", "windows", "said"),
    [
        ("blocked", 256, (128, 128, 128, 256), ["3 layers masked whole (window 128 of 256)", "1 layer causal"]),
        ("blocked", 2048, (512, 2048), ["1 layer in blocks", "(window 512 of 2048)", "1 layer causal"]),
        ("sdpa", 2048, (512, 2048), ["1 layer masked whole (window 512 of 2048)", "1 layer causal"]),
        ("sdpa", 2048, (2048, 2048), ["scaled_dot_product_attention: 2 layers causal"]),
        ("flash2", 2048, (512, 2048), ["flash2: 1 layer in the kernel (window 512 of 2048), 1 layer causal"]),
    ],
)
def test_what_is_said_is_what_is_done(monkeypatch, backend, T, windows, said):
    text = describe(backend, T, windows)
    for words in said:
        assert words in text
    if backend == "flash2":
        return
    calls = []
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda q, k, v, attn_mask=None, **_: calls.append("causal" if attn_mask is None else attn_mask.shape) or q,
    )
    for window in windows:
        calls.clear()
        attention.attend(*[torch.zeros(1, T, 1, 2)] * 3, window, backend)
        if window >= T:
            assert calls == ["causal"]
        elif "in blocks" in text:
            assert calls == ["causal", (window, 2 * window)]
        else:
            assert calls == [(T, T)]
