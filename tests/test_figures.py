import copy
import errno
import json
import os
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from specbench import metrics, plots, record
from specbench.errors import RunError
from specbench.families import COLOURS
from specbench.plots import groups, shares, style

ROOT = Path(__file__).parent.parent
QUICK = ROOT / "results" / "reference" / "quick"
CURVE = ROOT / "results" / "reference" / "verify_cost" / "verify_cost.json"
FAMILIES = ("none", "ngram", "suffix", "small_lm", "eagle", "mtp", "medusa", "dflash", "dspark", "oracle")


@cache
def stored():
    """The reference runs by drafter, each with its folder."""
    found = (json.loads(path.read_text()) | {"folder": str(path.parent)} for path in sorted(QUICK.glob("*/run.json")))
    return {run["drafter"]["name"]: run for run in found}


def made(name="ngram", changes=(), options=()):
    """A stored run, without its steps, with ``changes`` by dotted path and more ``options`` of its drafter."""
    run = copy.deepcopy(stored()[name])
    del run["folder"]
    for path, value in dict(changes).items():
        *above, last = path.split(".")
        at = run
        for key in above:
            at = at[key]
        at[last] = value
    run["config"]["drafter"] |= dict(options)
    return run


def drafting(name, k, speedup, **more):
    """A run of ``name`` that drafted ``k`` tokens."""
    changes = {
        "id": f"{name}-{k}",
        "drafter.k": k,
        "metrics.speedup": speedup,
        "metrics.speedup_ci95": [speedup - 0.1, speedup + 0.3],
        "metrics.tokens_per_pass": speedup + 0.5,
        "metrics.tokens_per_pass_ci95": [speedup + 0.4, speedup + 0.7],
        "metrics.accepted_length_histogram": [10] * (k + 1),
        "metrics.acceptance_by_position": {"joint": [0.5] * k, "conditional": [0.5] * k},
        "model.by_k": [
            {"k": i, "speedup": 1 + i / 10, "tokens_per_pass": 1 + i / 5, "seconds": 0.03, "bound": 1 + i}
            for i in range(k + 1)
        ],
    }
    return made(name, changes | more)


def batched(name, size, speedup, **more):
    """A run of ``name`` at a batch size; plain decoding gives 20 tokens/s a row, in rounds of 0.05 s."""
    changes = {
        "id": f"{name}-of-{size}",
        "config.batch_size": size,
        "metrics.speedup": speedup,
        "metrics.speedup_ci95": [speedup - 0.1, speedup + 0.1],
        "metrics.baseline_decode_tokens_per_s": 20.0 * size,
        "metrics.decode_tokens_per_s": 20.0 * size * speedup,
        "metrics.baseline_round_seconds": 0.05,
        "metrics.round_seconds": 0.05,
        "metrics.tokens_per_pass": speedup,
    }
    return made(name, changes | more)


def failed(name="eagle", changes=()):
    run = made(name, changes) | {"status": "failed", "error": "ArithmeticError: made of cheese"}
    return {key: value for key, value in run.items() if key not in ("metrics", "by_category", "prompts", "model")}


