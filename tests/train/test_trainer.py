"""The loop: what it logs is true, and stopping it anywhere changes nothing that it learns."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanolearn.data.loader import Loader
from nanolearn.data.sources import open_source, texts
from nanolearn.data.tokens import TokenStore
from nanolearn.errors import UserError
from nanolearn.hardware import Choice
from nanolearn.model.gpt import GPT
from nanolearn.model.materialize import materialize
from nanolearn.tokenizer import train as train_tokenizer
from nanolearn.train import checkpoint, saving, trainer, watch
from nanolearn.train.checkpoint import NotSaved
from nanolearn.train.judge import PROMPTS
from nanolearn.train.records import ASIDE, only_writer, read
from tests.train.conftest import losses, rows, write_corpus


class Crash(Exception):
    pass


def at_step(number, action):
    """An observer that acts when a step's record comes by."""

    def observe(record):
        if record["kind"] == "step" and record["step"] == number:
            action()

    return observe


def crash():
    raise Crash


@pytest.fixture
def float64(monkeypatch):
    monkeypatch.setattr(trainer, "choose_dtype", lambda machine, wanted: Choice("float64", "a test"))


def test_a_run_learns_and_leaves_what_a_run_leaves(tiny, tmp_path):
    result = tiny.train(tmp_path / "run", val_tokens=-1)
    assert losses(tmp_path / "run")[0] == pytest.approx(math.log(tiny.tokenizer.vocab_size), abs=0.05)
    assert result.loss < 3.0
    assert result.complete
    assert result.whole_split
    assert result.bpb < 2.0
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left >= {
        "recipe.json",
        "execution.json",
        "data.json",
        "tokenizer",
        "records.jsonl",
        "checkpoints",
        "result.json",
    }
    assert result.mfu is None  # a CPU has no known peak: nothing is shown, not 0%


def test_where_the_seconds_went_adds_up(tiny, tmp_path):
    result = tiny.train(tmp_path / "run", val_tokens=64)
    names = {"start", "waiting for data", "forward and backward", "optimizer", "validation", "samples", "checkpoint"}
    assert names <= set(result.seconds)
    steps = [record["seconds"] for record in read(tmp_path / "run", "step")]
    in_steps = sum(result.seconds[n] for n in ("waiting for data", "forward and backward", "optimizer"))
    assert in_steps == pytest.approx(sum(steps), rel=1e-6)
    assert 0 < result.first_step_seconds < sum(result.seconds.values())
    assert result.seconds["other"] < 0.2 * sum(result.seconds.values())


def test_a_complete_run_returns_its_result_and_trains_nothing(tiny, tmp_path):
    first = tiny.train(tmp_path / "run")
    before = (tmp_path / "run" / "records.jsonl").read_bytes()
    assert tiny.train(tmp_path / "run", observers=[crash]) == first
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == before


