import json
import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from report_runs import (
    BLANK,
    E1,
    E2,
    HOSTILE,
    ROUNDS,
    TOKENIZER,
    A,
    B,
    C,
    D,
    X,
    failed,
    ids,
    made,
    several,
    steps,
    store,
)

from specbench import compare, families, record, results, settings
from specbench.report import __main__ as command
from specbench.report import figures, origin, page, pieces, replies, rows, summary

# in words


def run(name, speedup=1.5, limits=(1.2, 1.9), k=4, **more):
    run_json = made(name, k=k)[0]
    run_json["metrics"] |= {"speedup": speedup, "speedup_ci95": limits and list(limits)}
    for key, value in more.items():
        (run_json["metrics"] if key in run_json["metrics"] else run_json)[key] = value
    return run_json


def untold(a, b):
    return None


def said(runs, versus=untold, about=None):
    return [s.text for s in summary.sentences(runs, versus) if about in (None, s.about)]


def against(**found):
    return lambda a, b: {"speedup": found[b["drafter"]["name"]][0], "speedup_ci95": found[b["drafter"]["name"]][1]}


def test_the_fastest_is_named_with_its_interval():
    lines = said([run("eagle", 1.1, (1.0, 1.2)), run("ngram")], about="speed")
    assert lines[0] == (
        "Highest measured speedup of 2: ngram k=4, 1.50 times plain decoding's speed (95 % interval 1.20–1.90). "
        "It is faster than plain decoding on these prompts. As the highest of several it is more likely over- than "
        "underestimated."
    )


@pytest.mark.parametrize(
    ("speedup", "limits", "verdict"),
    [
        (1.2, (1.01, 1.4), "It is faster than plain decoding on these prompts."),
        (1.2, (1.0, 1.4), "The interval includes 1: it is not shown to be faster than plain decoding."),
        (1.2, (0.97, 1.4), "The interval includes 1: it is not shown to be faster than plain decoding."),
        (0.8, (0.7, 0.9), "It is slower than plain decoding on these prompts, and no other measured higher."),
    ],
)
def test_what_is_claimed_of_the_fastest_is_what_its_interval_says(speedup, limits, verdict):
    (line,) = said([run("ngram", speedup, limits)], about="speed")
    assert line.endswith(verdict)
    assert line.startswith("Highest measured speedup: ngram k=4")


def test_nothing_is_shown_without_an_interval():
    (line,) = said([run("ngram", 3.0, None, units=4)], about="speed")
    assert "There is no interval (4 conversations or groups of them; 8 are needed)" in line
    assert "not shown to be faster" in line


def test_the_fastest_is_compared_pair_by_pair_with_each_of_the_others():
    runs = [run("a", 1.5), run("b", 1.4), run("c", 1.3), run("d", 1.2)]
    found = against(b=(1.07, [0.99, 1.15]), c=(1.15, [1.05, 1.3]), d=(1.25, [1.1, 1.4]))
    lines = said(runs, found, "speed")
    assert "Paired by prompt, a k=4 is faster than c k=4 (1.15 times its speed, 1.05–1.30) and d k=4" in lines[1]
    assert (
        lines[2]
        == "Paired by prompt, a k=4 cannot be told apart in speed from b k=4 (1.07 times its speed, 0.99–1.15)."
    )
    assert lines[-1] == "Each interval is at 95 % by itself, not for all comparisons together."


def test_overlapping_intervals_alone_claim_no_order():
    lines = said([run("a", 1.5, (1.2, 1.9)), run("b", 1.4, (1.1, 1.8))], untold, "speed")
    assert "a k=4 cannot be compared with b k=4, as there is no interval." in lines
    assert not any("faster than b" in line for line in lines)


def test_of_a_drafter_with_several_lengths_the_fastest_is_compared():
    runs = [run("a", 1.5), run("b", 1.3, k=5), run("b", 1.4, k=4), run("a", 1.2, k=5)]
    lines = said(runs, against(b=(1.07, [1.01, 1.15])), "speed")
    assert lines[0].startswith("Highest measured speedup of 4: a k=4")
    assert lines[1:3] == [
        "Paired by prompt, a k=4 is faster than b k=4 (1.07 times its speed, 1.01–1.15).",
        "Faster than plain decoding, their intervals being above 1: a k=4 and b k=4.",
    ]
    assert lines[3].endswith("Of each drafter the fastest draft length is compared.")


