"""Names that torch shows, against figures written down here apart from the package's table."""

import pytest

from nanolearn.devices import TABLE, device_bandwidth, device_memory, find, near, peak_flops
from nanolearn.errors import UserError

# TFLOP/s to the digits that are published or that units x FLOPs x clock gives.
SHOWN = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA H800": 989.4,
    "NVIDIA H800 PCIe": 756,
    "NVIDIA H800 NVL": 835,
    "NVIDIA H20": 148,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165,
    "NVIDIA A10": 125,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA L4": 121,
    "NVIDIA GeForce RTX 3090": 71.2,
    "NVIDIA GeForce RTX 3090 Ti": 80.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": 147.1,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "NVIDIA B100": 1800,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA Grace Blackwell": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB300": 2500,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI300X VF": 1307.4,
    "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI300A": 980.6,
    "AMD Instinct MI350X": 2306.9,
    "AMD Instinct MI355X": 2516.6,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI250": 181.05,
}
# Each resembles a name above and is another chip, a part of one, or one of two.
UNKNOWN = [
    "NVIDIA RTX A4000",
    "Quadro RTX 6000",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090 D",
    "NVIDIA GeForce RTX 3080",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    "GRID A100-40C",
    "NVIDIA A100X",
    "NVIDIA H100X",
    "NVIDIA L20",
    "AMD Instinct MI250X/MI250",
    "AMD Instinct MI300",
    "AMD Radeon RX 7900 XTX",
    "Apple M3 Max",
    "Intel(R) Xeon(R) Processor @ 2.00GHz",
    "cpu",
    "",
]


@pytest.mark.parametrize(("name", "tflops"), SHOWN.items())
def test_a6_peak_of_a_name_that_torch_shows(name, tflops):
    digits = len(str(tflops).partition(".")[2])
    assert round(peak_flops(name) / 1e12, digits) == pytest.approx(tflops, abs=10.0**-digits / 20)
    assert peak_flops(name.upper()) == peak_flops(name.lower()) == peak_flops(name)
    assert peak_flops(name, "float16") == peak_flops(name)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a6_an_unknown_name_has_no_peak(name):
    assert peak_flops(name) is None
    assert device_memory(name) is None


@pytest.mark.parametrize(
    ("name", "tflops"), [("Tesla T4", 65), ("Tesla V100-SXM2-16GB", 125), ("Tesla V100-PCIE-16GB", 112)]
)
def test_a6_a_card_without_bf16_has_an_fp16_peak_only(name, tflops):
    assert peak_flops(name) is None
    assert round(peak_flops(name, "float16") / 1e12) == tflops


def test_a6_no_figure_for_other_dtypes():
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None


def test_a6_intels_peak_needs_the_compute_units():
    name = "Intel(R) Data Center GPU Max 1550"
    assert peak_flops(name) is None
    assert peak_flops(name, compute_units=448) == 512 * 448 * 1300e6
    assert peak_flops("Intel(R) Data Center GPU Max 1100", compute_units=448) is None


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA H200", 141),
        ("AMD Instinct MI300X", 192),
        ("NVIDIA B200", 192),
        ("NVIDIA GeForce RTX 4090", 24),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA GH200 480GB", 96),  # 480 GB are the Grace processor's
        ("NVIDIA GH200 144G HBM3e", 144),
        ("Tesla V100-SXM2-32GB", 32),
    ],
)
def test_memory_by_name(name, size):
    assert device_memory(name) == size * 10**9


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA H100 NVL", 3900),
        ("NVIDIA H200", 4800),
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA GH200 144G HBM3e", 4900),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA B200", 8000),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("AMD Instinct MI300X VF", 5300),
        ("AMD Instinct MI325X", 6000),
        ("AMD Instinct MI250X", 1638),  # half of the package's 3276.8
        ("NVIDIA H800 NVL", None),  # no datasheet at hand
    ],
)
def test_bandwidth_by_name(name, gigabytes):
    assert device_bandwidth(name) == (gigabytes * 1e9 if gigabytes else None)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a6_an_unknown_name_has_no_bandwidth(name):
    assert device_bandwidth(name) is None


def test_every_line_of_the_table_is_found_by_its_own_name():
    for device in TABLE:
        assert find(device.name) is device
        assert device.memory and device.tflops > 0
        assert len(device.bandwidth) in (0, len(device.memory))


def test_an_unknown_name_is_answered_with_the_nearest():
    assert "RTX 4090" in str(near("GeForce 4090"))
    assert isinstance(near("x"), UserError)
    assert "give one of H100" in str(near("zzzzzz"))