def test_promise_1_the_same_recipe_gives_the_same_losses_bit_for_bit(tiny, tmp_path):
    tiny.train(tmp_path / "a")
    tiny.train(tmp_path / "b")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_promise_2_d4_c3_a_crash_and_a_resume_change_nothing(tiny, tmp_path):
    tiny.train(tmp_path / "straight")
    with pytest.raises(Crash):
        tiny.train(tmp_path / "run", observers=[at_step(8, crash)], save_every=6)
    assert len(losses(tmp_path / "run")) == 8
    result = tiny.train(tmp_path / "run", save_every=6)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert rows(tmp_path / "run") == list(range(0, 12 * 8, 8))
    assert result.tokens == 12 * 256
    aside = [json.loads(line) for line in (tmp_path / "run" / ASIDE).read_text().splitlines()]
    assert [record["step"] for record in aside if record["kind"] == "step"] == [7, 8]
    weights = [checkpoint.load_weights(checkpoint.newest(tmp_path / name).path) for name in ("run", "straight")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


KILLED = """
import os, signal, sys
from pathlib import Path
from nanolearn.data.sources import open_source
from nanolearn.hardware import cpu
from nanolearn.execution import Execution
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train.trainer import train

run = Path(sys.argv[1])
recipe = Recipe.load(run / "recipe.json")
def kill(record):
    if record["kind"] == "step" and record["step"] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
train(recipe, Execution.load(run / "execution.json"), run, machine=cpu(), source=open_source(recipe.data),
      tokenizer=Tokenizer.load(sys.argv[2]), observers=[kill])
"""


@pytest.mark.slow
def test_promise_2_a_process_that_is_killed_resumes_bit_equal(tiny, tmp_path):
    tiny.train(tmp_path / "straight")
    run, tokenizer = tmp_path / "run", tmp_path / "tokenizer"
    run.mkdir()
    tiny.tokenizer.save(tokenizer)
    tiny.recipe().save(run / "recipe.json")
    tiny.execution(save_every=5).save(run / "execution.json")
    child = subprocess.run([sys.executable, "-c", KILLED, str(run), str(tokenizer)], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert len(losses(run)) == 8
    tiny.train(run, save_every=5)
    assert losses(run) == losses(tmp_path / "straight")
    assert rows(run) == list(range(0, 12 * 8, 8))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_run_can_go_on(tiny, tmp_path, number):
    tiny.train(tmp_path / "straight")
    handler = signal.getsignal(number)
    result = tiny.train(tmp_path / "run", observers=[at_step(5, lambda: os.kill(os.getpid(), number))])
    assert (result.complete, result.stopped, result.steps) == (False, signal.Signals(number).name, 6)
    assert signal.getsignal(number) is handler
    assert checkpoint.newest(tmp_path / "run").manifest.step == 6
    assert tiny.train(tmp_path / "run").complete
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.mark.parametrize("kind", ["validation", "sample", "checkpoint", "end"])
def test_promise_2_a_kill_after_a_step_loses_no_validation_and_no_samples(tiny, tmp_path, kind):
    """At step 12, the last, the checkpoint is complete and only the result is missing: the resume takes no step."""
    often = {"val_tokens": -1, "val_every": 6, "sample_every": 6, "save_every": 6}
    step = 12 if kind == "end" else 6

    def observe(record):
        if record["kind"] == kind and record["step"] == step:
            raise Crash

    with pytest.raises(Crash):
        tiny.train(tmp_path / "run", observers=[observe], **often)
    result = tiny.train(tmp_path / "run", **often)
    assert result.complete
    assert result.bpb > 0
    assert (result.first_step_seconds is None) == (result.tokens_per_second is None) == (kind == "end")
    tiny.train(tmp_path / "straight", **often)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    for what in ("validation", "sample"):
        found = [{r["step"] for r in read(tmp_path / name, what)} for name in ("run", "straight")]
        assert found == [{6, 12}, {6, 12}]


def test_who_asks_for_a_stop_waits_for_the_save_only(tiny, tmp_path):
    stop = at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    tiny.train(tmp_path / "run", observers=[stop], val_tokens=-1, val_every=6, sample_every=6)
    kinds = [record["kind"] for record in read(tmp_path / "run") if record["step"] == 6]
    assert kinds == ["step", "checkpoint", "end"]


def test_the_history_is_on_the_disk_before_the_checkpoint(tiny, tmp_path, monkeypatch):
    order, sync, save = [], trainer.Records.sync, saving.save
    monkeypatch.setattr(trainer.Records, "sync", lambda self: (order.append("records"), sync(self)))
    monkeypatch.setattr(saving, "save", lambda *args: (order.append("checkpoint"), save(*args))[1])
    tiny.train(tmp_path / "run")
    assert order == ["records", "checkpoint"]


def test_a_run_that_fails_while_it_begins_closes_what_it_opened(tiny, tmp_path, monkeypatch):
    closed, close = [], trainer.Prefetcher.close
    monkeypatch.setattr(trainer.Prefetcher, "close", lambda self: (closed.append("rows"), close(self)))
    monkeypatch.setattr(trainer.Run, "_announce", lambda self: crash())
    with pytest.raises(Crash):
        tiny.train(tmp_path / "run")
    assert closed == ["rows"]


def test_the_announcement_names_the_attention_and_its_windows(tiny, tmp_path):
    tiny.train(tmp_path / "run", tiny.recipe(steps=1))
    (start,) = read(tmp_path / "run", "start")
    assert start["attention"].startswith("torch's scaled_dot_product_attention")
    assert f"attention: {start['attention']}" in start["say"].splitlines()


def test_a_tokenizer_of_another_size_is_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="the tokenizer has 300 tokens and the recipe 301"):
        tiny.train(tmp_path / "run", tiny.recipe(vocab_size=301))


def test_max_hours_saves_and_stops_and_the_run_can_go_on(tiny, tmp_path):
    result = tiny.train(tmp_path / "run", max_hours=1e-9)
    assert (result.complete, result.stopped, result.steps) == (False, "time limit", 1)
    assert tiny.train(tmp_path / "run").complete


def test_resume_from_a_chosen_step(tiny, tmp_path):
    with pytest.raises(Crash):
        tiny.train(tmp_path / "run", observers=[at_step(9, crash)], save_every=2, keep_last=9)
    tiny.train(tmp_path / "run", save_every=100, resume_from=4)
    tiny.train(tmp_path / "straight")
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_t2_promise_5_the_logged_loss_is_the_mean_over_all_micro_steps_and_valid_targets(tiny, tmp_path):
    recipe = tiny.recipe(packer="best_fit_pad")
    tiny.train(tmp_path / "run", recipe, micro_batch=2, save_every=5, keep_last=3)
    # Independently: the weights of step 5, and the rows of step 6 in one piece, straight from the loader.
    found = tmp_path / "run" / "checkpoints" / checkpoint.folder_name(5)
    model = materialize(recipe.gpt_config(), "cpu", seed=0)
    model.load_state_dict(checkpoint.load_weights(found))
    store = TokenStore(tiny.source, tiny.tokenizer, "train")
    loader = Loader(store, tiny.tokenizer.bos, 32, "best_fit_pad", recipe.seed)
    batch = next(loader.micro_batches(5 * 8, 8, 8))
    valid = batch.targets != -1
    assert 0 < (~valid).sum()  # the packer pads, so that the number of targets differs from row to row
    logits = model(batch.inputs).double()
    expected = torch.nn.functional.cross_entropy(logits[valid], batch.targets[valid])
    record = read(tmp_path / "run", "step")[5]
    assert record["loss"] == pytest.approx(float(expected), rel=1e-5)
    expected.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert record["tokens"] == 6 * 256


@pytest.mark.parametrize("packer", ["best_fit_tail", "best_fit_pad"])
def test_promise_1_accumulation_changes_nothing_but_rounding(tiny, tmp_path, float64, packer):
    recipe = tiny.recipe(packer=packer)
    for micro_batch in (8, 2, 1):
        tiny.train(tmp_path / str(micro_batch), recipe, micro_batch=micro_batch)
    for micro_batch in (2, 1):
        assert losses(tmp_path / str(micro_batch)) == pytest.approx(losses(tmp_path / "8"), rel=1e-9)


def test_t15_accumulation_follows_from_the_recipe_and_the_world(tiny, tmp_path):
    tiny.train(tmp_path / "run", micro_batch=2)
    start = read(tmp_path / "run", "start")[0]
    assert (start["micro_batch"], start["accumulation"], start["ranks"]) == (2, 4, 1)
    with pytest.raises(UserError, match="micro_batch"):
        tiny.train(tmp_path / "other", micro_batch=3)


def test_promise_8_validation_does_not_depend_on_the_micro_batch(tiny, tmp_path, float64):
    results = [tiny.train(tmp_path / str(m), micro_batch=m, val_tokens=-1, val_every=6) for m in (8, 4)]
    bits = [[record["bpb"] for record in read(tmp_path / str(m), "validation")] for m in (8, 4)]
    assert len(bits[0]) == 2
    assert bits[0] == pytest.approx(bits[1], rel=1e-9)
    assert results[0].validation_bytes == results[1].validation_bytes


def test_e3_fewer_validation_tokens_than_a_row_are_one_row_and_zero_is_none(tiny, tmp_path):
    assert tiny.train(tmp_path / "one", val_tokens=1).bpb > 0
    assert read(tmp_path / "one", "validation")[-1]["rows"] == 1
    result = tiny.train(tmp_path / "off", val_tokens=0)
    assert result.bpb is None
    assert read(tmp_path / "off", "validation") == []


def test_t2_validation_leaves_the_training_losses_alone(tiny, tmp_path):
    tiny.train(tmp_path / "with", val_tokens=-1, val_every=1, sample_every=3)
    tiny.train(tmp_path / "without", val_tokens=0)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_d3_the_end_of_the_data_begins_another_pass_which_is_recorded(tiny, tmp_path):
    tiny.train(tmp_path / "run", tiny.recipe(batch_tokens=2048), micro_batch=8)
    epochs = [record["epoch"] for record in read(tmp_path / "run", "step")]
    assert epochs[0] == 0
    assert epochs[-1] >= 1
    assert epochs == sorted(epochs)
    said = [record["say"] for record in read(tmp_path / "run", "event")]
    assert sum("pass 2 over the data" in text for text in said) == 1


def test_d3_a_resume_within_a_later_pass_does_not_announce_it_again(tiny, tmp_path):
    recipe = tiny.recipe(batch_tokens=2048)
    tiny.train(tmp_path / "straight", recipe, micro_batch=8)
    later = next(record["step"] for record in read(tmp_path / "straight", "step") if record["epoch"] == 1)
    assert later < 11
    with pytest.raises(Crash):
        tiny.train(tmp_path / "run", recipe, micro_batch=8, save_every=later, observers=[at_step(later + 1, crash)])
    tiny.train(tmp_path / "run", recipe, micro_batch=8)
    said = [[r["say"] for r in read(tmp_path / name, "event")] for name in ("run", "straight")]
    assert said[0] == said[1]


def nan_at(steps, accumulation=2):
    """GPT.loss_sum that is NaN in the second micro-step of some steps."""
    real, calls = GPT.loss_sum, iter(range(10**6))

    def loss_sum(self, tokens, targets):
        step, micro_step = divmod(next(calls), accumulation)
        loss = real(self, tokens, targets)
        return loss * math.nan if step + 1 in steps and micro_step == 1 else loss

    return loss_sum


def test_t10_a_nan_step_is_skipped_counted_and_poisons_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(GPT, "loss_sum", nan_at({4, 7}))
    result = tiny.train(tmp_path / "run")
    steps = read(tmp_path / "run", "step")
    assert [record["step"] for record in steps if record["skipped"]] == [4, 7]
    assert [record["loss"] for record in steps if record["skipped"]] == [None, None]
    assert rows(tmp_path / "run") == list(range(0, 12 * 8, 8))  # the rows of a skipped step are used up
    assert result.skipped == 2
    assert result.loss < 4.0
    said = " ".join(record["say"] for record in read(tmp_path / "run", "event"))
    assert "step 4: the loss is not finite, the step was skipped (1 so far)" in said


def test_t10_several_nan_steps_in_a_row_stop_the_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(GPT, "loss_sum", nan_at(set(range(4, 12))))
    with pytest.raises(UserError, match="5 in a row"):
        tiny.train(tmp_path / "run", save_every=3)
    assert checkpoint.newest(tmp_path / "run").manifest.step == 6  # steps 4 to 6 changed nothing


def test_t10_the_watch_is_saved_with_the_checkpoint(tiny, tmp_path):
    recipe = tiny.recipe(steps=30)
    tiny.train(tmp_path / "straight", recipe)
    with pytest.raises(Crash):
        tiny.train(tmp_path / "run", recipe, observers=[at_step(21, crash)], save_every=20)
    tiny.train(tmp_path / "run", recipe)
    scores = [[r["loss_z"] for r in read(tmp_path / name, "step")] for name in ("run", "straight")]
    assert scores[0] == scores[1]
    assert scores[0][20] is not None


def test_float16_scaling_is_exact_and_an_overflow_costs_only_steps(tiny, tmp_path, monkeypatch):
    tiny.train(tmp_path / "plain")
    real = watch.Watch
    monkeypatch.setattr(trainer, "Watch", lambda scaled: real(True))  # the scale, on a device that needs none
    tiny.train(tmp_path / "scaled")
    assert losses(tmp_path / "scaled") == losses(tmp_path / "plain")  # powers of two round nothing
    monkeypatch.setattr(watch, "SCALE_START", 2.0**70)
    result = tiny.train(tmp_path / "overflow", tiny.recipe(steps=24))
    assert 0 < result.skipped < 16
    assert read(tmp_path / "overflow", "step")[0]["skipped"]
    assert all(math.isfinite(record["loss"]) for record in read(tmp_path / "overflow", "step"))


def test_t12_weights_and_state_are_fp32_when_activations_are_bf16(tiny, tmp_path):
    tiny.train(tmp_path / "run", tiny.recipe(steps=2), dtype="bfloat16")
    files = checkpoint.newest(tmp_path / "run").path.glob("*.safetensors")
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.float32}


