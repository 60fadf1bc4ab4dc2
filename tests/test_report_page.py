"""The report page as its reader has it: in a browser, opened from disk."""

import csv
import math
import time

import pytest
from chromium import Page, executable
from report_runs import HOSTILE, made, several, store

from specbench import results
from specbench.report import page as report

BROWSER = executable()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on the path; on Debian: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    page = Page(BROWSER, tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    store(folder, *several(), made("eagle", 0.021, k=4), made("eagle", 0.022, k=5))
    path = folder / "report.html"
    path.write_text(report.make(results.runs([folder / "runs"]), 6, [folder]).html, encoding="utf-8")
    return path


@pytest.fixture
def page(browser, file):
    browser.prefer("light")
    browser.resize(1280, 900)
    browser.open(file)
    yield browser
    assert browser.problems == []


def drafters(page):
    return page.texts(".runs tbody th")


def test_opens_without_errors_and_asks_for_nothing_but_itself(page, file):
    assert page.requests == [file.as_uri()]
    assert page.texts("h1") == ["Drafting for bytes"]
    assert page.texts("h2") == ["bytes"]
    assert page.evaluate("window.broken === undefined")  # what the hostile prompt would have set
    assert page.evaluate("document.images.length") == 0


def test_says_in_words_what_the_runs_show(page):
    first, *_ = page.texts(".summary dd p")
    assert first.startswith("Highest measured speedup of 5: quick k=4, 1.75 times plain decoding's speed")
    assert page.texts(".about-failed + dd p") == ["broken k=4 failed: ArithmeticError: made of <b>cheese</b>"]


def test_a_hostile_prompt_is_shown_as_it_is(page):
    page.click(".asked summary")
    assert page.texts(".prompt") == [HOSTILE]


# the table


def test_is_sorted_by_speedup_at_first_and_by_a_click_on_any_column(page):
    order = ["quick", "alike", "eagle", "eagle", "none", "slow", "broken"]
    assert drafters(page) == order
    page.click(".runs thead button", 7)  # speedup, the other way around
    assert drafters(page) == [*order[-2::-1], "broken"]  # what failed stays last
    page.click(".runs thead button", 0)
    assert drafters(page) == ["alike", "eagle", "eagle", "none", "quick", "slow", "broken"]
    page.click(".runs thead button", 1)  # k, the largest first
    assert page.texts(".runs tbody td:nth-child(2)")[:2] == ["5", "4"]
    assert page.evaluate("document.querySelectorAll('.runs th[aria-sort=descending]').length") == 1


def test_sorts_by_keyboard(page):
    page.focus(".runs thead button")
    page.press("Enter")
    assert drafters(page) == ["alike", "eagle", "eagle", "none", "quick", "slow", "broken"]


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ("eagle", ["eagle", "eagle"]),
        ("k=5", ["eagle"]),
        ("EAGLE k=4", ["eagle"]),
        ("-eagle -broken", ["quick", "alike", "none", "slow"]),
        ("unsteady", ["slow"]),
        ("cheese", ["broken"]),
        ("nothing of the kind", []),
    ],
)
def test_filter_chooses_rows_and_what_figures_show(page, asked, left):
    page.focus(".filter input")
    page.write(asked)
    assert drafters(page) == left
    assert page.texts(".filter .note") == [f"{len(left)} of 7 runs"]
    speedups = page.evaluate("document.querySelectorAll('.figures figure')[0].querySelectorAll('circle').length")
    assert speedups == len([name for name in left if name != "broken"])


def test_a_failed_run_is_a_row_with_its_reason(page):
    assert "failed: ArithmeticError: made of <b>cheese</b>" in page.texts(".runs tr.failed")[0]


def test_a_flag_says_what_it_is_about(page):
    page.point(".flag")
    assert page.texts(".hint") == ["unsteady-clock\nunsteady-clock <i>by hand</i>"]


# the figures