@pytest.fixture
def laid_out(monkeypatch, tmp_path):
    """Calls a plot and returns its figure, unwritten."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: found.append(figure))

    def draw(plot, *arguments):
        plot(*arguments, tmp_path / "figure")
        return found[-1]

    return draw


@pytest.fixture
def drawn(monkeypatch, laid_out):
    """The same in no time: without a layout."""
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda _: None)
    return laid_out


@pytest.fixture
def gallery(monkeypatch, tmp_path):
    """Draws all that runs allow and returns the figures by the names of their files, without a layout, unwritten."""
    found, last = {}, []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: last.append(figure))
    monkeypatch.setattr(record, "write_file", lambda path, content: found.setdefault(path.stem, last[-1]))
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda _: None)

    def draw(runs, curve=None):
        found.clear()
        plots.draw(runs, tmp_path, curve)
        return dict(found)

    return draw


# reading figures


def bars(axis):
    """(from, to, row, colour) of lying bars."""
    each = [bar for container in axis.containers if isinstance(container, BarContainer) for bar in container]
    return [
        (
            bar.get_x(),
            bar.get_x() + bar.get_width(),
            round(bar.get_y() + bar.get_height() / 2),
            to_hex(bar.get_facecolor()).upper(),
        )
        for bar in each
    ]


def whiskers(container):
    """(from, to) of an ErrorbarContainer, along its whiskers; nothing where there are none."""
    along = int(not container.has_xerr)
    segments = [segment for collection in container.lines[2] for segment in collection.get_segments()]
    return [tuple(segment[:, along]) for segment in segments if len(segment)]


def lines(axis):
    """By label: points and whiskers of the lines drawn with intervals."""
    spread = [container for container in axis.containers if isinstance(container, ErrorbarContainer)]
    labelled = [line for line in axis.get_lines() if not line.get_label().startswith("_")]
    drawn = [line for line in labelled if line.get_linestyle() != "--"]
    return {
        line.get_label(): (line.get_xydata(), whiskers(container))
        for line, container in zip(drawn, spread, strict=False)
    }


def dashed(axis, colour):
    """Points of the dashed lines of a colour."""
    each = [line for line in axis.get_lines() if line.get_linestyle() == "--" and line.get_color() == colour]
    return [list(zip(*line.get_data(), strict=True)) for line in each if len(line.get_xdata())]


def is_near(found, wanted):
    return np.shape(found) == np.shape(wanted) and np.allclose(found, wanted, rtol=1e-9, atol=1e-9)


def words_of(figure):
    return " ".join(text.get_text().replace("\n", " ") for text in figure.findobj(Text))


def texts(figure):
    """What is seen: without the ticks outside of an axis."""
    unseen = set()
    for axis in figure.axes:
        for side in (axis.xaxis, axis.yaxis):
            low, high = sorted(side.get_view_interval())
            for tick in (*side.get_major_ticks(), *side.get_minor_ticks()):
                if not low <= tick.get_loc() <= high or not side.get_visible():
                    unseen |= {tick.label1, tick.label2}
    return [
        text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible() and text not in unseen
    ]


def check_layout(figure):
    """A paper can print it: width of a column, no small text, none cut off, none over another."""
    assert figure.get_figwidth() in (style.SINGLE, style.DOUBLE)
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    boxes = []
    for text in texts(figure):
        assert text.get_fontsize() >= 7, text.get_text()
        box = text.get_window_extent()
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -0.5, f"{text.get_text()!r} is cut off"
        boxes.append((box.padded(-1), text.get_text()))
    for i, (box, text) in enumerate(boxes):
        for other, words in boxes[:i]:
            assert not box.overlaps(other), f"{text!r} lies over {words!r}"


# all of them


def acceptance(runs, path):
    return plots.acceptance_by_position(runs, {}, path)


LONG = "a/folder/of/checkpoints/whose/name/goes/on/and/on/smollm2-135m-instruct-eagle-of-the-third-kind"
KNOWN = {  # acceptance of each draft, and its cost of a plain round
    "ngram": (0.45, 0.002),
    "suffix": (0.5, 0.004),
    "small_lm": (0.6, 0.14),
    "eagle": (0.7, 0.08),
    "mtp": (0.62, 0.09),
    "medusa": (0.4, 0.04),
    "dflash": (0.55, 0.025),
    "dspark": (0.58, 0.03),
}


def modelled(name, k, size=1):
    """A run whose speedups follow from a constant acceptance and costs."""
    right, cost = KNOWN[name]
    by_k = []
    for i in range(k + 1):
        tokens, seconds = sum(right**j for j in range(i + 1)), 0.02 * (1 + i * cost + i * size**0.7 * 0.03)
        by_k.append({"k": i, "tokens_per_pass": tokens, "seconds": seconds, "speedup": tokens * 0.02 / seconds})
    speedup = by_k[k]["speedup"] * (1 + 0.02 * (k % 3))
    return batched(
        name,
        size,
        speedup,
        **{
            "id": f"{name}-{k}-{size}",
            "drafter.k": k,
            "metrics.tokens_per_pass": by_k[k]["tokens_per_pass"],
            "metrics.tokens_per_pass_ci95": [0.9 * by_k[k]["tokens_per_pass"], 1.08 * by_k[k]["tokens_per_pass"]],
            "metrics.accepted_length_histogram": [int(1000 * right**j * (1 - right * (j < k))) for j in range(k + 1)],
            "metrics.acceptance_by_position": {
                "joint": [right**j for j in range(1, k + 1)],
                "conditional": [right] * k,
            },
            "metrics.baseline_round_seconds": 0.02 * size**0.3,
            "metrics.round_seconds": 0.02 * size**0.3 * by_k[k]["seconds"] / 0.02,
            "metrics.baseline_decode_tokens_per_s": 50 * size**0.7,
            "metrics.decode_tokens_per_s": 50 * size**0.7 * speedup,
            "model.by_k": by_k,
            "model.predicted_speedup": by_k[k]["speedup"],
            "model.bound": (k + 1) * 0.02 / by_k[k]["seconds"],
        },
    )


SWEEP = [modelled(name, k) for name in KNOWN for k in (1, 2, 4, 7)]
GRID = [modelled(name, k, size) for name in KNOWN for k in (2, 4, 7) for size in (1, 4, 8)]
BEST = [
    modelled(name, {"medusa": 3, "dflash": 7, "dspark": 7}.get(name, 4), size) for name in KNOWN for size in (1, 4, 8)
]
CASES = {
    "reference": lambda: list(stored().values()),
    "one failed": lambda: [made(), failed(), made("none")],
    "not profiled": lambda: [made("ngram", {"model": None}), made("eagle", {"model": None})],
    "no intervals": lambda: [
        made(name, {"metrics.speedup_ci95": None, "metrics.tokens_per_pass_ci95": None}) for name in ("mtp", "dspark")
    ],
    "long names": lambda: [
        made("eagle", options={"checkpoint": LONG}),
        made("eagle", {"id": "b"}, options={"checkpoint": LONG[::-1], "proposal": "sample"}),
        failed("eagle"),
        batched("eagle", 4, 1.1),
        drafting("eagle", 7, 1.4),
    ],
    "draft lengths": lambda: SWEEP,
    "many": lambda: SWEEP[:11],
    "grid": lambda: GRID,
    "batch sizes": lambda: [*BEST, *(batched("none", size, 1.0) for size in (1, 4, 8))],
}
OF_A_SETTING = [
    plots.speedup_by_drafter,
    acceptance,
    plots.accepted_lengths,
    plots.round_time,
    plots.speedup_by_category,
    plots.predicted_against_measured,
]
OF_BATCH_SIZES = [plots.by_batch_size, plots.throughput]
KINDS = {
    "speedup",
    "acceptance_by_position",
    "accepted_lengths",
    "round_time",
    "speedup_by_category",
    "predicted",
}


@pytest.mark.parametrize(
    ("case", "plot"),
    [
        *((case, plot) for case in ("reference", "one failed", "not profiled", "long names") for plot in OF_A_SETTING),
        ("no intervals", plots.speedup_by_drafter),
        ("draft lengths", plots.by_draft_length),
        ("draft lengths", plots.predicted_against_measured),
        ("many", plots.speedup_by_category),
        ("long names", plots.by_draft_length),
        *((case, plot) for case in ("batch sizes", "grid", "long names") for plot in OF_BATCH_SIZES),
    ],
)
def test_figures_can_be_printed_in_a_paper(laid_out, case, plot):
    check_layout(laid_out(plot, CASES[case]()))


@pytest.mark.parametrize(
    ("runs", "kinds"),
    [
        ([made("ngram"), made("eagle")], KINDS),
        ([made("ngram"), failed()], KINDS),
        ([made("ngram", {"model": None})], KINDS - {"round_time", "predicted"}),
        ([made("none")], KINDS - {"acceptance_by_position", "accepted_lengths"}),
        ([made("ngram", {"by_category": {"code": made()["by_category"]["code"]}})], KINDS - {"speedup_by_category"}),
        ([failed()], {"speedup"}),
        ([modelled("mtp", 2), modelled("mtp", 4)], KINDS | {"draft_length"}),
        ([modelled("mtp", 2), failed("mtp")], KINDS),
        ([modelled("mtp", 2), modelled("eagle", 4)], KINDS),
        (
            [modelled("mtp", 2), modelled("mtp", 2, size=4)],
            {f"{kind}-{number}" for kind in KINDS for number in (1, 2)} | {"batch_size", "throughput"},
        ),
        (
            [modelled("mtp", 2), modelled("eagle", 2, size=4), modelled("eagle", 4, size=4)],
            {f"{kind}-{number}" for kind in KINDS for number in (1, 2)} | {"draft_length-2"},
        ),
    ],
    ids=[
        "drafters", "one failed", "not profiled", "nothing drafted", "one category", "all failed", "draft lengths",
        "one length failed", "other lengths of others", "batch sizes", "other batch sizes of others",
    ],
)  # fmt: skip
def test_what_is_drawn_is_what_runs_allow(gallery, runs, kinds):
    assert set(gallery(runs)) == kinds
    assert set(gallery(runs, json.loads(CURVE.read_text()))) == kinds | {"free_lunch"}


NOTHING = {  # replies of one token need no verify pass
    "metrics.acceptance_rate": None,
    "metrics.tokens_per_pass": None,
    "metrics.tokens_per_pass_ci95": None,
    "metrics.speedup": None,
    "metrics.speedup_ci95": None,
    "metrics.decode_tokens_per_s": None,
    "metrics.baseline_decode_tokens_per_s": None,
    "metrics.round_seconds": None,
    "metrics.baseline_round_seconds": None,
    "metrics.acceptance_by_position": {"joint": [None] * 4, "conditional": [None] * 4},
    "metrics.accepted_length_histogram": [0] * 5,
    "by_category": {name: {"speedup": None, "speedup_ci95": None} for name in ("chat", "code")},
}


def test_of_runs_that_decoded_nothing_is_drawn_that_they_were(gallery):
    bare = [made("ngram", NOTHING | {"drafter.k": k, "config.batch_size": size}) for k in (2, 4) for size in (1, 8)]
    assert set(gallery(bare)) == {"speedup-1", "speedup-2"}


@pytest.mark.parametrize("plot", [*OF_A_SETTING, *OF_BATCH_SIZES, plots.by_draft_length])
def test_runs_that_decoded_nothing_stand_beside_others(laid_out, plot):
    others = [modelled("mtp", 2), modelled("mtp", 2, size=4), modelled("mtp", 4)]
    check_layout(laid_out(plot, [made("ngram", NOTHING), made("eagle", NOTHING | {"model": None}), *others]))


def test_all_that_failed_is_said(gallery):
    every = gallery([modelled("mtp", 2), modelled("mtp", 4), failed("oracle"), modelled("mtp", 4, size=8)])
    without_rows = {"draft_length-1", "acceptance_by_position-1", "accepted_lengths-1", "predicted-1", "batch_size"}
    for name in without_rows:
        assert "failed: oracle k=4" in words_of(every[name]), name
    for name in ("speedup-1", "round_time-1", "speedup_by_category-1"):
        assert "failed" in words_of(every[name]).split(), name


def test_flags_are_named_in_every_figure(gallery):
    runs = [made(), made("eagle"), batched("eagle", 8, 1.2)]
    for run in runs:
        run["flags"] = []
    runs[0]["flags"] = [{"flag": "busy-machine", "message": ""}]
    for run in runs[:2]:
        run["flags"] += [{"flag": "few-rounds", "message": ""}]
    for name, figure in gallery(runs).items():
        said = words_of(figure)
        if name.endswith("-1"):
            assert "flags: few-rounds; busy-machine (ngram k=4)" in said, name
        elif name.endswith("-2"):
            assert "flags" not in said, name
        else:
            assert "flags: few-rounds (all at batch size 1); busy-machine (ngram k=4 batch 1)" in said


def test_heading_is_the_setting_that_all_share(gallery):
    every = gallery([made(), batched("ngram", 4, 1.2)])
    assert every["speedup-1"].get_suptitle().replace("\n", " ").endswith("64 new tokens · batch 1")
    assert every["batch_size"].get_suptitle().replace("\n", " ").endswith("64 new tokens")


def test_user_s_own_style_changes_nothing(drawn):
    with matplotlib.rc_context({"font.size": 20, "axes.prop_cycle": "cycler('color', ['red'])", "text.usetex": True}):
        figure = drawn(plots.speedup_by_drafter, [made()])
    assert figure.axes[0].xaxis.label.get_fontsize() == 8
    assert not figure.axes[0].xaxis.label.get_usetex()


# each of them


def test_bars_of_speedup_are_as_long_as_measured(drawn):
    runs = [made("ngram"), failed("mtp"), made("eagle")]
    speedup, tokens = drawn(plots.speedup_by_drafter, runs).axes
    for axis, metric in ((speedup, "speedup"), (tokens, "tokens_per_pass")):
        measured = {y: runs[y]["metrics"] for y in (0, 2)}
        wanted = [(0, m[metric], y, COLOURS[runs[y]["drafter"]["name"]]) for y, m in measured.items()]
        assert bars(axis) == wanted
        spread = [whiskers(c)[0] for c in axis.containers if isinstance(c, ErrorbarContainer)]
        assert is_near(spread, [m[f"{metric}_ci95"] for m in measured.values()])
        said = {text.xy[1]: text.get_text() for text in axis.texts}
        assert said == {0: f"{measured[0][metric]:.2f}", 1: "failed", 2: f"{measured[2][metric]:.2f}"}
    marks = [(*line.get_xydata()[0], line.get_marker()) for line in speedup.get_lines() if line.get_marker() in "|D"]
    marks = [mark for mark in marks if mark[2] == "D" or mark[0] > 3]  # without the whiskers' caps
    assert [
        (runs[y]["model"][name], y, mark) for y in (0, 2) for name, mark in (("bound", "|"), ("predicted_speedup", "D"))
    ] == marks
    assert [label.get_text() for label in speedup.get_yticklabels()] == ["ngram, k=4", "mtp, k=4", "eagle, k=4"]


def test_marks_of_speedup_are_explained_where_there_are_some(drawn):
    assert "bound" in words_of(drawn(plots.speedup_by_drafter, [made()]))
    assert "bound" not in words_of(drawn(plots.speedup_by_drafter, [made(changes={"model": None}), failed()]))


def test_a_line_per_drafter_against_draft_length(drawn):
    runs = [drafting(name, k, at + k / 10) for name, at in (("ngram", 1), ("eagle", 2)) for k in (4, 1, 2)]
    speedup, tokens = drawn(plots.by_draft_length, [*runs, failed("ngram", {"drafter.k": 7})]).axes
    for axis, more in ((speedup, 0.0), (tokens, 0.5)):
        found = lines(axis)
        assert list(found) == ["eagle", "ngram"]  # the best first
        for name, at in (("ngram", 1), ("eagle", 2)):
            points, ends = found[name]
            assert [round(k) for k, _ in points] == [1, 2, 4]
            assert max(abs(k - round(k)) for k, _ in points) < 0.2
            values = np.array([at + k / 10 + more for k in (1, 2, 4)])
            assert is_near([value for _, value in points], values)
            low, high = (0.1, 0.3) if axis is speedup else (0.1, 0.2)
            assert is_near(ends, np.stack([values - low, values + high], axis=1))
    assert is_near(dashed(speedup, COLOURS["eagle"]), [[(k, 1 + k / 10) for k in range(5)]])
    assert is_near(dashed(tokens, COLOURS["eagle"]), [[(k, 1 + k / 5) for k in range(5)]])


def test_prediction_is_of_the_longest_drafts_that_were_profiled(drawn):
    runs = [drafting("ngram", k, 1.2, **({"model": None} if k == 7 else {})) for k in (2, 4, 7)]
    axis = drawn(plots.by_draft_length, runs).axes[0]
    assert [[k for k, _ in line] for line in dashed(axis, COLOURS["ngram"])] == [[0, 1, 2, 3, 4]]


def test_drafters_of_other_options_are_other_lines(drawn):
    runs = [drafting("ngram", k, 1.2) for k in (2, 4)] + [drafting("ngram", 2, 1.1)]
    runs[2]["config"]["drafter"]["max_n"] = 2
    axis = drawn(plots.by_draft_length, runs).axes[0]
    assert [(name, len(points)) for name, (points, _) in lines(axis).items()] == [
        ("ngram max_n=4", 2),
        ("ngram max_n=2", 1),
    ]
    looks = style.looks(groups.by_drafter(runs))
    assert looks["ngram max_n=4"]["color"] == looks["ngram max_n=2"]["color"] == COLOURS["ngram"]
    for way in ("linestyle", "fillstyle"):
        assert looks["ngram max_n=4"][way] != looks["ngram max_n=2"][way]


def test_speedup_against_batch_size(drawn):
    runs = [batched(name, size, at - size / 100) for name, at in (("ngram", 1.5), ("eagle", 2)) for size in (8, 1, 4)]
    (axis,) = drawn(plots.by_batch_size, runs).axes
    found = lines(axis)
    assert list(found) == ["eagle, k=4", "ngram, k=4"]  # the best first
    points, ends = found["eagle, k=4"]
    assert is_near([round(size) for size, _ in points], [1, 4, 8])
    assert is_near([value for _, value in points], [1.99, 1.96, 1.92])
    assert is_near(ends, [(1.89, 2.09), (1.86, 2.06), (1.82, 2.02)])
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "4", "8"]


def test_draft_lengths_have_panels_only_where_a_drafter_has_several(drawn):
    best = [batched("ngram", 1, 1.5), batched("medusa", 1, 1.5), batched("ngram", 4, 1.2), batched("medusa", 4, 1.1)]
    assert len(drawn(plots.by_batch_size, best).axes) == 1
    grid = [batched("none", size, 1, **{"id": f"none-{size}"}) for size in (1, 4)] + GRID
    figure = drawn(plots.by_batch_size, grid)
    assert [axis.get_title() for axis in figure.axes] == ["k=2", "k=4", "k=7"]
    assert [len(lines(axis)) for axis in figure.axes] == [9, 9, 9]
    best = sorted(grid, key=lambda run: -run["metrics"]["speedup"])
    order = list(dict.fromkeys(run["drafter"]["name"] for run in best))
    assert [text.get_text() for text in figure.axes[-1].get_legend().get_texts()] == order


def test_speed_per_user_against_that_of_all(drawn):
    runs = [
        batched("ngram", size, 1.5 - size / 100, **({"metrics.speedup_ci95": None} if size == 8 else {}))
        for size in (1, 4, 8)
    ]
    (axis,) = drawn(plots.throughput, runs).axes
    points, ends = lines(axis)["ngram, k=4"]
    assert is_near(points, [(20 * s, 20 * size * s) for size, s in ((1, 1.49), (4, 1.46), (8, 1.42))])
    assert is_near(ends, [(20 * 1.39, 20 * 1.59), (80 * 1.36, 80 * 1.56)])
    assert is_near(dashed(axis, COLOURS["none"]), [[(20, 20), (20, 80), (20, 160)]])
    assert [(text.get_text(), *text.xy) for text in axis.texts] == [("1", 20, 20), ("4", 20, 80), ("8", 20, 160)]


def test_acceptance_by_position_is_joint_with_intervals_of_the_steps(drawn):
    runs = [stored()["ngram"], made("dspark"), made("none"), failed("mtp")]
    (axis,) = drawn(plots.acceptance_by_position, runs, {"ngram": [0.4, 0.2]}).axes
    found = lines(axis)
    assert list(found) == ["ngram, k=4", "dspark, k=7"]
    for name, run in (("ngram, k=4", runs[0]), ("dspark, k=7", runs[1])):
        joint = run["metrics"]["acceptance_by_position"]["joint"]
        assert is_near([round(i) for i, _ in found[name][0]], range(1, len(joint) + 1))
        assert is_near([share for _, share in found[name][0]], joint)
    assert is_near(found["ngram, k=4"][1], shares.accepted_up_to(runs[0]))
    assert found["dspark, k=7"][1] == []  # its steps are not at hand
    assert is_near(dashed(axis, COLOURS["ngram"]), [[(1, 0.4), (2, 0.2)]])


def test_position_that_was_never_proposed_has_no_point(drawn):
    joint = {"joint": [0.5, None, None, None], "conditional": [0.5, None, None, None]}
    (axis,) = drawn(plots.acceptance_by_position, [made(changes={"metrics.acceptance_by_position": joint})], {}).axes
    assert is_near(lines(axis)["ngram, k=4"][0], [(1, 0.5)])


def test_of_several_draft_lengths_acceptance_is_that_of_the_longest(drawn):
    (axis,) = drawn(plots.acceptance_by_position, SWEEP, {}).axes
    assert list(lines(axis)) == [f"{name}, k=7" for name in FAMILIES[1:9]]


def test_acceptance_of_who_knows_the_reply_is_not_shown(drawn):
    runs = [made("oracle"), made("ngram")]
    assert list(lines(drawn(acceptance, runs).axes[0])) == ["ngram, k=4"]
    assert [axis.get_title() for axis in drawn(plots.accepted_lengths, runs).axes] == ["ngram, k=4"]


def test_accepted_lengths_are_shares_of_passes(drawn):
    runs = [stored()["ngram"], made("medusa"), made("none")]
    figure = drawn(plots.accepted_lengths, runs)
    assert [axis.get_title() for axis in figure.axes] == ["ngram, k=4", "medusa, k=3"]
    for axis, run in zip(figure.axes, runs, strict=False):
        counts = np.array(run["metrics"]["accepted_length_histogram"])
        assert is_near([bar.get_height() for bar in axis.patches], counts / counts.sum())
        assert is_near([bar.get_x() + bar.get_width() / 2 for bar in axis.patches], range(len(counts)))
        assert {to_hex(bar.get_facecolor()).upper() for bar in axis.patches} == {COLOURS[run["drafter"]["name"]]}
    (ends,) = (whiskers(c) for c in figure.axes[0].containers if isinstance(c, ErrorbarContainer))
    assert is_near(ends, shares.accepted(runs[0]))


def test_parts_of_a_round_add_up_to_its_length(drawn):
    runs = [made("eagle"), failed("mtp"), made("ngram", {"model": None})]
    (axis,) = drawn(plots.round_time, runs).axes
    found, model = runs[0]["metrics"], runs[0]["model"]
    length = model["by_k"][-1]["seconds"] / model["plain_seconds"]
    ends = np.cumsum([0, *(share * length for share in model["shares"].values())])
    assert is_near([(start, end) for start, end, _, _ in bars(axis)], np.stack([ends[:-1], ends[1:]], axis=1))
    assert is_near(ends[-1], length)
    assert [colour for *_, colour in bars(axis)] == [COLOURS["eagle"], "#D0D0D0", "#8C8C8C", "#4D4D4D"]
    assert [(text.get_text(), text.xy[1]) for text in axis.texts] == [
        (f"{length:.2f}", 0),
        ("failed", 1),
        ("not profiled", 2),
    ]
    (diamond,) = (c for c in axis.containers if isinstance(c, ErrorbarContainer))
    assert is_near(diamond.lines[0].get_xydata(), [(found["tokens_per_pass"], 0)])
    assert is_near(whiskers(diamond), [found["tokens_per_pass_ci95"]])


def cells(axis):
    """Texts of a table, by column and row."""
    return {text.get_position(): text.get_text() for text in axis.texts}


def test_categories_have_numbers_with_their_intervals(drawn):
    few = made("ngram")["by_category"]
    enough = {
        "code": {"speedup": 1.5, "speedup_ci95": [1.25, 12.34]},
        "translation": {"speedup": None, "speedup_ci95": None},
    }
    runs = [made("ngram"), made("eagle", {"by_category": enough}), failed("mtp")]
    (axis,) = drawn(plots.speedup_by_category, runs).axes
    rows = [label.get_text().replace("\n", " ") for label in axis.get_yticklabels()]
    assert rows == ["all prompts", *(name.replace("_", " ") for name in sorted(few))]
    columns = [label.get_text().replace("\n", " ") for label in axis.get_xticklabels()]
    assert columns == ["ngram k=4", "eagle k=4", "mtp k=4"]
    found, ground = cells(axis), axis.images[0].get_array()
    for row, name in enumerate(sorted(few), start=1):
        assert found[0, row] == f"{few[name]['speedup']:.2f}"
        assert is_near(ground[row, 0], np.log2(few[name]["speedup"]))
    at = rows.index("code")
    assert (found[1, 0], found[1, at]) == ("1.08\n0.96–1.21", "1.50\n1.25–12.3")
    assert found[1, rows.index("translation")] == found[1, rows.index("math")] == "–"
    assert {found[2, row] for row in range(len(rows))} == {"failed"}
    assert "no category" not in words_of(axis.figure)
    assert "no category" in words_of(drawn(plots.speedup_by_category, [made()]))


def test_many_drafters_have_their_categories_in_several_blocks(drawn):
    figure = drawn(plots.speedup_by_category, SWEEP)
    assert [len(axis.get_xticks()) for axis in figure.axes] == [8, 8, 8, 8]


def test_predicted_against_measured(drawn):
    runs = [made("ngram"), made("eagle"), made("mtp", {"model": None}), failed("medusa")]
    (axis,) = drawn(plots.predicted_against_measured, runs).axes
    found = lines(axis)
    assert list(found) == ["ngram", "eagle"]
    for run in runs[:2]:
        points, ends = found[run["drafter"]["name"]]
        assert is_near(points, [(run["model"]["predicted_speedup"], run["metrics"]["speedup"])])
        assert is_near(ends, [run["metrics"]["speedup_ci95"]])
    low, high = axis.get_xlim()
    assert axis.get_ylim() == (low, high)
    assert is_near(
        (1.1 * low, high / 1.1), (runs[1]["metrics"]["speedup_ci95"][0], runs[0]["metrics"]["speedup_ci95"][1])
    )
    assert is_near(dashed(axis, style.REFERENCE["color"]), [[(low, low), (high, high)]])
    band = axis.collections[-1].get_paths()[0].vertices
    assert is_near((band[:, 1] / band[:, 0]).min(), 0.9)
    assert is_near((band[:, 1] / band[:, 0]).max(), 1.1)


def test_free_lunch(laid_out):
    found = json.loads(CURVE.read_text())
    times, ends = laid_out(plots.verify_cost, found).axes
    points = [p for p in found["points"] if (p["batch"], p["cached"]) == (8, found["cached"])]
    (line,) = (line for line in times.get_lines() if line.get_label() == "8")
    assert is_near(line.get_xydata(), [(p["tokens"], 1e3 * p["seconds"]) for p in points])
    even = [(e["k"], e["acceptance"]) for e in found["break_even"] if (e["batch"], e["draft_cost"]) == (8, 0)]
    (line,) = (other for other in ends.get_lines() if other.get_color() == line.get_color())
    assert is_near(line.get_xydata(), even)
    check_layout(times.figure)


def test_scaling(laid_out):
    learned = [
        plots.Learned(300_000, {"temperature 0": 1.6, "temperature 1": 1.25}, [0.5, 0.2]),
        plots.Learned(100_000, {"temperature 0": 1.5, "temperature 1": 1.2}, [0.4, 0.1]),
    ]
    shares, tokens = laid_out(plots.scaling, "mtp", learned).axes
    assert [line.get_xydata().tolist() for line in shares.get_lines()] == [
        [[1e5, 0.4], [3e5, 0.5]],
        [[1e5, 0.1], [3e5, 0.2]],
    ]
    assert [text.get_text() for text in shares.texts] == ["1", "2"]
    assert {line.get_label(): line.get_xydata().tolist() for line in tokens.get_lines()} == {
        "temperature 0": [[1e5, 1.5], [3e5, 1.6]],
        "temperature 1": [[1e5, 1.2], [3e5, 1.25]],
    }
    assert {line.get_color() for axis in (shares, tokens) for line in axis.get_lines()} == {COLOURS["mtp"]}
    check_layout(shares.figure)


# intervals of shares


def write_steps(folder, units):
    """A record whose prompts each have a pass of 2 drafts, both accepted, and of 1 draft, rejected."""
    passes = [{"round": 0, "proposed": 0, "accepted": 0}, {"round": 1, "proposed": 2, "accepted": 2}]
    passes += [{"round": 2, "proposed": 1, "accepted": 0}]
    rows = [{"arm": "method", "unit": unit, **each} for unit in range(units) for each in passes]
    rows += [{**row, "arm": "baseline", "accepted": 0} for row in rows]
    pd.DataFrame(rows).to_parquet(folder / record.STEPS)
    return {"folder": str(folder), "drafter": {"k": 3}}


def test_intervals_of_shares_count_the_method_s_passes_as_the_metrics_do(tmp_path):
    run = write_steps(tmp_path, metrics.MIN_UNITS)
    assert shares.accepted_up_to(run) == [[0.5, 0.5], [1, 1], None]  # of both passes; of the longer; of none
    assert shares.accepted(run) == [[0.5, 0.5], [0, 0], [0.5, 0.5], [0, 0]]


def test_intervals_of_stored_runs_hold_their_shares():
    for run in (stored()["ngram"], stored()["dspark"]):
        joint = run["metrics"]["acceptance_by_position"]["joint"]
        for share, (low, high) in zip(joint, shares.accepted_up_to(run), strict=True):
            assert low <= share <= high


def test_few_prompts_or_no_steps_have_no_intervals_of_shares(tmp_path):
    assert shares.accepted(write_steps(tmp_path, metrics.MIN_UNITS - 1)) == [None] * 4
    (tmp_path / record.STEPS).unlink()
    for run in ({"folder": str(tmp_path), "drafter": {"k": 3}}, {"drafter": {"k": 3}}):
        assert shares.accepted(run) == [None] * 4
        assert shares.accepted_up_to(run) == [None] * 3
    (tmp_path / record.STEPS).write_bytes(b"PAR1, and no more")
    assert shares.accepted({"folder": str(tmp_path), "drafter": {"k": 3}}) == [None] * 4


# files


def test_a_figure_that_the_disk_does_not_take_leaves_the_earlier_one(tmp_path, monkeypatch):
    runs = [made()]
    files = plots.speedup_by_drafter(runs, tmp_path / "speedup")
    earlier = {file: file.read_bytes() for file in files}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match="No space left on device"):
        plots.speedup_by_drafter([made("eagle")], tmp_path / "speedup")
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == earlier


def test_drafters_without_a_colour_of_their_own_are_told_apart():
    names = ("mine", "yours", "eagle", "eagle1")
    looks = style.looks({name: [made("ngram", {"drafter.name": name})] for name in names})
    ways = [(look["color"], look["linestyle"], look["fillstyle"]) for look in looks.values()]
    assert len(set(ways)) == len(names)
    assert looks["mine"]["color"] == looks["yours"]["color"] != looks["eagle"]["color"] == looks["eagle1"]["color"]


def test_numbers_of_settings_depend_neither_on_order_nor_on_speed(gallery):
    few = {"model": None, "by_category": {}}
    runs = [batched("ngram", size, speedup, **few) for size, speedup in ((16, 1.5), (4, 1.9), (8, 1.2))]
    faster = [batched("ngram", size, speedup, **few) for size, speedup in ((8, 1.9), (16, 1.1), (4, 1.3))]
    for given in (runs, faster):
        every = gallery(given)
        for number, size in ((1, 4), (2, 8), (3, 16)):
            assert every[f"speedup-{number}"].get_suptitle().endswith(f"batch {size}")


def test_figures_are_written_as_png_and_pdf_and_the_same_each_time(tmp_path):
    files = plots.speedup_by_drafter([made(), failed()], tmp_path / "new" / "v1.speedup")
    assert files == [tmp_path / "new" / "v1.speedup.png", tmp_path / "new" / "v1.speedup.pdf"]
    first = [file.read_bytes() for file in files]
    assert [content[:4] for content in first] == [b"\x89PNG", b"%PDF"]
    assert made()["id"].encode() in first[0]  # where it is from
    plots.speedup_by_drafter([made(), failed()], tmp_path / "new" / "v1.speedup")
    assert [file.read_bytes() for file in files] == first


@pytest.fixture
def written(monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.write(b"new"))
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda _: None)


def test_files_of_an_earlier_call_that_are_made_no_more_are_removed(written, tmp_path):
    others = {"verify_cost.png", "speedup.svg", "my-speedup.png", "speedup-a.png", "table.md"}
    for name in {*others, "speedup-1.png", "speedup-12.pdf", "draft_length.png", "free_lunch.pdf", "round_time.png"}:
        (tmp_path / name).write_text("old")
    files = plots.draw([made(), failed()], tmp_path)
    assert len(files) == len(set(files)) == 2 * len(KINDS)
    assert {file.name for file in tmp_path.iterdir()} == others | {file.name for file in files}
    assert {file.read_text() for file in files} == {"new"}
    assert {(tmp_path / name).read_text() for name in others} == {"old"}


def script(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MPLBACKEND": "TkAgg"}
    command = [sys.executable, str(ROOT / "scripts" / "make_figures.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)


def test_script_needs_no_display_and_prints_the_paths(tmp_path):
    done = script(stored()["none"]["folder"], "--out", tmp_path, "--verify-cost", CURVE)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    kinds = {"speedup", "round_time", "speedup_by_category", "predicted", "free_lunch"}
    wanted = {f"{kind}.{form}" for kind in kinds for form in ("png", "pdf")}
    assert sorted(printed) == sorted(str(tmp_path / name) for name in wanted)
    assert {file.name for file in tmp_path.iterdir()} == wanted


def test_script_says_what_is_no_curve(tmp_path, monkeypatch):
    said = ["make_figures.py", QUICK, "--out", tmp_path / "out", "--verify-cost", QUICK / "table.md"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in said])
    with pytest.raises(SystemExit, match=r"^make_figures: .*table\.md is no verify-cost curve"):
        runpy.run_path(str(ROOT / "scripts" / "make_figures.py"), run_name="__main__")
    assert not (tmp_path / "out").exists()