def test_the_host_waits_for_the_device_once_a_step(tiny, tmp_path, monkeypatch):
    waits = []
    for name in ("tolist", "item", "__float__", "__bool__", "__int__", "cpu", "numpy"):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, _real=real, _name=name, **kwargs):
            waits.append(_name)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    marks = []
    tiny.train(tmp_path / "run", observers=[lambda r: marks.append(len(waits)) if r["kind"] == "step" else None])
    assert set(np.diff(marks[:3])) == {1}
    assert set(waits[marks[0] : marks[2]]) == {"tolist"}


@pytest.mark.parametrize("name", ["recipe", "tokenizer", "data"])
@pytest.mark.parametrize("begun", [True, False])
def test_c5_another_recipe_tokenizer_or_corpus_is_refused_and_nothing_is_changed(tiny, tmp_path, name, begun):
    run = tmp_path / "run"
    with pytest.raises(Crash):
        tiny.train(run, observers=[at_step(2, crash)], save_every=1 if begun else 100)
    before = {path: path.read_bytes() for path in run.rglob("*.json*")}
    recipe = tiny.recipe(steps=13) if name == "recipe" else tiny.recipe()
    if name == "data":
        (tiny.corpus / "0000.txt").write_text("another text " * 30)
        tiny.source = open_source(str(tiny.corpus))
    elif name == "tokenizer":
        other = open_source(str(write_corpus(tmp_path / "other", words=30)))
        tiny.tokenizer = train_tokenizer(texts(other), 300)
    with pytest.raises(UserError, match=f"another {name} "):
        tiny.train(run, recipe)
    assert {path: path.read_bytes() for path in run.rglob("*.json*")} == before