def test_every_figure_is_drawn_with_its_data(page):
    titles = page.texts("figure h4")
    assert titles == [
        "Speedup over plain decoding",
        "Tokens per verify pass",
        "Speedup against draft length",
        "Tokens per verify pass against draft length",
        "Acceptance by position",
        "Accepted length",
        "Where a round’s time goes",
        "Predicted against measured",
        "Speedup by kind of prompt",
    ]
    assert_drawn(page)


def assert_drawn(page, part="body"):
    charts = f"[...document.querySelectorAll('{part} figure .chart')]"
    marks = page.evaluate(f"{charts}.map((chart) => chart.querySelectorAll('circle, rect, td').length)")
    assert min(marks) >= 3
    assert not page.evaluate(
        "/NaN|Infinity|undefined/.test([...document.querySelectorAll('svg')].map((s) => s.outerHTML).join())"
    )


def test_batch_sizes_have_a_section_that_shows_them_together(page, tmp_path):
    store(
        tmp_path,
        *(at_batch(size, made(name, 0.01 * size, k=k)) for size in (1, 4) for name, k in (("eagle", 4), ("none", 0))),
    )
    file = tmp_path / "report.html"
    file.write_text(report.make(results.runs([tmp_path / "runs"]), 0).html, encoding="utf-8")
    page.open(file)
    assert page.texts("h2") == ["bytes", "bytes", "bytes, across batch sizes"]
    assert page.texts("nav a")[-1].startswith("bytes, across batch sizes · float32 on cpu")
    assert page.texts("#batches-1 h4") == ["Speedup against batch size", "Speed per user against that of all"]
    assert page.texts("#batches-1 .key") == ["eagle k=4", "none", "plain decoding", "eagle k=4", "none"]
    assert page.evaluate("[...document.querySelectorAll('#batches-1 circle.dot')].length") == 4 + 6 + 5
    assert_drawn(page, "#batches-1")
    page.point("#batches-1 circle.dot")
    assert page.texts(".hint")[0].startswith("eagle k=4, batch 1\nbatch size: 1\nspeedup over plain decoding: ")


def at_batch(size, run):
    run_json, *tables = run
    run_json["config"]["batch_size"] = size
    return {**run_json, "id": f"{run_json['id']}-{size}"}, *tables


def test_a_speedup_stands_where_its_logarithm_is(page):
    place, marks = page.evaluate(
        "(() => { const f = document.querySelector('figure'), at = (e, name) => Number(e.getAttribute(name));"
        "const ticks = [...f.querySelectorAll('.tick')].map((t) => [Number(t.textContent), at(t, 'x')]);"
        "return [at(f.querySelector('circle'), 'cx'), ticks]; })()"
    )
    (low, left), (high, right) = marks[0], marks[-1]
    assert high > low
    assert abs(place - left - (right - left) * math.log(1.75 / low) / math.log(high / low)) < 2


def test_data_of_a_figure_are_saved_as_csv(page, tmp_path):
    page.keep_downloads(tmp_path)
    page.click("figure .save")
    saved = tmp_path / "speedup.csv"
    until = time.monotonic() + 10
    while not saved.exists() and time.monotonic() < until:
        time.sleep(0.05)
    rows = list(csv.DictReader(saved.open(encoding="utf-8")))
    assert [row["drafter"] for row in rows] == ["quick", "alike", "eagle", "eagle", "none", "slow"]
    assert float(rows[0]["low"]) < float(rows[0]["speedup"]) < float(rows[0]["high"])


def test_data_of_a_figure_can_be_read_on_the_page(page):
    page.click("figure .data summary")
    assert page.texts("figure .data th")[:4] == ["run", "drafter", "k", "speedup"]
    assert len(page.texts("figure .data tbody tr")) == 6


def test_a_mark_says_its_numbers(page):
    page.point("figure .mark")
    (said,) = page.texts(".hint")
    assert said.startswith("quick k=4\nspeedup over plain decoding: 1.75×\n95 % interval 1.")


