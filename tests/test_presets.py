"""Which preset and which corpus a machine gets, and what the gpu preset's hour is made of."""

import pytest

from nanolearn.errors import UserError
from nanolearn.flops import per_token
from nanolearn.hardware import Machine, named
from nanolearn.presets import GPU, PRESETS, choose_data, choose_preset
from nanolearn.recipe import Recipe

CPU = Machine("cpu", "a processor", memory=16 * 10**9)


@pytest.mark.parametrize(
    ("machine", "preset"),
    [
        (CPU, "laptop"),
        (Machine("mps", "Apple M3 Max", memory=128 * 10**9), "gpu"),
        (named("NVIDIA GeForce RTX 4090"), "gpu"),
        (named("Tesla T4"), "gpu"),
        (named("Tesla V100-SXM2-32GB"), "gpu"),
        (named("NVIDIA A100-SXM4-40GB"), "full"),
        (named("8 x NVIDIA H100 80GB HBM3"), "full"),
        (named("AMD Instinct MI300X"), "full"),
    ],
)
def test_preset_by_hardware_with_a_reason(machine, preset):
    choice = choose_preset(machine)
    assert choice.value == preset
    assert len(choice.reason) > 10


def test_preset_as_asked_or_refused():
    assert choose_preset(CPU, "full").value == "full"
    with pytest.raises(UserError, match="full, gpu, laptop"):
        choose_preset(CPU, "tiny")


def test_data_goes_by_preset():
    assert [choose_data(preset).value for preset in PRESETS] == ["climbmix", "climbmix", "embedded"]
    assert choose_data("full", "embedded").value == "embedded"


@pytest.mark.parametrize("depth", [8, 10, 12, 16])
def test_the_gpu_preset_is_an_hour_on_a_4090_at_35_percent(depth):
    recipe = Recipe.from_depth(depth, "gpu")
    seconds = per_token(recipe.shape()) * recipe.tokens / (0.35 * 165.15e12)
    assert seconds == pytest.approx(3600, rel=0.02)


def test_the_gpu_preset_does_not_read_a_small_model_for_ever():
    assert Recipe.from_depth(2, "gpu").ratio == pytest.approx(GPU.max_ratio, rel=0.02)
