"""Plans side by side."""

from nanolearn.lab import plans, plots


def test_plans_of_other_machines_state_what_they_rest_on(monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "show_text", shown.append)
    plans.compare_plans(24, ["8 x NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"], "ratio=8")
    (page,) = shown
    assert page.count("1,384,122,122") == 2
    assert "| steps | 5,568 of 1,048,576 tokens |" in page
    assert "27.5% of 1307.4 TFLOP/s" in page
