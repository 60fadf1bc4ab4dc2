import json
from collections import Counter

import datasets
import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from specbench.cli import conf_dir
from specbench.errors import ConfigError
from specbench.prompts import Conversation, PromptSet, load_builtin, load_jsonl, load_spec_bench, load_table

CATEGORIES = (
    "chat",
    "code",
    "extraction",
    "math",
    "question_answering",
    "retrieval",
    "summarisation",
    "translation",
)


@pytest.fixture
def cache_in_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def jsonl(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def made_up(**sizes):
    members = [(name, i) for name, size in sizes.items() for i in range(size)]
    return PromptSet("made-up", tuple(Conversation(f"{name}-{i}", name, ("Hi",)) for name, i in members))


def ids(prompts):
    return [conversation.id for conversation in prompts.conversations]


# the built-in set


def test_builtin_has_eight_categories_of_at_least_twelve_prompts():
    counts = Counter(c.category for c in load_builtin().conversations)
    assert sorted(counts) == sorted(CATEGORIES)
    assert min(counts.values()) >= 12


def test_builtin_ids_are_unique():
    assert len(set(ids(load_builtin()))) == len(ids(load_builtin()))


def test_builtin_chat_prompts_have_two_turns_and_no_other_does():
    assert {(c.category == "chat", len(c.turns)) for c in load_builtin().conversations} == {(True, 2), (False, 1)}


@pytest.mark.parametrize("category", ["summarisation", "retrieval", "extraction"])
def test_builtin_prompts_about_a_text_hold_a_text_of_270_words(category):
    lengths = [len(c.turns[0].split()) for c in load_builtin().conversations if c.category == category]
    assert min(lengths) >= 270


def test_builtin_limit_samples_every_category():
    assert Counter(c.category for c in load_builtin(limit=16).conversations) == dict.fromkeys(CATEGORIES, 2)


# sample


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 11])
def test_sample_is_even_across_categories(limit):
    sampled = made_up(a=4, b=4, c=4).sample(limit, seed=0).conversations
    counts = [sum(c.category == name for c in sampled) for name in "abc"]
    assert sum(counts) == limit
    assert max(counts) - min(counts) <= 1


def test_sample_takes_more_from_the_others_where_a_category_is_small():
    sampled = made_up(a=1, b=9, c=9).sample(9, seed=0)
    assert Counter(c.category for c in sampled.conversations) == {"a": 1, "b": 4, "c": 4}


def test_sample_is_the_same_for_the_same_seed():
    assert made_up(a=9, b=9).sample(6, seed=3) == made_up(a=9, b=9).sample(6, seed=3)


def test_sample_differs_between_seeds():
    assert len({tuple(ids(made_up(a=9, b=9).sample(6, seed))) for seed in range(5)}) == 5


def test_sample_keeps_the_order_of_the_set():
    sampled = ids(made_up(a=9, b=9).sample(7, seed=1))
    assert sampled == [name for name in ids(made_up(a=9, b=9)) if name in sampled]


@pytest.mark.parametrize("limit", [None, 8, 100])
def test_sample_without_a_limit_below_the_size_keeps_all(limit):
    assert made_up(a=4, b=4).sample(limit, seed=0) == made_up(a=4, b=4)


@pytest.mark.parametrize("limit", [0, -1])
def test_sample_refuses_a_limit_below_one(limit):
    with pytest.raises(ConfigError, match=f"dataset.limit={limit}: use 1 or more, or null for all"):
        made_up(a=4).sample(limit, seed=0)


# PromptSet


def test_duplicate_ids_are_refused_by_name():
    twice = Conversation("a", "x", ("Hi",))
    with pytest.raises(ConfigError, match="data set made-up has two prompts with id a"):
        PromptSet("made-up", (twice, Conversation("b", "x", ("Hi",)), twice))


def test_empty_set_is_refused_by_name():
    with pytest.raises(ConfigError, match="data set made-up is empty"):
        PromptSet("made-up", ())


@pytest.mark.parametrize(
    "other", [Conversation("b", "x", ("Hi",)), Conversation("a", "y", ("Hi",)), Conversation("a", "x", ("Hi", "Hi"))]
)
def test_sha256_tells_ids_categories_and_turns_apart(other):
    assert PromptSet("s", (other,)).sha256 != PromptSet("s", (Conversation("a", "x", ("Hi",)),)).sha256


# load_jsonl


def test_jsonl_reads_every_field(tmp_path):
    record = {"id": 7, "category": "tea", "turns": ["One?", "Two?"], "reference": "Three."}
    prompts = load_jsonl(jsonl(tmp_path / "mine.jsonl", record))
    assert prompts == PromptSet("mine", (Conversation("7", "tea", ("One?", "Two?"), "Three."),))


def test_jsonl_names_what_a_line_leaves_out_after_the_file_and_takes_one_text_for_one_turn(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"turns": "One?"}, {"turns": ["Two?"]})
    assert load_jsonl(path).conversations == (
        Conversation("mine-00001", "mine", ("One?",)),
        Conversation("mine-00002", "mine", ("Two?",)),
    )


def test_jsonl_takes_a_limit(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", *({"turns": f"Number {i}?"} for i in range(9)))
    assert load_jsonl(path, limit=4, seed=2) == load_jsonl(path).sample(4, seed=2)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"], ids=ascii)
def test_jsonl_lines_end_at_newlines_only(tmp_path, separator):
    # JSON takes these raw inside a text, and str.splitlines would end a line there
    path = jsonl(tmp_path / "mine.jsonl", {"turns": f"One{separator}two?"})
    assert load_jsonl(path).conversations[0].turns == (f"One{separator}two?",)


@pytest.mark.parametrize("line", ['{"turns": ["One?"]', "One?", "}"], ids=["cut off", "plain text", "brace"])
def test_jsonl_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"turns": ["Fine?"]}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=r"mine\.jsonl, line 3: not JSON"):
        load_jsonl(str(path))


@pytest.mark.parametrize(
    "line", ["{}", '{"turns": []}', '{"turns": ""}', '{"turns": [""]}', '{"turns": [1]}', '{"turns": {}}', "[]", "3"]
)
def test_jsonl_line_without_turns_is_named(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"turns": "Fine?"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r'mine\.jsonl, line 2: needs "turns", a list of texts'):
        load_jsonl(str(path))


def test_jsonl_missing_path_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.path=.*nowhere\.jsonl does not exist; usage: dataset=jsonl"):
        load_jsonl(str(tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize("path", [None, ""])
def test_jsonl_without_a_path_says_what_to_type(path):
    with pytest.raises(ConfigError, match=r"dataset=jsonl dataset\.path=FILE"):
        load_jsonl(path)


@pytest.mark.parametrize("content", ["", "\n \n"], ids=["no bytes", "blank lines"])
def test_jsonl_empty_file_is_refused(tmp_path, content):
    (tmp_path / "mine.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="data set mine is empty"):
        load_jsonl(str(tmp_path / "mine.jsonl"))


def test_jsonl_duplicate_ids_are_refused(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"id": "a", "turns": "One?"}, {"id": "a", "turns": "Two?"})
    with pytest.raises(ConfigError, match="data set mine has two prompts with id a"):
        load_jsonl(path)


def test_jsonl_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.path="):
        load_jsonl(str(tmp_path))


def test_jsonl_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes('{"turns": "Grüße?"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.jsonl"):
        load_jsonl(str(tmp_path / "mine.jsonl"))


# load_spec_bench


def test_spec_bench_format_is_read(tmp_path):
    path = jsonl(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]},
        {"question_id": 82, "category": "qa", "turns": ["Three?"], "reference": ["Yes", "No"]},
    )
    assert load_spec_bench(path) == PromptSet(
        "spec_bench",
        (
            Conversation("81", "writing", ("One?", "Two?"), None),
            Conversation("82", "qa", ("Three?",), '["Yes", "No"]'),
        ),
    )


def test_spec_bench_without_a_path_says_what_to_type():
    with pytest.raises(ConfigError, match=r"dataset=spec_bench dataset\.path=\.\.\./question\.jsonl"):
        load_spec_bench(None)


# load_table: per YAML of a hub data set, rows in the hub's own columns and the conversation that row 1 is

ROW = {
    "alpaca": (
        {"instruction": "Sort {x}.", "input": "c, a", "output": "a, c", "text": "Below is an instruction."},
        ("chat", ("Sort {x}.\n\nc, a",), "a, c"),
    ),
    "cnn_dailymail": (
        {"article": "It {rained}.", "highlights": "Rain.", "id": "0f"},
        ("summarisation", ("Summarise the following article in three sentences.\n\nIt {rained}.",), "Rain."),
    ),
    "gsm8k": (
        {"question": "What is {1} and 1?", "answer": "#### 2"},
        ("math", ("What is {1} and 1?",), "#### 2"),
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():\n    return {}\n",
            "canonical_solution": "    pass\n",
            "test": "",
            "entry_point": "f",
        },
        ("code", ("def f():\n    return {}\n",), "    pass\n"),
    ),
    "math500": (
        {
            "problem": r"What is \frac{1}{1}?",
            "solution": "It is 1.",
            "answer": "1",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/algebra/1.json",
        },
        ("math", (r"What is \frac{1}{1}?",), "1"),
    ),
    "mt_bench": (
        {"category": "writing", "prompt": ["One?", "Two?"], "reference": ["1", "2"], "prompt_id": 81},
        ("writing", ("One?", "Two?"), None),
    ),
}