def test_c4_a_damaged_newest_checkpoint_is_said_and_the_one_before_it_used(tiny, tmp_path):
    run = tmp_path / "run"
    tiny.train(tmp_path / "straight")
    with pytest.raises(Crash):
        tiny.train(run, observers=[at_step(9, crash)], save_every=4)
    shard = next((run / "checkpoints" / checkpoint.folder_name(8)).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    tiny.train(run)
    assert "step_00000008 is damaged" in read(run, "start")[-1]["say"]
    assert losses(run) == losses(tmp_path / "straight")


def test_c6_a_save_that_fails_is_said_and_the_run_goes_on(tiny, tmp_path, monkeypatch):
    real, fail = saving.save, [True]

    def save(*args):
        if fail.pop() if fail else False:
            raise NotSaved("the checkpoint of step 6 was not saved (No space left on device)")
        return real(*args)

    monkeypatch.setattr(saving, "save", save)
    result = tiny.train(tmp_path / "run", save_every=6)
    assert result.complete
    said = [record["say"] for record in read(tmp_path / "run", "event")]
    assert any("No space left on device" in text and "the run goes on" in text for text in said)
    fail.extend([True, True])
    with pytest.raises(UserError, match="repeat the command"):
        tiny.train(tmp_path / "full", save_every=6)
    assert tiny.train(tmp_path / "full").complete


def test_a_second_writer_is_refused(tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with only_writer(run), pytest.raises(UserError, match="another process is training"):
        tiny.train(run)
    assert tiny.train(run).complete


def test_a_run_dir_that_cannot_be_is_one_line(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give another run_dir"):
        tiny.train(tmp_path / "file" / "run")


def test_a_wish_that_would_be_ignored_is_refused(tiny, tmp_path):
    with pytest.raises(UserError, match="needs the package"):
        tiny.train(tmp_path / "run", tracker="wandb")
    assert not (tmp_path / "run").exists()


def test_t14_a_device_that_is_not_there_is_one_line(tiny, tmp_path):
    for device in ("mps", "cuda:1", "hip"):
        with pytest.raises(UserError, match=device):
            tiny.train(tmp_path / "run", device=device)


def test_samples_and_validations_come_as_often_as_asked(tiny, tmp_path):
    result = tiny.train(tmp_path / "run", val_tokens=-1, val_every=4, sample_every=6)
    assert [r["step"] for r in read(tmp_path / "run", "validation")] == [4, 8, 12]
    assert sorted({r["step"] for r in read(tmp_path / "run", "sample")}) == [6, 12]
    assert len(result.samples) == len(PROMPTS)


TWO_RANKS = """
import sys
from pathlib import Path
from nanolearn import distributed
from nanolearn.data.sources import open_source
from nanolearn.hardware import Choice, cpu
from nanolearn.execution import Execution
from nanolearn.recipe import Recipe
from nanolearn.tokenizer import Tokenizer
from nanolearn.train import trainer

trainer.choose_dtype = lambda machine, wanted: Choice("float64", "a test")
run = Path(sys.argv[1])
recipe = Recipe.load(run / "recipe.json")
trainer.train(recipe, Execution.load(run / "execution.json"), run, machine=cpu(),
              source=open_source(recipe.data), tokenizer=Tokenizer.load(sys.argv[2]))
distributed.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_t4_t6_promises_1_and_8_c2_gloo_processes_agree_with_one_and_hand_over_to_one(tiny, tmp_path, float64, ranks):
    recipe = tiny.recipe(packer="best_fit_pad", steps=20)
    alone = tiny.train(tmp_path / "alone", recipe, val_tokens=-1)
    run, tokenizer, script = tmp_path / "run", tmp_path / "tokenizer", tmp_path / "worker.py"
    run.mkdir()
    script.write_text(TWO_RANKS)
    tiny.tokenizer.save(tokenizer)
    recipe.save(run / "recipe.json")
    tiny.execution(micro_batch=1, val_tokens=-1, save_every=10).save(run / "execution.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(trainer.__file__).parents[2])}
    child = subprocess.run(
        [*command, str(script), str(run), str(tokenizer)], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert read(run, "start")[0]["ranks"] == ranks
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)
    norms = [[r["grad_norm"] for r in read(folder, "step")] for folder in (run, tmp_path / "alone")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-7)
    assert read(run, "validation")[-1]["bpb"] == pytest.approx(alone.bpb, rel=1e-9)
    # What they wrote, one takes up.
    (run / "result.json").unlink()
    tiny.train(run, recipe, resume_from=10)
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)


@pytest.mark.slow
def test_compiling_is_counted_apart_from_the_steps_after_it(tiny, tmp_path, monkeypatch):
    """aot_eager: a code generator would add its own time to the same first call."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compiled(function, backend="aot_eager"))
    monkeypatch.setattr(trainer, "choose_compile", lambda machine, wanted: Choice(wanted is True, "as asked"))
    torch._dynamo.reset()
    spent = tiny.train(tmp_path / "compiled", compile=True).seconds
    # Eleven steps of a tiny model against one that traces it.
    assert spent["first step, compiling"] > spent["forward and backward"] > 0
    first, *others = [record["seconds"] for record in read(tmp_path / "compiled", "step")]
    assert first >= spent["first step, compiling"] and max(others) < first
    assert "first step, compiling" not in tiny.train(tmp_path / "eager", compile=False).seconds