# replies


def test_each_token_has_the_colour_of_its_origin(page):
    found = page.evaluate(
        "[...document.querySelectorAll('.replies .text')[0].children].map((t) => [t.innerText, t.classList[1]])"
    )
    assert found == [
        ["a", "prefill"],
        ["b", "accepted"],
        [" ", "accepted"],
        [r"\xc3", "correction"],
        [r"\xa9", "accepted"],
        [" ", "bonus"],
        ["c", "plain"],
        ["d", "accepted"],
    ]
    assert page.texts(".replies .keys .count") == ["4", "1", "1", "1", "1"]
    colours = page.evaluate(
        "[...document.querySelectorAll('.replies .sample')].map((e) => getComputedStyle(e).backgroundColor)"
    )
    assert len(set(colours)) == 4  # the target's own tokens where there was no draft share theirs


def test_a_token_says_its_round_and_place(page):
    page.point(".replies .text .token", 3)
    (said,) = page.texts(".hint")
    assert said.split("\n")[1:3] == [
        "the target's own token, in place of a draft that was not accepted",
        "round 1, place 3 of the pass",
    ]
    page.focus(".replies .text")
    page.press("Home")
    page.press("ArrowRight")
    assert "round 1, draft 1 of 4" in page.texts(".hint")[0]


def test_another_run_can_be_chosen(page):
    page.evaluate(
        "(() => { const s = document.querySelector('.choices select');"
        "s.value = [...s.options].find((o) => o.text === 'none k=0').value; s.dispatchEvent(new Event('change')); })()"
    )
    assert page.texts(".replies .keys .count") == ["0", "0", "0", "7", "1"]


# the player


def counters(page):
    return [int(text) if text.isdigit() else text for text in page.texts(".counter dd")]


# of each step: target passes, passes of plain decoding, tokens, tokens per pass, rounds that drafted; and the places
STEPS = [
    ((0, 0, 1, "–", 0), []),
    ((0, 0, 1, "–", 1), ["b", " ", "x", "y"]),  # draft
    ((1, 0, 1, "–", 1), ["b?", " ?", "x?", "y?", "?"]),  # verify
    ((1, 3, 4, "3.00", 1), ["bkept", " kept", r"x\xc3", "ydropped"]),  # commit
    ((1, 3, 4, "3.00", 2), [r"\xa9"]),
    ((2, 3, 4, "3.00", 2), [r"\xa9?", "?"]),
    ((2, 5, 6, "2.50", 2), [r"\xa9kept", " "]),
    ((3, 5, 6, "2.50", 2), ["?"]),  # nothing was drafted
    ((3, 6, 7, "2.00", 2), ["c"]),
    ((3, 6, 7, "2.00", 3), ["d", "z"]),
    ((4, 6, 7, "2.00", 3), ["d?", "z?", "?"]),
    ((4, 7, 8, "1.75", 3), ["dkept", "zdropped"]),  # the text ends within the draft
]


def slots(page):
    return page.evaluate("[...document.querySelectorAll('.slot')].slice(1).map((s) => s.textContent)")


def test_player_steps_through_the_rounds_with_its_counts(page):
    page.focus(".player")
    for number, (counts, places) in enumerate(STEPS):
        assert (number, counters(page), slots(page)) == (number, list(counts), places)
        page.press("ArrowRight")
    assert counters(page) == list(STEPS[-1][0])  # there is nothing after the end
    for counts, _ in reversed(STEPS[:-1]):
        page.press("ArrowLeft")
        assert counters(page) == list(counts)


