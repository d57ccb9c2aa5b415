"""Tests of the learning curves of benchmarks: means and bands over seeds, rounds, styles, and legends."""

from __future__ import annotations

import sys
import warnings

import pytest

from hf_federated.reporting.learning_curves import CurvePanel, plot_learning_curves


def panel(num_runs: int, num_references: int = 0, num_rounds: int = 5, title: str = "task") -> CurvePanel:
    curves = {
        f"run {number}": [{r: r / 10 + number / 100 + seed for r in range(1, num_rounds + 1)} for seed in range(3)]
        for number in range(num_runs)
    }
    return CurvePanel(title, "eval_score", curves, {f"baseline {n}": [0.5, 0.7 + n] for n in range(num_references)})


def draw(monkeypatch, tmp_path, panels):
    """Plot the panels and return the saved figure."""
    from matplotlib.figure import Figure

    figures: list = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), save(self, *args, **kwargs))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns about content that does not fit
        plot_learning_curves(panels, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    return figures[0]


def test_line_is_the_mean_over_seeds_and_band_is_the_range(monkeypatch, tmp_path):
    seeds = [{1: 0.1, 2: 0.4}, {1: 0.2, 2: 0.7}, {1: 0.6, 2: 0.7}]
    figure = draw(monkeypatch, tmp_path, [CurvePanel("t", "accuracy", {"a": seeds}, {"b": [0.5, None, 0.6]})])
    (axis,) = figure.axes
    baseline, line = axis.lines
    assert line.get_xdata().tolist() == [1, 2]
    assert line.get_ydata().tolist() == pytest.approx([(0.1 + 0.2 + 0.6) / 3, (0.4 + 0.7 + 0.7) / 3])
    assert list(baseline.get_ydata()) == pytest.approx([0.55, 0.55]) and baseline.is_dashed()
    heights = [y for x, y in axis.collections[0].get_paths()[0].vertices if x == 1]
    assert min(heights) == pytest.approx(0.1) and max(heights) == pytest.approx(0.6)
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_title()) == ("round", "accuracy", "t")


def test_baseline_far_from_the_curves_stands_in_the_legend_only(monkeypatch, tmp_path):
    curves = {"a": [{1: 0.6, 2: 0.5}]}
    references = {"untrained": [8.4, 8.5], "centralized": [0.3]}
    figure = draw(monkeypatch, tmp_path, [CurvePanel("t", "loss", curves, references)])
    low, high = figure.axes[0].get_ylim()
    assert low < 0.3 and 0.6 < high < 0.7
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "untrained (8.45)", "centralized"]


def test_step_name_is_the_label_of_the_horizontal_axis(monkeypatch, tmp_path):
    steps = CurvePanel("t", "accuracy", {"a": [{1: 0.1, 2: 0.4}]}, step_name="optimizer step")
    first, second = draw(monkeypatch, tmp_path, [steps, panel(1)]).axes
    assert (first.get_xlabel(), second.get_xlabel()) == ("optimizer step", "round")


def test_single_seed_has_no_band(monkeypatch, tmp_path):
    (axis,) = draw(monkeypatch, tmp_path, [CurvePanel("t", "accuracy", {"a": [{1: 0.1, 2: 0.4}]})]).axes
    assert len(axis.lines) == 1 and not axis.collections


def test_runs_evaluated_at_different_rounds_keep_their_rounds(monkeypatch, tmp_path):
    curves = {
        "a": [{1: 0.1, 2: 0.2, 3: 0.3}],
        "b": [{2: 0.1, 4: 0.2, 6: 0.3}, {2: 0.1, 4: None, 6: 0.5}, {2: float("nan")}],
        "c": [{5: 0.1}, {5: 0.3}],
    }
    (axis,) = draw(monkeypatch, tmp_path, [CurvePanel("t", "accuracy", curves)]).axes
    # In run "b", the third seed has no finite value, and the second seed has no value for round 4.
    assert [line.get_xdata().tolist() for line in axis.lines] == [[1, 2, 3], [2, 6], [5]]
    assert axis.lines[1].get_ydata().tolist() == pytest.approx([0.1, 0.4])