def test_all_are_sorted_by_what_their_intervals_say_of_plain_decoding():
    runs = [run("a", 1.5), run("b", 1.1, (0.9, 1.2)), run("c", 0.8, (0.7, 0.9)), run("d", 0.9, None)]
    lines = said(runs, about="speed")
    assert "Faster than plain decoding, their intervals being above 1: a k=4." in lines
    assert "Not told apart from plain decoding, their intervals including 1: b k=4." in lines
    assert "Slower than plain decoding, their intervals being below 1: c k=4." in lines
    assert "Without an interval, so that nothing is shown: d k=4." in lines


def test_neither_a_bound_nor_plain_decoding_nor_changed_text_can_be_the_fastest():
    changed = {"verdict": "mismatch", "prompts": 9, "equal": 7, "near_ties": 0, "mismatches": 2}
    runs = [
        run("told", 5.0, (4.0, 6.0), needs_reference=True),
        run("none", 4.0, (0.9, 4.1), k=0),
        run("liar", 3.0, (2.0, 4.0), lossless=changed),
        run("ngram", 1.5),
        failed(),
    ]
    assert [r["drafter"]["name"] for r in summary.contenders(runs)] == ["ngram"]
    lines = said(runs)
    assert lines[0].startswith("Highest measured speedup: ngram k=4")
    assert "Told the reply beforehand, and so no drafter but a bound: told k=4 at 5.00 (4.00–6.00)." in lines
    assert "Plain decoding measured against itself came to 4.00 (0.90–4.10), where 1 is right." in lines
    assert (
        "Changed the text, so that the speedup is not a lossless method's and does not count above: "
        "liar k=4 (MISMATCH 2/9)." in lines
    )
    assert lines[-1] == "broken k=4 failed: ArithmeticError: made of <b>cheese</b>"


def test_noise_that_its_own_interval_does_not_cover_is_told():
    lines = said([run("none", 0.9, (0.85, 0.95), k=0)])
    assert any("its interval leaves out 1, so that the others may be too narrow" in line for line in lines)


def test_nothing_that_counts_is_said_so():
    assert said([failed()])[0] == "No drafter of this setting has a speedup that counts."


def test_texts_that_are_all_equal_are_told_in_one_sentence():
    assert said([run("a"), run("b")], about="text") == [
        "Every run gave plain decoding's text, token for token, to all 9 prompts."
    ]


@pytest.mark.parametrize(
    ("lossless", "line"),
    [
        (
            {"verdict": "near-tie", "prompts": 9, "equal": 8, "near_ties": 1, "mismatches": 0},
            "Plain decoding's text, but for places where the target is undecided within its precision: b k=4 "
            "(near-tie 1/9).",
        ),
        (
            {"verdict": "law", "prompts": 9, "equal": 0, "p_value": 0.4, "ruled_out": 0},
            "Drafts were sampled, and no deviation from the target's law was found: b k=4 (by law, p=0.4).",
        ),
        (
            {"verdict": "untested", "prompts": 9, "equal": 0, "p_value": None, "ruled_out": 0},
            "Drafts were sampled, of too few tokens to test whether they have the target's law: b k=4 (untested).",
        ),
    ],
)
def test_each_verdict_is_told_with_whom_it_is_about(lossless, line):
    lines = said([run("a"), run("b", lossless=lossless)], about="text")
    assert lines == [line, "Plain decoding's text, token for token: a k=4 (equal 9/9)."]


