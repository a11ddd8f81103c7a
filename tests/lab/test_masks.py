"""Chapter 05's pictures say what the masks are, and its measurements measure."""

import pytest
import torch

from nanolearn.lab import masks
from nanolearn.model import gpt
from nanolearn.model.gpt import GPTConfig
from nanolearn.model.materialize import materialize

CPU = torch.device("cpu")


def test_a_row_of_documents_by_its_definition():
    lengths, window = [3, 4], 2
    whole, last = masks.seen(lengths, window), masks.seen(lengths, window, queries=3)
    owner = [0, 0, 0, 1, 1, 1, 1]
    for i in range(7):
        for j in range(7):
            assert bool(whole[i, j]) == (i - window <= j <= i and owner[i] == owner[j])
    assert torch.equal(last, whole[-3:])
    assert int(masks.seen(lengths, 7, documents=False).sum()) == 28


def test_a_cell_has_the_colour_of_its_keys_document_and_hidden_ones_none():
    figure = masks.masks_figure([2, 3], 1)
    assert [axes.get_title(loc="left") for axes in figure.axes][1:3] == ["Window 1", "Window 1 and documents"]
    cells = figure.axes[2].images[0].get_array()
    assert cells.tolist()[2] == [0, 0, 2, 0, 0]  # the second document's first token sees itself alone
    assert figure.axes[3].images[0].get_array().shape == (1, 5)


def test_the_dial_redraws_for_both_sliders():
    window, boundary, picture = masks.dial([5, 7], 3).children
    window.value, boundary.value = 4, 2
    assert "Window 4, documents of 2 and 10 tokens." in picture.value


def test_peak_memory_is_the_most_held_at_once():
    def work():
        one = torch.zeros(1000)
        two = torch.zeros(3000)
        del one, two
        torch.zeros(2000)

    assert masks.peak_bytes(work, CPU) == pytest.approx(16_000, abs=200)


def test_a_warm_up_is_not_counted():
    calls = []
    assert len(masks.seconds(lambda: calls.append(1), CPU, repeats=3)) == 3 and len(calls) == 4


def test_the_drawings_hold_what_they_are_given():
    figure = masks.lines_figure([256, 512], {"a": [1.0, 2.0]}, {"a": [3.0, 5.0]})
    assert [axes.lines[0].get_ydata().tolist() for axes in figure.axes] == [[1.0, 2.0], [3.0, 5.0]]
    errors = masks.errors_figure({"blocked, float32": {"full": 1e-7, "window": 2e-7}}, {"float32": 1e-4})
    assert [label.get_text() for label in errors.axes[0].get_yticklabels()] == ["full", "window"]
    leaks = masks.leak_figure([1.0, 10.0], {"-20": [0.0, 1.0]})
    assert leaks.axes[0].lines[0].get_ydata().tolist() == [0.0, 1.0]


def test_crossing_attention_of_a_model_that_attends_equally_is_counted_by_hand():
    config = GPTConfig(2, 32, 2, 1, 16, 12, 64, window="L")
    model = materialize(config, "cpu", 0)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q.weight.zero_()  # all scores 0: equal shares
    lengths = [5, 7]
    tokens = torch.zeros(1, 12, dtype=torch.long)
    by_hand = sum(5 / (i + 1) for i in range(5, 12)) / 7
    before = gpt.attend
    assert masks.across(model, tokens, masks.numbered(lengths)) == pytest.approx([by_hand] * 2, abs=1e-5)
    assert gpt.attend is before