def composed(name, *overrides):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return instantiate(compose("config", [f"dataset={name}", *overrides]).dataset)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ROW)
def test_hub_format_is_read_from_a_local_file(tmp_path, cache_in_tmp, name, kind):
    row, (category, turns, reference) = ROW[name]
    path = tmp_path / f"part.{kind}"
    table = pd.DataFrame([row, row])
    table.to_parquet(path) if kind == "parquet" else table.to_json(path, orient="records", lines=True)
    prompts = composed(name, f"dataset.path={path}")
    assert (prompts.name, ids(prompts)) == (name, [f"{name}-00000", f"{name}-00001"])
    conversation = prompts.conversations[1]
    assert (conversation.category, conversation.turns) == (category, turns)
    assert reference in (None, conversation.reference)


def test_table_samples_by_its_own_seed(tmp_path, cache_in_tmp):
    path = jsonl(tmp_path / "part.jsonl", *({"question": f"Number {i}?", "answer": ""} for i in range(20)))
    some = composed("gsm8k", f"dataset.path={path}", "dataset.limit=5", "dataset.seed=3", "seed=9")
    assert some == composed("gsm8k", f"dataset.path={path}").sample(5, seed=3)


@pytest.mark.parametrize("turns", ["{questoin}", "questoin"], ids=["template", "column"])
def test_table_wrong_turns_column_is_told_the_columns_there_are(tmp_path, cache_in_tmp, turns):
    path = jsonl(tmp_path / "part.jsonl", {"question": "One?", "answer": "1"})
    with pytest.raises(ConfigError, match=r"gsm8k has no column '?questoin'?; it has answer, question"):
        load_table("gsm8k", "openai/gsm8k", "test", turns, path=path)


def test_table_unreadable_parquet_is_named(tmp_path, cache_in_tmp):
    (tmp_path / "part.parquet").write_bytes(b"PAR1 this is none")
    with pytest.raises(ConfigError, match=r"dataset\.path=.*part\.parquet cannot be read"):
        load_table("gsm8k", "openai/gsm8k", "test", "{question}", path=str(tmp_path / "part.parquet"))


def test_table_of_no_known_kind_is_told_the_kinds_there_are(tmp_path):
    (tmp_path / "part.xml").write_text("<a/>")
    with pytest.raises(ConfigError, match=r"part\.xml holds no \.parquet, \.jsonl, \.json, \.csv file"):
        load_table("gsm8k", "openai/gsm8k", "test", "{question}", path=str(tmp_path / "part.xml"))


def test_table_folder_of_several_kinds_of_file_is_read(tmp_path, cache_in_tmp):
    # what a clone of a hub data set looks like
    pd.DataFrame([{"question": "One?", "answer": "1"}]).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    (tmp_path / "dataset_infos.json").write_text('{"default": {"description": ""}}')
    prompts = load_table("gsm8k", "openai/gsm8k", "test", "{question}", path=str(tmp_path))
    assert [c.turns for c in prompts.conversations] == [("One?",)]


def test_table_folder_of_several_splits_gives_the_one_asked_for(tmp_path, cache_in_tmp):
    for split in ("test", "train"):
        rows = pd.DataFrame([{"question": f"Of {split}?", "answer": "1"}])
        rows.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    prompts = load_table("gsm8k", "openai/gsm8k", "test", "{question}", path=str(tmp_path))
    assert [c.turns for c in prompts.conversations] == [("Of test?",)]


def test_table_without_the_hub_says_how_to_go_on(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("name resolution failed")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ConfigError, match=r"(?s)openai/gsm8k.*name resolution failed.*dataset\.path=FILE_OR_FOLDER"):
        load_table("gsm8k", "openai/gsm8k", "test", "{question}")
