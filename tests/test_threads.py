"""The number of threads that is chosen at load."""

from __future__ import annotations

import logging

import pytest

from outrider.backends.mock import MockBackend
from outrider.config import MockConfig
from outrider.engine import threads


def test_which_numbers_are_tried() -> None:
    assert [threads.candidates(cores) for cores in (1, 2, 3, 4, 16)] == [[1], [2], [3, 2], [4, 3, 2], [16, 12, 8, 4]]


def test_the_fewest_that_are_about_as_fast() -> None:
    assert threads.fewest_fast({16: 3.4, 12: 3.3, 8: 3.3, 4: 5.0}) == 8
    assert threads.fewest_fast({16: 1.0, 12: 1.2, 8: 1.6, 4: 3.0}) == 16


def test_it_is_set_and_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """On a machine where eight threads are best."""
    used: list[int] = []
    taken = {16: 0.004, 12: 0.003, 8: 0.002, 4: 0.005}
    monkeypatch.setattr(threads, "num_cores", lambda: 16)
    monkeypatch.setattr(threads, "use_threads", used.append)
    monkeypatch.setattr(threads, "_one_row_s", lambda _: taken[used[-1]])
    with caplog.at_level(logging.WARNING, logger="outrider"):
        assert threads.choose_threads(MockBackend(MockConfig())) == 8
    assert used == [16, 12, 8, 4, 8]
    assert "8 of 16 cores compute: a token takes 2.0 ms with them and 4.0 ms with all" in caplog.text


def test_a_pass_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    target = MockBackend(MockConfig())
    monkeypatch.setattr(threads, "num_cores", lambda: 4)
    monkeypatch.setattr(threads, "use_threads", lambda count: None)
    assert threads.choose_threads(target) in (2, 3, 4)
    assert target.num_slots == 0 and target.num_passes == 3 * (threads.PASSES + 1)