def test_many_runs_whose_text_is_as_it_should_be_are_counted():
    tied = {"verdict": "near-tie", "prompts": 9, "equal": 8, "near_ties": 1}
    runs = [run("a"), *(run(f"b{number}", lossless=tied) for number in range(summary.MANY))]
    assert "b0 k=4 (near-tie 1/9)" in said(runs, about="text")[0]
    lines = said([*runs, run("c", lossless=tied)], about="text")
    assert lines == [
        "Plain decoding's text, but for places where the target is undecided within its precision: "
        "13 runs, by the table.",
        "Plain decoding's text, token for token: a k=4 (equal 9/9).",
    ]


def test_doubts_are_named_with_whom_they_are_about():
    both = [{"flag": "busy-machine", "message": "others"}, {"flag": "busy-machine", "message": "more"}]
    odd = {"flag": "unpredicted", "message": "off"}
    lines = said([run("a", flags=[*both, odd]), run("b", flags=both, stateful_drafter=True)], about="doubt")
    assert lines == [
        "To be doubted: busy-machine; unpredicted (a k=4).",
        "Numbers that depend on the order of the prompts, as earlier ones teach: b k=4.",
    ]


def test_two_runs_of_one_name_are_told_apart_by_their_ids():
    twins = [made("ngram")[0], made("ngram")[0] | {"id": "other"}]
    assert list(summary.names(twins).values()) == [f"ngram k=4 ({twins[0]['id']})", "ngram k=4 (other)"]


# token by token


def raw(rounds=ROUNDS):
    table = pd.DataFrame(steps(rounds, "method", 0.02, 0.0))
    return table[table["uid"] == "c0/1"]


def test_each_token_of_a_reply_has_its_origin():
    found = replies.rounds(raw())
    assert [(r["drafted"], r["accepted"], r["own"], r["kind"]) for r in found] == [
        ([], 0, A, "prefill"),
        ([B, BLANK, X, ids("y")[0]], 2, E1, "correction"),
        ([E2], 1, BLANK, "bonus"),
        ([], 0, C, "plain"),
        ([D, ids("z")[0]], 1, None, None),  # the reply ends within the accepted draft
    ]


def test_rounds_are_counted_as_they_go():
    found = replies.rounds(raw())
    assert [r["tokens"] for r in found] == [1, 4, 6, 7, 8]
    assert [r["drafts"] for r in found] == [0, 1, 2, 2, 3]


def test_rounds_are_in_order_whatever_the_order_of_the_table():
    assert replies.rounds(raw().iloc[::-1]) == replies.rounds(raw())


def test_what_is_kept_and_what_is_added_are_the_reply(several_stored):
    shown = replies.of_group(several_stored, 9)
    for by_prompt in shown["replies"].values():
        for reply in by_prompt.values():
            tokens = [t for r in reply["rounds"] for t in [*r["drafted"][: r["accepted"]], r["own"]] if t is not None]
            assert tokens == ids("ab é cd")


def test_of_a_prompt_that_was_repeated_the_first_repeat_is_shown(tmp_path):
    run_json, table, *rest = made("ngram")
    again = table.assign(repeat=1, batch=table["batch"] + 9)
    store(tmp_path, (run_json, pd.concat([table, again], ignore_index=True), *rest))
    (by_prompt,) = replies.of_group(results.runs([tmp_path / "runs"]), 1)["replies"].values()
    assert len(by_prompt["c0/1"]["rounds"]) == len(ROUNDS)


@pytest.mark.parametrize("count", [0, 1, 3, 5, 99])
def test_prompts_are_chosen_evenly_over_categories_and_stay_in_order(count):
    table = pd.DataFrame({"category": ["a"] * 8 + ["b"] * 3 + ["c"]})
    some = replies.chosen(table, count)
    assert len(some) == min(count, 12)
    assert list(some.index) == sorted(some.index)
    by_category = some["category"].value_counts().to_dict()
    assert by_category == {0: {}, 1: {"a": 1}, 3: {"a": 1, "b": 1, "c": 1}, 5: {"a": 2, "b": 2, "c": 1}}.get(
        count, {"a": 8, "b": 3, "c": 1}
    )


def test_a_long_prompt_is_shown_in_part(tmp_path):
    run_json, table, prompts, timed = made("ngram")
    prompts["prompt"] = "long " * 1000
    store(tmp_path, (run_json, table, prompts, timed))
    shown = replies.of_group(results.runs([tmp_path / "runs"]), 1)
    assert len(shown["prompts"][0]["text"]) == replies.LONGEST_PROMPT + 1