def test_player_shows_the_text_so_far_and_what_became_of_the_draft(page):
    page.focus(".player")
    page.press("ArrowRight", shift=True)  # all of the first round
    assert counters(page) == list(STEPS[3][0])
    assert page.texts(".caption") == [
        "Round 1 of 4, commit. 2 of 4 accepted. Draft 3 is not: the target's own token takes its place. "
        "1 after it is dropped."
    ]
    assert page.evaluate("document.querySelector('.sofar').textContent") == r"ab \xc3"
    assert "line-through" in page.evaluate(
        "getComputedStyle(document.querySelector('.slot .wrong')).textDecorationLine"
    )
    page.press("End")
    assert page.texts(".caption") == [
        "Round 4 of 4, commit. The text ends within the draft: 1 of 2 kept. The reply ends by the length limit."
    ]
    page.press("Home")
    assert page.texts(".caption")[0].startswith("Prefill")


def test_player_has_buttons_and_a_slider_for_all_of_it(page):
    page.click("[aria-label^='Next step']")
    assert counters(page) == list(STEPS[1][0])
    page.click("[aria-label^='Next round']")
    assert counters(page) == list(STEPS[6][0])
    page.click("[aria-label^='Previous round']")
    assert counters(page) == list(STEPS[3][0])
    page.click("[aria-label^='Previous step']")
    assert counters(page) == list(STEPS[2][0])
    page.evaluate(
        "(() => { const s = document.querySelector('[type=range]'); s.value = 8;"
        " s.dispatchEvent(new Event('input')); })()"
    )
    assert counters(page) == list(STEPS[8][0])


def test_player_plays_to_the_end_and_stops(page):
    page.evaluate("(() => { const s = document.querySelector('[aria-label=Speed]'); s.value = 200; })()")
    page.click(".play")
    assert page.texts(".play") == ["Pause"]
    until = time.monotonic() + 20
    while page.texts(".play") == ["Pause"] and time.monotonic() < until:
        time.sleep(0.1)
    assert page.texts(".play") == ["Play"]
    assert counters(page) == list(STEPS[-1][0])


def test_a_click_on_a_token_shows_its_round(page):
    page.click(".replies .text .token", 6)
    assert page.texts(".caption")[0].startswith("Round 3 of 4")


# for everyone


@pytest.mark.parametrize("width", [320, 390, 700, 1280])
def test_nothing_stands_out_at_the_side(page, width):
    page.resize(width, 844)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.settle()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = page.evaluate(
        "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1"
        " && !e.closest('.scroll') && !e.closest('svg') && e.checkVisibility()).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_is_dark_for_those_who_prefer_it_and_by_a_button(page):
    light = background(page)
    page.prefer("dark")
    dark = background(page)
    assert sum(map(int, light[4:-1].split(","))) > 600 > 150 > sum(map(int, dark[4:-1].split(",")))
    page.click("header button")
    assert (page.texts("header button"), background(page)) == (["Theme: light"], light)
    page.prefer("light")
    page.click("header button")
    assert (page.texts("header button"), background(page)) == (["Theme: dark"], dark)
    page.click("header button")
    assert (page.texts("header button"), background(page)) == (["Theme: auto"], light)


CONTRAST = """
(() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((c) => c / 255);
  };
  const light = (rgb) => rgb.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const poor = [];
  for (const e of document.querySelectorAll("main *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest("svg, option")) continue;
    const behind = [];
    for (let at = e; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
    const paper = over(behind), ink = over([...behind, getComputedStyle(e).color]);
    const [a, b] = [light(paper), light(ink)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([e.outerHTML.slice(0, 80), (a + 0.05) / (b + 0.05)]);
  }
  return poor;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(page, scheme):
    page.prefer(scheme)
    page.focus(".player")
    page.press("ArrowRight", shift=True)
    assert page.evaluate(CONTRAST) == []


def test_every_control_and_picture_has_a_name(page):
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, select, [role=img], [role=group], [role=region]')]"
        ".filter((e) => !e.getAttribute('aria-label') && !e.labels?.length)"
        ".filter((e) => e.tagName !== 'BUTTON' || !e.innerText.trim()).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []
