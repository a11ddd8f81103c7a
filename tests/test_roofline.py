"""The roof against hand-made numbers, published ridges, and what this machine can plausibly do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolearn import host, roofline
from nanolearn.errors import UserError
from nanolearn.hardware import Machine, cpu, named
from nanolearn.roofline import Roof, matmul_intensity, measured, published


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_the_roof_rises_to_the_ridge_and_is_flat_behind_it(peak, bandwidth, intensity):
    roof = Roof(peak, bandwidth, "drawn")
    assert roof.attainable(intensity) <= peak
    assert roof.attainable(intensity) <= bandwidth * intensity
    assert roof.attainable(roof.ridge) == pytest.approx(peak)
    assert roof.attainable(intensity) in (peak, bandwidth * intensity)


@pytest.mark.parametrize(
    ("name", "ridge"),
    [("NVIDIA H100 80GB HBM3", 295), ("NVIDIA A100-SXM4-80GB", 153), ("AMD Instinct MI300X", 247), ("MI250X", 117)],
)
def test_published_ridges(name, ridge):
    # TFLOP/s over TB/s by hand: 989.4 / 3.35, 312 / 2.039, 1307.4 / 5.3, 191.5 / 1.638.
    assert round(published(name).ridge) == ridge


@pytest.mark.parametrize("name", ["NVIDIA RTX A4000", "NVIDIA H800 NVL", "Intel(R) Xeon(R) Processor @ 2.00GHz"])
def test_a6_no_roof_where_a_number_is_missing(name):
    assert published(name) is None


def test_a_dtype_that_the_table_lacks_has_no_roof():
    assert published("NVIDIA H100 80GB HBM3", "float32") is None
    assert published("Tesla T4") is None and published("Tesla T4", "float16").ridge == pytest.approx(65126 / 320, 1e-3)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_intensity_is_flops_over_bytes_of_the_three_matrices(m, k, n):
    a, b = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(k, n, dtype=torch.bfloat16)
    moved = a.nbytes + b.nbytes + torch.empty(m, n, dtype=torch.bfloat16).nbytes
    assert matmul_intensity(m, k, n, itemsize=2) == pytest.approx(2 * m * k * n / moved)


def test_measured_here():
    roof = measured(cpu(), seconds=0.1)
    # Between a 1990s and a 2030s machine: the measurement only has to be one.
    assert 1e8 < roof.peak < 1e14 and 1e8 < roof.bandwidth < 1e13
    assert roof.source == "measured here: float32 products of 512 to 2048 rows, and a copy"


def test_each_device_is_measured_as_itself(monkeypatch):
    asked = []
    monkeypatch.setattr(
        host, "measure_flops", lambda seconds, device, dtype, size: asked.append((device, size)) or 7e14
    )
    monkeypatch.setattr(roofline, "copy_rate", lambda device, seconds: asked.append(device) or 3e12)
    roof = measured(Machine("cuda", "a card", count=2, index=1), "bfloat16")
    assert asked == [("cuda:1", 8192), "cuda:1"]
    assert (roof.peak, roof.bandwidth) == (7e14, 3e12)
    assert measured(Machine("mps", "Apple M3")).peak == 7e14 and asked[2:] == [("mps", 4096), "mps"]


def test_what_is_simulated_is_not_measured(monkeypatch):
    from dataclasses import replace

    with pytest.raises(UserError, match="H100 .simulated. can't be measured"):
        measured(replace(named("H100"), simulated=True))
