"""Reports while a model is loaded: some on the way, and the last one of all its tensors."""

from itertools import count

from transformers.utils.logging import set_tqdm_hook, tqdm

from loradock.engine.models.saved_weights import INTERVAL_S, reporting


def test_reports_come_at_intervals_and_at_the_end_and_no_other_bar_is_changed() -> None:
    reports: list[tuple[int, int]] = []
    clock = count(0, INTERVAL_S / 2)
    with reporting(lambda done, total: reports.append((done, total)), lambda: next(clock)):
        loaded = list(
            tqdm({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}.items(), desc="Loading weights")
        )
        assert list(tqdm([1, 2], desc="Other", disable=True)) == [1, 2]
    assert loaded == [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)]
    assert reports[-1] == (5, 5)
    assert 1 < len(reports) < 5
    assert set_tqdm_hook(None) is None