@pytest.mark.parametrize("num_rounds", [1, 2, 7, 100])
def test_ticks_are_integer_rounds(monkeypatch, tmp_path, num_rounds):
    (axis,) = draw(monkeypatch, tmp_path, [panel(2, num_rounds=num_rounds)]).axes
    assert all(float(tick).is_integer() for tick in axis.get_xticks())


def test_maximum_number_of_runs_and_baselines_have_distinct_styles(monkeypatch, tmp_path):
    (axis,) = draw(monkeypatch, tmp_path, [panel(18, 4)]).axes
    references, lines = axis.lines[:4], axis.lines[4:]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 18
    assert len({line.get_marker() for line in lines}) == 18
    dashes = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in references}
    assert len(dashes) == 4 and {line.get_color() for line in references}.isdisjoint(
        {line.get_color() for line in lines}
    )


@pytest.mark.parametrize(("num_panels", "num_runs"), [(1, 1), (1, 10), (2, 5), (4, 10), (5, 3)])
def test_legend_below_does_not_cover_panels(monkeypatch, tmp_path, num_panels, num_runs):
    panels = [panel(num_runs, 2, title=f"FedNLP, Table {number}: a long title") for number in range(num_panels)]
    figure = draw(monkeypatch, tmp_path, panels)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [*(f"run {n}" for n in range(num_runs)), "baseline 0", "baseline 1"]
    assert len(figure.axes) == num_panels
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width
    for axis in figure.axes:
        assert axis.get_tightbbox().y0 >= box.y1 - 1
        assert axis.get_window_extent().height > 1.5 * figure.dpi  # the panel is large enough to read


@pytest.mark.parametrize(("num_panels", "length"), [(1, 20), (1, 33), (2, 50), (3, 41)])
def test_long_names_are_complete_in_the_legend_within_the_picture(monkeypatch, tmp_path, num_panels, length):
    names = [f"{number} {'W' * 12} ".ljust(length, "m") for number in range(6)]
    panels = [CurvePanel(str(n), "f1", {name: [{1: 1.0, 2: 2.0}] for name in names}) for n in range(num_panels)]
    figure = draw(monkeypatch, tmp_path, panels)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width
    assert all(axis.get_tightbbox().y0 >= box.y1 - 1 for axis in figure.axes)


def test_run_has_the_same_color_in_all_panels(monkeypatch, tmp_path):
    first = CurvePanel("1", "accuracy", {"a": [{1: 1.0}], "b": [{1: 2.0}]})
    second = CurvePanel("2", "f1", {"c": [{1: 3.0}], "b": [{1: 4.0}]})
    left, right = draw(monkeypatch, tmp_path, [first, second]).axes
    assert left.lines[1].get_color() == right.lines[1].get_color()
    assert len({line.get_color() for line in [*left.lines, *right.lines]}) == 3


def test_long_title_is_complete_on_two_lines_within_the_picture(monkeypatch, tmp_path):
    title = "Methods for LoRA factors: the pooler of MiniLM on 20 Newsgroups (α = 1)"
    figure = draw(monkeypatch, tmp_path, [panel(1, title=title)])
    (axis,) = figure.axes
    assert axis.get_title().split() == title.split() and axis.get_title().count("\n") == 1
    figure.draw_without_rendering()
    box = axis.title.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_names_are_not_drawn_as_formulas(monkeypatch, tmp_path):
    figure = draw(monkeypatch, tmp_path, [CurvePanel("$x^$", "$m^$", {"_a$^$": [{1: 0.5}]}, {"\\frac{": [0.1]})])
    assert len(figure.legends[0].get_texts()) == 2


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ([], "no finite values to draw"),
        ([CurvePanel("t", "m", {})], "no finite values to draw for 't'"),
        ([panel(1), CurvePanel("t", "m", {"a": [{1: None}, {}]}, {"b": [1.0]})], "no finite values to draw for 't'"),
        ([panel(19)], "19 runs, but at most 18 can be distinguished"),
        ([panel(1, 5)], "5 baselines, but at most 4 can be distinguished"),
    ],
)
def test_invalid_input_raises_error_and_writes_no_file(tmp_path, panels, message):
    with pytest.raises(ValueError, match=message):
        plot_learning_curves(panels, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_error_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-federated\[plots\]'"):
        plot_learning_curves([panel(2)], tmp_path / "x.png")
