"""How much is looked at, and that two looks at one model see the same; ranks and micro-batches: test_trainer."""

from hypothesis import given
from hypothesis import strategies as st

from nanolearn.model.materialize import materialize
from nanolearn.train.identity import open_data
from nanolearn.train.judge import PROMPTS, WHOLE_CAP, Judge, rows_to_judge


@given(st.integers(-1, 10**9), st.integers(1, 4096), st.integers(1, 10**6), st.integers(1, 10**12))
def test_never_no_row_never_more_than_there_are_and_never_more_on_the_way(asked, length, there, training):
    part, last = rows_to_judge(asked or 1, length, there, training)
    assert 1 <= part <= last <= there
    assert (last - 1) * length < (WHOLE_CAP if asked < 0 else max(asked, 1))
    assert part == 1 or part * length <= 0.01 * training


def test_two_looks_at_one_model_are_alike_and_each_is_told_of(tiny):
    recipe, told = tiny.recipe(), []
    store = open_data(tiny.source, tiny.tokenizer).val
    model = materialize(recipe.gpt_config(), "cpu", 0)
    judge = Judge(model, tiny.tokenizer, recipe, store, -1, 4, told.append)
    assert judge.validate(judge.last) == judge.validate(judge.last)
    assert judge.whole
    assert judge.write() == judge.write()
    assert [text["prompt"] for text in judge.samples] == list(PROMPTS)
    assert set(told) == {"validation", "samples"}
    judge.validate(judge.last - 1)
    assert not judge.whole


def test_switched_off_it_opens_no_rows(tiny):
    recipe = tiny.recipe()
    judge = Judge(materialize(recipe.gpt_config(), "cpu", 0), tiny.tokenizer, recipe, None, 0, 4, lambda phase: None)
    assert (judge.part, judge.last, judge.bits) == (0, 0, None)
