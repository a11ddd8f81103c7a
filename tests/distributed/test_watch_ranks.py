"""The watch over several ranks: one rank's bad numbers are every rank's bad step."""

from pathlib import Path

import pytest

from nanolearn.train.records import read
from tests.ranks import run_ranks
from tests.train.conftest import losses, write_corpus
from tests.train.conftest import tiny as tiny

SCRIPT = Path(__file__).with_name("watch_script.py")


@pytest.mark.slow
def test_t10_a_nan_on_one_rank_skips_the_step_on_both_and_they_stay_one_model(tiny, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    tiny.tokenizer.save(tmp_path / "tokenizer")
    tiny.recipe(steps=24).save(run / "recipe.json")
    tiny.execution(num_devices=2).save(run / "execution.json")
    run_ranks(SCRIPT, 2, str(run), str(tmp_path / "tokenizer"), "20,22")  # both end: neither waits for the other
    steps = read(run, "step")
    assert [record["step"] for record in steps if record["skipped"]] == [20, 22]
    assert [record["loss_z"] for record in steps if record["skipped"]] == [None, None]
    for name in ("loss_z", "norm_z"):  # the watch is alive after a NaN, and nothing before 16 values is judged
        assert [record["step"] for record in steps if record[name] is not None] == [17, 18, 19, 21, 23, 24]
    assert max(losses(run)[i] for i in (20, 22, 23)) < losses(run)[0] - 0.5  # neither rank learnt from a bad step


@pytest.mark.slow
def test_ranks_with_other_text_are_refused_before_the_first_step(tiny, tmp_path):
    """Nodes may have caches of their own; a run must not average models of two corpora."""
    run, other = tmp_path / "run", write_corpus(tmp_path / "other", documents=300)
    run.mkdir()
    tiny.recipe().save(run / "recipe.json")
    tiny.execution(num_devices=2).save(run / "execution.json")
    said = run_ranks(SCRIPT.with_name("other_text_script.py"), 2, str(run), str(tiny.corpus), str(other))
    assert all("rank 1 has another tokenizer than rank 0" in text for text in said), said
    assert not (run / "records.jsonl").exists()
