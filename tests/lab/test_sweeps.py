"""Recorded sweeps: computed only when asked, never shown under other settings."""

import json

import pytest

from nanolearn.errors import UserError
from nanolearn.lab import sweeps


@pytest.fixture(autouse=True)
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "home", lambda: tmp_path)
    return tmp_path


def test_a_sweep_is_computed_when_asked_and_read_after(checkout):
    computed = []

    def compute():
        computed.append(1)
        return {"a": [(1.5, 2.0)]}

    first = sweeps.recorded("00_x", compute, True, {"steps": 3})
    again = sweeps.recorded("00_x", compute, False, {"steps": 3})
    assert first == again
    assert again.values == {"a": [[1.5, 2.0]]}
    assert len(computed) == 1
    written = json.loads((checkout / "notebooks" / "results" / "00_x.json").read_text())
    assert set(written) == {"settings", "date", "machine", "commit", "values"}
    assert written["machine"] in again.about


def test_no_record_and_one_of_other_settings_are_refused():
    with pytest.raises(UserError, match="give fresh=True"):
        sweeps.recorded("00_x", dict, False, {})
    sweeps.recorded("00_x", dict, True, {"steps": 3})
    with pytest.raises(UserError, match="other settings"):
        sweeps.recorded("00_x", dict, False, {"steps": 4})


def test_what_is_no_json_is_not_recorded(checkout):
    with pytest.raises(ValueError, match="JSON"):
        sweeps.recorded("00_x", lambda: float("nan"), True, {})
    assert not (checkout / "notebooks" / "results" / "00_x.json").exists()
