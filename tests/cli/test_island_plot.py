"""The picture of a run of islands shows who took part, and hides nothing of it; metrics are read as they were written."""

import json
import math
import os

import pytest

pytest.importorskip("matplotlib")

from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D

from gradcomp_jax._errors import SettingError
from gradcomp_jax.cli.island_plot import draw, picture_of
from gradcomp_jax.experiments.island import Landed, append_metrics, read_metrics
from gradcomp_jax.islands import Decision, Entry

NAMES = ("london", "ohio", "a-name-of-an-island-that-is-longer")


def decision(number, weights, members=()):
    entries = tuple(Entry(name, weight, "0" * 32, 10) for name, weight in sorted(weights.items()))
    return Decision(number, "0" * 32, entries, tuple(sorted({*weights, *members})), "london")


def landed(island, number, *, loss=0.5, seconds=None, kept=1.0):
    at = float(number) if seconds is None else seconds
    return Landed(island, number, at, 10 * number, loss, kept, number, 0, 100, 200, 0.5)


RUN = (
    decision(1, {"london": 1.0}),
    decision(2, {"london": 1.0, "ohio": 4.0}, members=[NAMES[2]]),
    decision(3, {"ohio": 4.0, NAMES[2]: 0.5}),
    decision(4, {"london": 1.0}, members=["ohio"]),
)


def luminance(colour):
    red, green, blue, _ = to_rgba(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def cells(figure):
    (found,) = (c for c in figure.axes[0].collections if isinstance(c, PatchCollection))
    boxes = [path.get_extents() for path in found.get_paths()]
    at = [(round((box.x0 + box.x1) / 2), round((box.y0 + box.y1) / 2)) for box in boxes]
    return dict(zip(at, found.get_facecolor(), strict=True))


def test_a_cell_is_filled_where_a_payload_was_accepted_and_darker_for_more_weight() -> None:
    figure = draw(RUN, [], "run")
    (axes,) = figure.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == sorted(NAMES)
    found = cells(figure)
    accepted = {(d.round, rows.index(e.island)): e.weight for d in RUN for e in d.entries}
    alive = {(d.round, rows.index(name)) for d in RUN for name in d.members}
    assert found.keys() == alive and {at for at, colour in found.items() if colour[3] > 0} == accepted.keys()
    dark = {weight: luminance(found[at]) for at, weight in accepted.items()}
    assert dark[4.0] < dark[1.0] < dark[0.5]
    said = [text.get_text() for text in axes.texts]
    assert said == ["1 of 4", "3 of 4", "2 of 4"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["accepted, weight 0.5", "accepted, weight 1", "accepted, weight 4", "alive, not in the round"]


def test_lines_are_those_of_the_metrics_with_a_gap_at_a_restart() -> None:
    lines = [landed("ohio", n, loss=1 / n) for n in (1, 2, 3)] + [landed("ohio", 4, loss=0.2, seconds=0.5)]
    figure = draw(RUN, [*lines, landed("london", 2, loss=None, kept=0.0)], "run")
    _, loss, kept = figure.axes
    london, ohio = loss.lines
    assert list(ohio.get_xdata()) == [1, 2, 3, 4, 4]
    assert (
        list(ohio.get_ydata())[:3] == [1, 1 / 2, 1 / 3]
        and math.isnan(ohio.get_ydata()[3])
        and ohio.get_ydata()[4] == 0.2
    )
    assert math.isnan(london.get_ydata()[0]) and london.get_color() != ohio.get_color()
    assert loss.get_yscale() == "log" and kept.get_yscale() == "log"
    shown = figure.legends[0]
    colours = {
        text.get_text(): handle.get_color()
        for text, handle in zip(shown.get_texts(), shown.legend_handles, strict=True)
        if isinstance(handle, Line2D)
    }
    assert colours == {"london": london.get_color(), "ohio": ohio.get_color()}


@pytest.mark.parametrize(("rounds", "islands"), [(1, 1), (12, 3), (60, 9), (300, 12)])
def test_nothing_covers_anything(rounds: int, islands: int) -> None:
    names = [f"island-{number:02d}" for number in range(islands)]
    run = [decision(n, {names[n % islands]: 1.0 + n % 7}, members=names) for n in range(1, rounds + 1)]
    figure = draw(run, [landed(name, n) for name in names for n in range(1, rounds + 1)], "a run")
    figure.canvas.draw()
    drawer = figure.canvas.get_renderer()
    whole = figure.bbox
    legend = figure.legends[0].get_window_extent(drawer)
    assert whole.x0 <= legend.x0 and legend.x1 <= whole.x1 and whole.y0 <= legend.y0
    for axes in figure.axes:
        box = axes.get_tightbbox(drawer)
        assert not box.overlaps(legend) and box.x1 <= whole.x1 + 1 and box.x0 >= whole.x0 - 1
        for axis in (axes.xaxis, axes.yaxis):
            labels = [t.get_window_extent(drawer) for t in axis.get_ticklabels() if t.get_visible() and t.get_text()]
            assert not any(a.overlaps(b) for i, a in enumerate(labels) for b in labels[:i])
    tops = [axes.get_window_extent(drawer) for axes in figure.axes]
    assert not any(a.overlaps(b) for i, a in enumerate(tops) for b in tops[:i])


def test_the_picture_is_a_png() -> None:
    assert picture_of(RUN, [], "run").startswith(b"\x89PNG")


def test_metrics_are_read_as_they_were_written_also_after_a_kill(tmp_path) -> None:
    first, second = landed("ohio", 1), landed("ohio", 2, loss=None)
    append_metrics(tmp_path, first)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        # A process was killed while it wrote.
        file.write(json.dumps({"island": "ohio"}).encode()[:-3])
    append_metrics(tmp_path, second)
    assert read_metrics(tmp_path) == read_metrics(tmp_path / "metrics.jsonl") == [first, second]
    assert not [name for name in os.listdir(tmp_path) if name != "metrics.jsonl"]


def test_what_are_no_metrics_is_said(tmp_path) -> None:
    with pytest.raises(SettingError, match=r"there is no .*metrics.jsonl: name the folder of an island"):
        read_metrics(tmp_path)
    (tmp_path / "diary").write_text("mine\n")
    with pytest.raises(SettingError, match="diary has no line of metrics"):
        read_metrics(tmp_path / "diary")