# the words of tokens


def test_pieces_are_the_text_that_they_stand_for():
    found = pieces.pieces(TOKENIZER.backend_tokenizer, range(len(TOKENIZER)))
    assert [found[i] for i in (A, B, BLANK, C)] == ["a", "b", " ", "c"]
    assert (found[E1], found[E2]) == (r"\xc3", r"\xa9")  # halves of an é
    assert found[ids("\n")[0]] == "\n"
    assert found[TOKENIZER.eos_token_id] == "</s>"
    assert not any("\ufffd" in piece or not piece for piece in found.values())


def test_a_token_that_the_tokenizer_does_not_know_is_a_number():
    assert pieces.pieces(TOKENIZER.backend_tokenizer, [100_000]) == {100_000: "⟨100000⟩"}


def test_sentencepiece_words_keep_their_blanks_and_bytes_their_value():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"▁a": 0, "▁the": 1, "the": 2, "<0xE2>": 3, "a": 4, "▁": 5}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[("▁", "a")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert pieces.pieces(tokenizer, range(4)) == {0: " a", 1: " the", 2: "the", 3: r"\xe2"}


def test_only_the_very_tokenizer_of_the_run_is_used(tmp_path):
    given = store(tmp_path, made("ngram"))
    (run_json,) = results.runs([tmp_path / "runs"])
    assert pieces.find(run_json, []) is None
    assert pieces.find(run_json, [given]) is not None
    assert pieces.find(run_json, [tmp_path]) is not None  # a folder that holds it
    run_json["config"]["target"] = {"path": str(tmp_path)}
    assert pieces.find(run_json, []) is not None
    given.write_text(given.read_text() + " ")
    assert pieces.find(run_json, [given]) is None


def test_the_packaged_target_keeps_its_tokenizer_where_it_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    given = store(tmp_path, made("ngram"))
    (run_json,) = results.runs([tmp_path / "runs"])
    run_json["config"]["target"] = {"name": "wheel", "sha256": "0123456789abcdef"}
    folder = tmp_path / "cache" / "targets" / "wheel-0123456789ab"
    folder.mkdir(parents=True)
    given.rename(folder / "tokenizer.json")
    assert pieces.find(run_json, []) is not None


# tables and figures


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    store(folder, *several())
    return folder


@pytest.fixture
def several_stored(stored):
    return results.runs([stored / "runs"])


def test_a_row_has_a_cell_for_each_column_up_to_the_flags(several_stored):
    table = rows.of_group(several_stored)
    for row in table["rows"]:
        assert len(row["cells"]) == (3 if row["error"] else len(table["columns"]) - 1)
    assert {len(row) for row in table["data"]["rows"]} == {len(table["data"]["columns"])}


def test_the_data_of_the_table_are_the_metrics_in_full():
    run_json = made("ngram", flags=["few-rounds", "few-rounds"])[0]
    table = rows.of_group([run_json])["data"]
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    metrics = run_json["metrics"]
    assert row["speedup"] == metrics["speedup"]
    assert [row["speedup_low"], row["speedup_high"]] == metrics["speedup_ci95"]
    assert row["predicted_speedup"] == run_json["model"]["predicted_speedup"]
    assert (row["flags"], row["lossless"], row["error"]) == ("few-rounds", "equal", None)


def test_a_failed_run_is_a_row_with_its_reason():
    table = rows.of_group([failed()])
    row = dict(zip(table["data"]["columns"], table["data"]["rows"][0], strict=True))
    assert table["rows"][0]["error"] == "ArithmeticError: made of <b>cheese</b>"
    assert (row["drafter"], row["k"], row["lossless"], row["error"]) == (
        "broken",
        4,
        "failed",
        "ArithmeticError: made of <b>cheese</b>",
    )


def by_name(runs):
    return {figure["name"]: figure for figure in figures.of_group(runs)}


def test_figures_have_a_value_for_each_column(several_stored):
    found = by_name(several_stored)
    names = {"speedup", "tokens-per-pass", "acceptance", "accepted-lengths", "time", "prediction", "categories"}
    assert set(found) == names
    for figure in found.values():
        assert {len(row) for row in figure["rows"]} == {len(figure["columns"])}
        assert "broken" not in [row[1] for row in figure["rows"]]


def test_figures_against_k_are_of_drafters_with_several():
    runs = [made("eagle", k=4)[0], made("eagle", k=5)[0] | {"id": "five"}, made("ngram")[0]]
    rows_by_k = by_name(runs)["speedup-by-k"]["rows"]
    assert [(row[1], row[2]) for row in rows_by_k] == [("eagle", 4), ("eagle", 5)]
    assert {row[0] for row in by_name(runs)["acceptance"]["rows"]} == {"five", runs[2]["id"]}  # the longest drafts


def test_drafters_of_other_options_are_other_lines():
    runs = [made("eagle", k=k)[0] | {"id": f"{checkpoint}{k}"} for checkpoint, k in (("x", 4), ("y", 4), ("x", 5))]
    for run in runs:
        run["config"] = run["config"] | {"drafter": {"checkpoint": run["id"][0]}}
    rows_by_k = by_name(runs)["speedup-by-k"]["rows"]
    assert [(row[1], row[2]) for row in rows_by_k] == [("eagle checkpoint=x", 4), ("eagle checkpoint=x", 5)]
    apart = by_name([runs[1], runs[2]])  # neither was run at two lengths
    assert "speedup-by-k" not in apart
    assert {row[0] for row in apart["acceptance"]["rows"]} == {"y4", "x5"}


def test_acceptance_is_that_of_the_record(several_stored):
    quick = next(r for r in several_stored if r["drafter"]["name"] == "quick")
    rows_of = [row for row in by_name(several_stored)["acceptance"]["rows"] if row[0] == quick["id"]]
    assert [row[4] for row in rows_of] == quick["metrics"]["acceptance_by_position"]["joint"]
    assert [row[3] for row in rows_of] == [1, 2, 3, 4]


def test_accepted_lengths_are_shares_of_all_rounds(several_stored):
    found = [row for row in by_name(several_stored)["accepted-lengths"]["rows"] if row[1] == "quick"]
    # of the rounds 1 to 4: two drafts kept, one, none and one
    assert [row[3:] for row in found] == [[0, 0.25], [1, 0.5], [2, 0.25], [3, 0.0], [4, 0.0]]
    assert "none" not in [row[1] for row in by_name(several_stored)["accepted-lengths"]["rows"]]


def at_batch(size, name, **more):
    found = made(name, **more)[0]
    return found | {"id": f"{name}-{size}", "config": found["config"] | {"batch_size": size}}


def test_figures_against_batch_size_are_of_drafters_with_several():
    one, four, alone = at_batch(1, "eagle"), at_batch(4, "eagle", seconds=0.04), at_batch(1, "ngram", seconds=0.03)
    assert figures.of_batch_sizes([one, alone, failed()]) == []
    speedups, throughput = figures.of_batch_sizes([four, alone, one, failed()])
    assert [(row[1], row[3], row[4]) for row in speedups["rows"]] == [
        (run["drafter"]["name"], run["config"]["batch_size"], run["metrics"]["speedup"]) for run in (one, four, alone)
    ]
    plain, own = throughput["rows"][:2], {row[0]: row[4:] for row in throughput["rows"]}
    assert [row[:4] for row in plain] == [
        [f"plain decoding, batch {size}", "plain decoding", 0, size] for size in (1, 4)
    ]
    found = four["metrics"]
    # 20 ms a round of plain decoding, 40 of the other, which leaves 6 tokens in 4 rounds
    assert own["plain decoding, batch 4"][0] == pytest.approx(1 / found["baseline_round_seconds"])
    assert own["eagle-4"][:2] == pytest.approx(
        [found["tokens_per_pass"] / found["round_seconds"], found["decode_tokens_per_s"]]
    )
    assert own["eagle-4"][2] == pytest.approx(found["speedup_ci95"][0] * found["baseline_decode_tokens_per_s"])


def test_without_data_there_is_no_figure():
    assert figures.of_group([failed()]) == []
    bare = made("ngram")[0] | {"model": None, "by_category": {}}
    assert set(by_name([bare])) == {"speedup", "tokens-per-pass", "acceptance", "accepted-lengths"}


def test_categories_of_few_conversations_say_so():
    assert "of at most 3 conversations each, too few for intervals" in by_name([made("ngram")[0]])["categories"]["note"]


# where they are from


def test_settings_of_one_title_are_told_apart_by_what_it_does_not_say():
    one, other, third = (made(name)[0] for name in "abc")
    other["config"]["seed"] = 3
    third["config"]["batch_size"] = 4
    told = [settings.title(group) for group in settings.groups([one, other, third])]
    assert [words[6:] for words in told] == [("seed 0",), ("seed 3",), ()]


def test_origin_names_machine_code_command_and_hashes():
    told = dict(origin.of_group([made("ngram")[0], made("eagle")[0]]))
    assert told["machine"] == "A Processor, 2 threads"
    assert told["commit"] == "0123456789abcdef"
    assert told["command"] == "python -m specbench drafter=eagle"  # each command has a line
    assert told["data set"] == f"nine {'d' * 64}"
    assert told["measured"] == "2026-01-02"


# the page


class Scripts(HTMLParser):
    """What a browser would take for elements, and the data."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.data, self._inside = [], "", False
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._inside = dict(attributes).get("id") == "data"

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, text):
        self.data += text if self._inside else ""


@pytest.fixture(scope="module")
def html(stored):
    return page.make(results.runs([stored / "runs"]), 12, [stored]).html


@pytest.fixture(scope="module")
def data(html):
    return json.loads(Scripts(html).data)


def test_no_text_of_a_record_becomes_an_element(html, data):
    found = Scripts(html)
    assert found.tags.count("script") == 2
    assert "img" not in found.tags
    assert HOSTILE in [prompt["text"] for prompt in data["settings"][0]["replies"]["prompts"]]  # as it was
    assert HOSTILE not in html


def test_the_title_is_escaped(stored):
    runs = results.runs([stored / "runs"])
    for each in runs:
        each["target"]["name"] = "<img src=x>"
    assert "img" not in Scripts(page.make(runs, 0).html).tags


def test_the_page_loads_nothing(html):
    assert not re.search(r"\b(src|href)=[\"']?(https?:)?//|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", html)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_policy_allows_the_very_scripts_of_the_page(html):
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        body = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)[-1]
        assert f"{directive} '{page._hash(body)}'" in html


def test_a_placeholder_in_a_record_is_left_as_it_is(stored):
    runs = results.runs([stored / "runs"])
    for each in runs:
        each["target"]["name"] = "$style ${script} $$"
    html = page.make(runs, 0).html
    assert json.loads(Scripts(html).data)["settings"][0]["target"] == "$style ${script} $$"


def test_every_run_is_on_the_page_in_the_colour_of_its_family(stored, data):
    runs = results.runs([stored / "runs"])
    (setting,) = data["settings"]
    assert {(run["id"], families.colour(run)) for run in runs} == {
        (id_, run["colour"]) for id_, run in setting["runs"].items()
    }
    assert len(setting["table"]["rows"]) == len(runs)


def test_the_fastest_is_compared_by_the_steps_of_both(stored, data):
    runs = {run["drafter"]["name"]: run for run in results.runs([stored / "runs"])}
    steps_of = [pd.read_parquet(f"{runs[name]['folder']}/{record.STEPS}") for name in ("quick", "slow")]
    found = compare.compare(*steps_of)
    low, high = found["speedup_ci95"]
    line = f"slow k=4 ({found['speedup']:.2f} times its speed, {low:.2f}–{high:.2f})"
    texts = [sentence["text"] for sentence in data["settings"][0]["summary"]]
    assert any(text.startswith("Paired by prompt, quick k=4 is faster than ") and line in text for text in texts)
    assert any("quick k=4 cannot be told apart in speed from alike k=4" in text for text in texts)


def test_tokens_are_in_words_where_the_tokenizer_is_at_hand(data):
    shown = data["settings"][0]["pieces"]
    assert (shown[str(A)], shown[str(E1)]) == ("a", r"\xc3")
    assert data["notes"] == []


def test_tokens_are_numbers_where_it_is_not_and_the_page_says_so(stored):
    made_without = page.make(results.runs([stored / "runs"]), 3)
    assert json.loads(Scripts(made_without.html).data)["settings"][0]["pieces"] is None
    assert made_without.notes == [f"bytes: {page.NO_TOKENIZER}"]


def test_replies_are_limited_to_the_prompts_asked_for(stored):
    for count in (0, 4):
        (setting,) = json.loads(Scripts(page.make(results.runs([stored / "runs"]), count, [stored]).html).data)[
            "settings"
        ]
        assert len(setting["replies"]["prompts"]) == count
        assert {len(by_prompt) for by_prompt in setting["replies"]["replies"].values()} == {count}


def test_a_page_of_many_runs_shows_fewer_replies(stored, monkeypatch):
    runs = results.runs([stored / "runs"])
    monkeypatch.setattr(page, "BUDGET", 2 * (3 * 4 + 7))  # two prompts of three methods and plain decoding
    found = page.make(runs, 12, [stored])
    assert len(json.loads(Scripts(found.html).data)["settings"][0]["replies"]["prompts"]) == 2
    assert "2 prompts of each setting are shown token by token, not 12" in found.notes[0]
    monkeypatch.setattr(page, "BUDGET", 1)
    found = page.make(runs, 12, [stored])
    assert len(json.loads(Scripts(found.html).data)["settings"][0]["replies"]["prompts"]) == 1
    assert "1 prompt of each setting is shown token by token, not 12" in found.notes[0]


def test_settings_stand_apart(stored):
    runs = results.runs([stored / "runs"])
    runs[0]["config"] = {**runs[0]["config"], "batch_size": 4}
    settings = json.loads(Scripts(page.make(runs, 0).html).data)["settings"]
    assert sorted(len(setting["table"]["rows"]) for setting in settings) == [1, len(runs) - 1]


def test_one_question_answered_twice_is_two_runs_and_one_folder_given_twice_is_one(stored, tmp_path):
    store(tmp_path, made("quick"))
    runs = results.runs([stored / "runs", tmp_path / "runs", stored / "runs"])
    found = page.distinct(runs)
    assert len(found) == 6
    assert len({each["id"] for each in found}) == 6


def test_a_run_whose_steps_cannot_be_read_keeps_its_numbers(tmp_path):
    store(tmp_path, *several())
    (slow,) = [r for r in results.runs([tmp_path / "runs"]) if r["drafter"]["name"] == "slow"]
    (tmp_path / "runs" / slow["id"] / record.STEPS).write_bytes(b"PAR1 half")
    (setting,) = json.loads(Scripts(page.make(results.runs([tmp_path / "runs"]), 3, [tmp_path]).html).data)["settings"]
    assert slow["id"] in [row["run"] for row in setting["table"]["rows"]]
    assert slow["id"] not in setting["replies"]["replies"]
    texts = [sentence["text"] for sentence in setting["summary"]]
    assert "quick k=4 cannot be compared with slow k=4, as there is no interval." in texts


# the command


def test_command_writes_the_page_and_prints_its_path(stored, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert command.main([str(stored / "runs"), "--out", str(out), "--tokenizer", str(stored)]) == 0
    assert capsys.readouterr().out.split() == [str(out)]
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--prompts=-1"], "--prompts=-1 is negative"), (["empty"], "no records of runs in")],
)
def test_command_says_what_is_wrong(stored, tmp_path, capsys, arguments, told):
    folder = [] if arguments == ["empty"] else [str(stored / "runs")]
    extra = [str(tmp_path)] if arguments == ["empty"] else arguments
    assert command.main([*folder, *extra, "--out", str(tmp_path / "page.html")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
