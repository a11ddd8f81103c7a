"""Hours, dollars, downloads and disk against published runs and hand counts."""

import json

import pytest
import torch

from nanolearn import host
from nanolearn.execution import Execution
from nanolearn.hardware import Machine, named
from nanolearn.model.gpt import GPTConfig
from nanolearn.optim.muon import orthogonalise
from nanolearn.paths import home
from nanolearn.plan.costs import CPU_SHARE, TOKENISE_RATE, data, muon_flops, price, speed
from nanolearn.recipe import Recipe

CPU = Machine("cpu", "a processor", memory=16 * 10**9)
H100S = named("8 x NVIDIA H100 80GB HBM3")


def test_assumed_shares_of_the_peak():
    recipe = Recipe.from_depth(12)
    shares = {"H100": 0.5, "H200": 0.5, "MI300X": 0.275, "MI325X": 0.275, "A100": 0.35, "RTX 4090": 0.35}
    for name, share in shares.items():
        found = speed(recipe, Execution(), named(name), "bfloat16", 1)
        assert found.mfu == share
        assert "%" in found.basis
    assert speed(recipe, Execution(), H100S, "bfloat16", 8, mfu=0.4).mfu == 0.4


def test_no_hours_without_a_peak():
    found = speed(Recipe.from_depth(4), Execution(), Machine("cuda", "a new card"), "bfloat16", 1)
    assert found.tokens_per_second is None
    assert found.hours(10) is None
    assert "peak_tflops" in found.basis
    given = speed(Recipe.from_depth(4), Execution(peak_tflops=100), Machine("cuda", "a new card"), "bfloat16", 1)
    assert given.tokens_per_second == pytest.approx(0.35 * 100e12 / 8.02e7, rel=1e-3)


def test_muons_work_is_that_of_its_products():
    """Against torch's own counter of FLOPs, over the products that `orthogonalise` really makes."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = GPTConfig(2, 64, 2, 2, 32, 64, 128)
    sizes = [(64, 64)] * 4 + [(256, 64), (64, 256)]
    with FlopCounterMode(display=False) as counter:
        for size in sizes:
            orthogonalise(torch.randn(shape.n_layer, *size))
    assert muon_flops(shape) == counter.get_total_flops()


def test_a_cpus_speed_counts_the_optimizer():
    recipe = Recipe.from_depth(4, "laptop")
    found = speed(recipe, Execution(), CPU, "float32", 1, cpu_flops=1e11)
    each = 6 * recipe.shape().matmul_params + muon_flops(recipe.gpt_config()) / recipe.batch_tokens
    assert found.tokens_per_second < CPU_SHARE[0] * 1e11 / each
    assert found.mfu is None  # a CPU has no published peak to take a share of


def test_prices():
    assert price(Execution(), H100S)[0] == 3.5
    assert price(Execution(), named("MI300X"))[0] == 2.0
    assert price(Execution(price=1.2), H100S) == (1.2, "as given")
    assert price(Execution(), named("RTX 4090")) == (None, "give price=DOLLARS")
    assert price(Execution(), CPU)[0] is None


def test_climbmix_is_fetched_by_the_shard():
    """61 million tokens a shard (400 billion over 6,543), not the 810 million that one log claimed."""
    found = data(Recipe.from_depth(24, ratio=8), H100S)
    assert found.present == pytest.approx(400e9, rel=0.01)
    assert found.download == (96 + 1) * 100_000_000  # 5.838e9 / 61e6 = 95.7, and the validation shard
    assert found.token_shards == 2 * 5_838_471_168
    assert found.cores == 16  # of 64 on the host of the named devices: a batch of texts is 16 groups
    assert found.passes == pytest.approx(5.838 / 400, rel=0.01)


def test_large_vocabularies_take_four_bytes_a_token():
    assert (
        data(Recipe.from_depth(4, vocab_size=100_000), CPU).token_shards
        == 4 * Recipe.from_depth(4, vocab_size=100_000).tokens
    )


def test_tokens_that_are_counted_replace_the_estimate():
    recipe = Recipe.from_depth(4, "laptop")
    found = data(recipe, CPU, present=1000)
    assert (found.present, found.token_shards, found.cores) == (1000, 2000, min(host.cores(), 16))
    assert found.passes == recipe.tokens / 1000


def test_own_files_are_measured(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 10_000)
    (tmp_path / "b.txt").write_text("other " * 10_000)
    found = data(Recipe.from_depth(1, "laptop", data=str(tmp_path), tokens=4096), CPU)
    assert found.present == pytest.approx(110_000 * 0.95 / 4.1, rel=0.01)


def test_the_stated_tokenising_rate_is_the_recorded_one():
    recorded = json.loads((home() / "bench/results/tokenizer.json").read_text())["figures"]["threads_1"]
    # A record made again on a machine with other load may differ so much before the constant has to follow.
    assert pytest.approx(recorded["nanolearn_mb_per_second"] * 1e6, rel=0.3) == TOKENISE_RATE


def test_an_address_is_planned_for_without_a_download(monkeypatch):
    monkeypatch.setattr("nanolearn.data.sources.download", lambda *_: pytest.fail("a plan fetches nothing"))
    found = data(Recipe.from_depth(4, "laptop", data="https://127.0.0.1:9/tales.txt"), CPU)
    assert (found.present, found.passes, found.download) == (None, None, None)


def test_apples_gpu_is_planned_for_by_a_measurement():
    """Here nothing can be measured on one, so without a figure the hours stay unknown."""
    apple, recipe = Machine("mps", "Apple M3 Max", memory=96 * 10**9), Recipe.from_depth(4, "laptop")
    measured = speed(recipe, Execution(), apple, "float32", 1, cpu_flops=5e12)
    assert measured.tokens_per_second == speed(recipe, Execution(), CPU, "float32", 1, cpu_flops=5e12).tokens_per_second
    if not torch.backends.mps.is_available():
        assert speed(recipe, Execution(), apple, "float32", 1).tokens_per_second is None
    assert "of 10.0 TFLOP/s" in speed(recipe, Execution(peak_tflops=10), apple, "float32", 1, cpu_flops=5e12).basis
