"""Training data: the target's own words, the same however they were made, whatever interrupted it; and none of what is
evaluated."""

import json
import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import CommandLine, mutated, prompts, tiny
from filelock import FileLock

from drafters.none import NoDrafter
from drafters.training import asking, corpus, data, replies
from drafters.training.asking import Asker
from drafters.training.corpus import Conversation
from drafters.training.data import Settings
from drafters.training.replies import Task, continue_all
from specbench import cli, targets
from specbench.decoding import decode
from specbench.drafting import Request
from specbench.errors import ConfigError, RunError
from specbench.model import Output
from specbench.packaged import file_sha256
from specbench.prompts import load_builtin, overlap
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import load_tiny

TINY = ("target=tiny", "dtype=float32", "device=cpu")

load_once = cache(load_tiny)  # commands in one process need not load a target each


@pytest.fixture(autouse=True)
def as_it_was(tmp_path, monkeypatch):
    """The command line is made for a process of its own: undo what it leaves behind."""
    monkeypatch.chdir(tmp_path)
    with command_line():
        yield


class command_line(CommandLine):  # noqa: N801
    """The same, with tiny targets made once."""

    def __enter__(self):
        super().__enter__().setattr(targets, "load_tiny", load_once)


def some_words(seed, count):
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 5))) for _ in range(count))


def write_prompts(path, texts):
    path.write_text("".join(json.dumps({"turns": text}) + "\n" for text in texts))
    return path


def make_data(folder, file=None, *arguments):
    """The command; of prompts in ``file``, or in the target's own words. Returns the exit code."""
    source = () if file is None else ("dataset@source=jsonl", f"source.path={file}")
    small = ("reply_tokens=10", "shard=4", "held_out=4", "workers=1", f"out={folder}")
    return cli.run_command("training_data", data.run, arguments=[*TINY, *source, *small, *arguments])


def manifest(folder):
    return json.loads((folder / corpus.MANIFEST).read_text())


def said(capsys):
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


TEXTS = tuple(some_words(i, 4 + i % 5) for i in range(12))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished folder, and the file of its prompts."""
    home = tmp_path_factory.mktemp("made")
    file = write_prompts(home / "prompts.jsonl", TEXTS)
    with command_line():
        assert make_data(home / "data", file) == 0
    return home / "data", file


# replies


SAMPLINGS = {"greedy": Sampling(), "t1": Sampling(1.0), "nucleus": Sampling(0.8, top_k=40, top_p=0.9)}
ENDS = frozenset([1, 70, 90])  # of which some occur


def tasks_of(target, sampling, limit=16):
    texts = [*prompts(target, 4), [5], [9, 9, 4]]
    return [Task(f"{i}", text, sampling, limit) for i, text in enumerate(texts)]


def decoded(target, task, seed=3):
    stop = StopRule(task.limit, token_ids=ENDS)
    steps = decode(target, NoDrafter(), [Request(task.uid, task.prompt)], 0, task.sampling, seed, stop)
    return [token for step in steps for token in step.committed[0]]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_replies_are_those_of_plain_decoding(sampling, kind):
    target = tiny(kind)
    tasks = tasks_of(target, SAMPLINGS[sampling])
    found = dict(continue_all(target, tasks, ENDS, 4, seed=3))
    assert found == {i: decoded(target, task) for i, task in enumerate(tasks)}
    if kind == "llama":
        assert len({len(reply) for reply in found.values()}) > 1  # some ended by themselves


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_replies_do_not_depend_on_the_company(rows):
    target = tiny("llama")
    mixed = [
        replace(task, uid=f"{task.uid}/{name}", limit=8 + 3 * i)
        for name, sampling in SAMPLINGS.items()
        for i, task in enumerate(tasks_of(target, sampling))
    ]
    found = dict(continue_all(target, mixed, ENDS, rows, seed=3))
    assert found == {i: decoded(target, task) for i, task in enumerate(mixed)}


def test_noise_off_by_one_position_is_noticed(monkeypatch):
    target = tiny("llama")
    tasks = tasks_of(target, SAMPLINGS["t1"])
    broken = mutated(replies._continue, ("cache.lengths[:, None].clamp", "(cache.lengths[:, None] - 1).clamp"))
    monkeypatch.setattr(replies, "_continue", broken)
    found = dict(continue_all(target, tasks, ENDS, 4, seed=3))
    assert found != {i: decoded(target, task) for i, task in enumerate(tasks)}


def test_replies_end_with_what_ended_them_or_at_their_limit():
    target = tiny("llama")
    tasks = tasks_of(target, SAMPLINGS["t1"], limit=24)
    for place, reply in continue_all(target, tasks, ENDS, 64, seed=3):
        assert not ENDS & set(reply[:-1])
        assert reply[-1] in ENDS or len(reply) == tasks[place].limit


def test_logits_that_are_no_numbers_fail_loudly(monkeypatch):
    target = load_tiny()
    forward = target.forward
    nan = lambda *given, **how: Output(torch.full_like(forward(*given, **how).logits, float("nan")), None)  # noqa: E731
    monkeypatch.setattr(target, "forward", nan)
    with pytest.raises(RunError, match="NaN or infinite"):
        list(continue_all(target, tasks_of(target, Sampling()), ENDS, 64, seed=0))


def test_no_task_is_no_reply(llama):
    assert list(continue_all(llama, [], ENDS, 64, seed=0)) == []


# the command


def test_data_hold_what_the_target_says_to_each_prompt_at_both_temperatures(made):
    folder, _ = made
    target = tiny("llama")
    found = corpus.read(folder, target)
    assert len(found.conversations) == 2 * len(TEXTS)
    for c in found.conversations:
        index = int(c.id.split("/")[0])
        assert list(c.prompt) == target.encode([{"role": "user", "content": TEXTS[index]}])
        stop = StopRule(10, token_ids=target.eos_ids)
        steps = decode(target, NoDrafter(), [Request(c.id, c.prompt)], 0, Sampling(c.temperature), 0, stop)
        assert [token for step in steps for token in step.committed[0]] == list(c.reply)


def test_replies_to_a_held_out_prompt_are_held_out_at_every_temperature(made):
    found = corpus.read(made[0], tiny("llama"))
    prompts_of = lambda cs: {c.id.split("/")[0] for c in cs}  # noqa: E731
    assert prompts_of(found.training) & prompts_of(found.held_out()) == set()
    assert {tuple(c.prompt) for c in found.training} & {tuple(c.prompt) for c in found.held_out()} == set()
    assert len(found.held_out(0.0)) == len(found.held_out(1.0)) == len(TEXTS) // 4
    assert prompts_of(found.held_out(0.0)) == prompts_of(found.held_out(1.0))


def test_manifest_says_where_the_data_are_from(made):
    folder, _ = made
    written = manifest(folder)
    target = tiny("llama")
    table = corpus.read_table(folder / corpus.TABLE)
    assert written["target"] == {"name": "tiny-llama", "files": target.files, "quant": None}
    assert written["table_sha256"] == file_sha256(folder / corpus.TABLE)
    assert written["settings"]["prompts"] == len(TEXTS)
    assert written["source"].startswith("prompts ")
    assert written["counts"]["conversations"] == len(table)
    assert written["counts"]["reply_tokens"] == sum(len(c.reply) for c in table)
    assert written["counts"]["held_out"] == sum(c.held_out for c in table)
    assert written["dropped"] == {"unusable": 0, "in_evaluation": 0, "repeated": 0}
    assert written["written"]["reply_tokens"] == written["counts"]["reply_tokens"]
    assert "drafters.training.data" in written["made_by"]["command"]


def test_ids_take_two_bytes_where_that_is_enough(made, tmp_path):
    schema = pq.read_schema(made[0] / corpus.TABLE)
    assert {schema.field(name).type.value_type for name in ("prompt", "reply")} == {pa.uint16()}
    large = Conversation("0/0", "x", 0.0, [1 << 16], [1 << 17])
    corpus.write_table(tmp_path / "large.parquet", [large], 1 << 18)
    assert corpus.read_table(tmp_path / "large.parquet") == [large]
    corpus.write_table(tmp_path / "least.parquet", [replace(large, prompt=[65535], reply=[0])], 1 << 16)
    assert corpus.read_table(tmp_path / "least.parquet")[0].prompt == [65535]


def test_same_command_again_makes_nothing_anew(made, monkeypatch):
    folder, file = made
    monkeypatch.setattr(data, "make_shard", None)
    before = file_sha256(folder / corpus.TABLE)
    assert make_data(folder, file) == 0
    assert file_sha256(folder / corpus.TABLE) == before


@pytest.mark.parametrize("harm", ["missing", "cut short", "no table", "empty"])
def test_a_shard_that_is_not_whole_is_made_again(made, tmp_path, harm):
    folder, file = made
    shutil.copytree(folder, tmp_path / "data")
    shard = tmp_path / "data" / data.SHARD.format(1)
    others = [tmp_path / "data" / data.SHARD.format(i) for i in (0, 2)]
    written = [other.stat().st_mtime_ns for other in others]
    content = shard.read_bytes()
    if harm == "missing":
        shard.unlink()
    else:
        shard.write_bytes({"cut short": content[: len(content) // 2], "no table": b"hello", "empty": b""}[harm])
    assert make_data(tmp_path / "data", file) == 0
    assert (tmp_path / "data" / corpus.TABLE).read_bytes() == (folder / corpus.TABLE).read_bytes()
    assert [other.stat().st_mtime_ns for other in others] == written


def test_an_interrupted_run_goes_on_where_it_was(made, tmp_path, monkeypatch, capsys):
    folder, file = made
    make_shard, done = data.make_shard, []

    def interrupted(*given):
        if len(done) == 2:
            raise KeyboardInterrupt
        make_shard(*given)
        done.append(given[-1])

    with monkeypatch.context() as patch:
        patch.setattr(data, "make_shard", interrupted)
        assert make_data(tmp_path / "data", file) == 1
    assert "interrupted" in said(capsys)
    assert not (tmp_path / "data" / corpus.MANIFEST).exists()
    written = [path.stat().st_mtime_ns for path in done]
    assert make_data(tmp_path / "data", file) == 0
    assert [path.stat().st_mtime_ns for path in done] == written
    assert (tmp_path / "data" / corpus.TABLE).read_bytes() == (folder / corpus.TABLE).read_bytes()


def test_shards_and_rows_and_company_do_not_change_the_data(made, tmp_path):
    folder, file = made
    assert make_data(tmp_path / "data", file, "shard=5", "rows=3") == 0
    assert corpus.read_table(tmp_path / "data" / corpus.TABLE) == corpus.read_table(folder / corpus.TABLE)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("reply_tokens=11", "reply_tokens"),
        ("temperatures=[0]", "temperatures"),
        ("seed=1", "seed"),
        ("held_out=3", "held_out"),
        ("shard=6", "shard"),
        ("source.limit=9", "source"),
    ],
)
def test_other_settings_are_refused_by_name(made, capsys, change, named):
    folder, file = made
    before = file_sha256(folder / corpus.TABLE)
    assert make_data(folder, file, change) == 2
    assert f"holds data made with other settings ({named})" in said(capsys)
    assert file_sha256(folder / corpus.TABLE) == before


def test_shards_of_another_target_are_refused(made, capsys):
    folder, file = made
    assert make_data(folder, file, "target.seed=1") == 2
    assert "was made by tiny-llama with other weights" in said(capsys)


def test_a_target_that_goes_by_another_name_is_the_same(made, monkeypatch):
    folder, file = made

    def renamed(*given, **how):
        target = load_tiny(*given, **how)
        target.name = "a-copy"
        return target

    monkeypatch.setattr(targets, "load_tiny", renamed)
    assert make_data(folder, file) == 0


def test_more_prompts_can_be_asked_for_later(made, tmp_path):
    folder, file = made
    assert make_data(tmp_path / "data", file, "prompts=8") == 0
    shards = [tmp_path / "data" / data.SHARD.format(i) for i in (0, 1)]
    written = [shard.stat().st_mtime_ns for shard in shards]
    assert make_data(tmp_path / "data", file) == 0
    assert [shard.stat().st_mtime_ns for shard in shards] == written
    assert (tmp_path / "data" / corpus.TABLE).read_bytes() == (folder / corpus.TABLE).read_bytes()


def test_more_prompts_than_filled_the_last_shard_can_be_asked_for_later(made, tmp_path):
    folder, file = made
    assert make_data(tmp_path / "data", file, "prompts=6") == 0
    assert make_data(tmp_path / "data", file) == 0
    found = corpus.read_table(tmp_path / "data" / corpus.TABLE)
    assert len(found) == len(corpus.read_table(folder / corpus.TABLE))


def test_fewer_prompts_can_be_asked_for_later(made, tmp_path):
    folder, file = made
    shutil.copytree(folder, tmp_path / "data")
    assert make_data(tmp_path / "data", file, "prompts=6") == 0
    assert manifest(tmp_path / "data")["counts"]["conversations"] == 12
    assert manifest(tmp_path / "data")["dropped"]["unusable"] == 0


def test_what_time_allows_is_joined_and_the_rest_can_be_made_later(made, tmp_path):
    folder, file = made
    assert make_data(tmp_path / "data", file, "minutes=1e-9") == 0
    some = manifest(tmp_path / "data")
    assert some["counts"]["conversations"] == 8  # a shard, of four prompts
    assert some["dropped"]["unusable"] == 0
    assert len(corpus.read(tmp_path / "data", tiny("llama")).conversations) == 8
    assert make_data(tmp_path / "data", file, "minutes=60") == 0
    assert (tmp_path / "data" / corpus.TABLE).read_bytes() == (folder / corpus.TABLE).read_bytes()


def test_two_at_once_in_a_folder_are_refused(tmp_path, made, capsys):
    (tmp_path / "data").mkdir()
    with FileLock(tmp_path / "data" / ".lock"):
        assert make_data(tmp_path / "data", made[1]) == 1
    assert "another process is making data in" in said(capsys)


@pytest.mark.slow
def test_several_processes_make_the_same(made, tmp_path):
    folder, file = made
    assert make_data(tmp_path / "data", file, "workers=2") == 0
    assert (tmp_path / "data" / corpus.TABLE).read_bytes() == (folder / corpus.TABLE).read_bytes()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("prompts=0", "prompts=0"),
        ("shard=0", "shard=0"),
        ("reply_tokens=2.5", "reply_tokens=2.5"),
        ("held_out=-1", "held_out=-1"),
        ("seed=x", "seed=x"),
        ("temperatures=[]", "temperatures=[]"),
        ("temperatures=1", "temperatures=1 is no list"),
        ("temperatures=[-1]", "temperature=-1"),
        ("workers=0", "workers=0"),
        ("minutes=0", "minutes=0"),
        ("source.path=nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("dataset@source=jsonll", "jsonll is unknown"),
        ("target=tinny", "target=tinny is unknown"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(made, tmp_path, capsys, wrong, named):
    assert make_data(tmp_path / "data", made[1], wrong) == 2
    assert named in said(capsys)
    assert not (tmp_path / "data").exists()


def test_a_temperature_that_is_no_number_is_refused_by_name(made, tmp_path, capsys):
    assert make_data(tmp_path / "data", made[1], "temperatures=[hot]") == 2
    assert "hot" in said(capsys)


@pytest.mark.parametrize("held_out", [1, 20])
def test_data_without_anything_to_learn_from_are_refused(tmp_path, held_out):
    file = write_prompts(tmp_path / "one.jsonl", TEXTS[: 1 if held_out > 1 else 3])
    assert make_data(tmp_path / "data", file, f"held_out={held_out}") != 0


# what is dropped


def evaluation_prompts():
    return [turn for c in load_builtin().conversations for turn in c.turns]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Data of prompts of which some must go."""
    builtin = evaluation_prompts()
    long = next(text for text in builtin if 14 <= len(overlap.words(text)) <= 40)
    shared = " ".join(overlap.words(long)[3:11])
    short = " ".join(overlap.words(long)[3:10])
    texts = [
        *TEXTS[:3],
        long,
        f"zop zip {shared.upper()}! zap",  # eight words in a row
        f"zop zup {short} zap",  # seven: not too many
        TEXTS[1],  # a repetition
        f"{TEXTS[4]} and more of it",
        TEXTS[4] + " and more of it indeed",  # nearly one
        *TEXTS[5:7],
    ]
    home = tmp_path_factory.mktemp("mixed")
    with command_line():
        assert make_data(home / "data", write_prompts(home / "prompts.jsonl", texts), "target.context=512") == 0
    return home / "data", texts


def test_prompts_of_the_evaluation_and_repetitions_are_dropped(mixed):
    folder, texts = mixed
    kept = {int(c.id.split("/")[0]) for c in corpus.read_table(folder / corpus.TABLE)}
    assert kept == set(range(len(texts))) - {3, 4, 6, 8}


def test_what_was_dropped_is_counted(mixed):
    assert manifest(mixed[0])["dropped"] == {"unusable": 0, "in_evaluation": 2, "repeated": 2}


def test_no_evaluation_prompt_is_in_the_data(mixed):
    target = tiny("llama")
    for c in corpus.read_table(mixed[0] / corpus.TABLE):
        text = target.tokenizer.decode(c.prompt)
        assert not any(prompt in text for prompt in evaluation_prompts())


def test_every_built_in_prompt_would_be_dropped():
    reserved = evaluation_prompts()
    assert all(overlap.overlapping([f"Please: {text}" for text in reserved], reserved))


def test_data_of_which_nothing_is_left_are_refused(tmp_path, capsys):
    file = write_prompts(tmp_path / "all.jsonl", [text for text in evaluation_prompts() if len(text) < 300][:3])
    assert make_data(tmp_path / "data", file) == 1
    assert "too few to train on" in said(capsys)


@pytest.mark.parametrize(
    ("text", "reserved", "expected"),
    [
        ("a b c d e f g h", "x a b c d e f g h y", True),
        ("A, b; C d?  e f g-h!", "a b c d e f g h", True),
        ("a b c d e f g", "a b c d e f g x", False),
        ("x a b c d e f g y", "a b c d e f g z", False),
        ("so what is this", "what is this", True),  # short ones count as a whole
        ("what is that", "what is this", False),
        ("", "what is this", False),
    ],
)
def test_overlap_is_eight_words_in_a_row_or_all_of_a_shorter_text(text, reserved, expected):
    assert overlap.overlapping([text], [reserved]) == [expected]


def test_a_repetition_is_what_earlier_texts_have_mostly_said():
    first, other = "one two three four five six seven", "eight nine ten eleven twelve thirteen"
    texts = [
        first,
        "ONE two, three four five six seven!",
        other,
        "one two three four five six eight",  # 2 of 3
        "one two three four five four three",  # 1 of 3
        "short",
        "short",
    ]
    assert list(overlap.repetitions(texts)) == [False, True, False, True, False, False, True]


def test_what_a_repetition_added_is_not_remembered():
    seen = "a b c d e f g h i"
    most = "a b c d e f g h x y"  # a repetition, whose end is new
    again = "e f g h x y"  # half of it would be one
    assert list(overlap.repetitions([seen, most, again])) == [False, True, False]


def test_prompts_that_do_not_fit_the_context_are_left_out(tmp_path):
    file = write_prompts(tmp_path / "prompts.jsonl", [*TEXTS[:4], "x" * 60, *TEXTS[4:6]])
    assert make_data(tmp_path / "data", file, "target.context=80") == 0
    found = corpus.read_table(tmp_path / "data" / corpus.TABLE)
    assert 4 not in {int(c.id.split("/")[0]) for c in found}
    assert max(len(c.tokens) for c in found) <= 80
    assert max(len(c.prompt) for c in found) + 10 <= 80
    assert manifest(tmp_path / "data")["dropped"]["unusable"] == 7 - len({c.id.split("/")[0] for c in found})


def test_prompts_of_which_none_fits_are_refused(tmp_path, capsys):
    file = write_prompts(tmp_path / "prompts.jsonl", TEXTS[:4])
    assert make_data(tmp_path / "data", file, "target.context=24") == 1
    assert "no prompt was of use" in said(capsys)


# a corpus


def test_data_of_another_target_are_refused(made):
    with pytest.raises(ConfigError, match=r"data=.* with other weights than those of tiny-llama"):
        corpus.read(made[0], tiny("llama", seed=1))
    with pytest.raises(ConfigError, match="than those of tiny-qwen3"):
        corpus.read(made[0], tiny("qwen3"))


def test_data_of_a_target_that_is_quantised_otherwise_are_refused(made):
    with pytest.raises(ConfigError, match="other weights"):
        corpus.read(made[0], load_tiny(quant="int8", dtype="bfloat16"))


@pytest.fixture
def copied(made, tmp_path):
    folder = tmp_path / "copied"
    folder.mkdir()
    for name in (corpus.TABLE, corpus.MANIFEST):
        (folder / name).write_bytes((made[0] / name).read_bytes())
    return folder


def test_names_may_differ(copied, monkeypatch):
    target = load_tiny()
    target.name = "a-copy"
    assert len(corpus.read(copied, target).conversations) == 2 * len(TEXTS)


def harmed(folder, **changes):
    (folder / corpus.MANIFEST).write_text(json.dumps({**manifest(folder), **changes}))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda folder: (folder / corpus.MANIFEST).unlink(), "holds no finished training data; make some with python"),
        (lambda folder: (folder / corpus.MANIFEST).write_text("{"), "is not JSON"),
        (lambda folder: harmed(folder, schema_version=0), "another schema version"),
        (lambda folder: harmed(folder, table_sha256="0"), "is not the table that its manifest describes"),
        (lambda folder: (folder / corpus.TABLE).unlink(), "is not the table that its manifest describes"),
        (lambda folder: (folder / corpus.TABLE).write_bytes(b"x"), "is not the table that its manifest describes"),
    ],
)
def test_data_that_are_damaged_are_refused(copied, harm, named):
    harm(copied)
    with pytest.raises(ConfigError, match=named):
        corpus.read(copied, tiny("llama"))


def test_a_table_that_could_not_be_finished_does_not_appear(tmp_path, monkeypatch):
    def full(table, path, **how):
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="no space"):
        corpus.write_table(tmp_path / "table.parquet", [Conversation("0/0", "x", 0.0, [1], [2])], 10)
    assert not (tmp_path / "table.parquet").exists()


def test_facts_travel_with_a_table(tmp_path):
    corpus.write_table(tmp_path / "table.parquet", [], 10, {"reply_tokens": 3})
    assert corpus.read_facts(tmp_path / "table.parquet") == {"reply_tokens": 3}
    assert corpus.read_table(tmp_path / "table.parquet") == []


def test_frequencies_count_replies_alone():
    found = corpus.frequencies([Conversation("a", "x", 0.0, [5, 5], [1, 2]), Conversation("b", "x", 1.0, [5], [2])], 7)
    assert found.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert found.dtype == np.int64


# prompts in the target's own words


def test_a_target_without_a_chat_template_cannot_be_asked(monkeypatch, tmp_path, made, capsys):
    tokenizer = targets.byte_tokenizer

    def without_template():
        made = tokenizer()
        made.chat_template = None
        return made

    monkeypatch.setattr(targets, "load_tiny", load_tiny)
    monkeypatch.setattr(targets, "byte_tokenizer", without_template)
    assert make_data(tmp_path / "data") == 2
    assert "tiny-llama has no chat template" in (words := said(capsys))
    assert "dataset@source=jsonl source.path=FILE" in words
    assert not (tmp_path / "data").exists()
    assert make_data(tmp_path / "given", made[1]) == 0


@pytest.fixture
def talkative(monkeypatch):
    """A tiny target's prompts say nothing: take them all the same."""
    monkeypatch.setattr(asking, "LEAST_WORDS", 2)
    monkeypatch.setattr(asking, "PASSAGE_WORDS", 2)


def test_prompts_in_the_targets_own_words_make_data(talkative, tmp_path):
    assert make_data(tmp_path / "data", None, "prompts=40", "shard=20") == 0
    target = tiny("llama")
    found = corpus.read(tmp_path / "data", target)
    asker = Asker(target)
    assert len(found.training) >= 4
    for c in found.conversations:
        kind, opening = asker.opening(int(c.id.split("/")[0]), 0)
        assert c.kind == kind
        assert opening.strip() in target.tokenizer.decode(c.prompt)
    assert found.manifest["source"] == "the target itself"
    assert found.manifest["written"]["prompt_tokens"] > 0
    kept = len({c.id.split("/")[0] for c in found.conversations})
    assert sum(found.manifest["dropped"].values()) == 40 - kept
    shard = tmp_path / "data" / data.SHARD.format(1)
    before = (tmp_path / "data" / corpus.TABLE).read_bytes()
    shard.unlink()
    assert make_data(tmp_path / "data", None, "prompts=40", "shard=20") == 0
    assert (tmp_path / "data" / corpus.TABLE).read_bytes() == before


def test_a_target_that_says_nothing_of_use_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(asking, "LEAST_WORDS", 1000)
    monkeypatch.setattr(asking, "PASSAGE_WORDS", 1000)
    assert make_data(tmp_path / "data", None, "prompts=4") == 1
    assert "no prompt was of use" in said(capsys)


def test_openings_depend_on_seed_and_number_alone_and_are_of_all_kinds(llama):
    asker = Asker(llama)
    first = [asker.opening(i, 0) for i in range(400)]
    assert first == [Asker(llama).opening(i, 0) for i in range(400)]
    assert first != [asker.opening(i, 1) for i in range(400)]
    assert {kind for kind, _ in first} == set(asking.KINDS)
    assert not any("{" in text for _, text in first)


def test_a_task_opens_the_users_turn(llama):
    asker = Asker(llama)
    number = next(i for i in range(50) if asker.opening(i, 0)[1])
    task = asker.task(number, 0)
    assert llama.tokenizer.decode(task.prompt) == "<s><turn>user: " + asker.opening(number, 0)[1]
    assert asker.stop_ids == llama.eos_ids


def test_a_prompt_must_end_and_say_enough(llama, monkeypatch):
    asker = Asker(llama)
    write = lambda text: llama.tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
    end = [llama.tokenizer.eos_token_id]
    monkeypatch.setattr(Asker, "opening", lambda self, index, seed: ("question", "What"))
    assert asker.prompt(0, 0, write(" is it that flies?") + end) == "What is it that flies?"
    assert asker.prompt(0, 0, write(" is it that flies?")) is None  # cut short
    assert asker.prompt(0, 0, write(" is it?") + end) is None  # too little
    passage = " word" * 40 + ". Another"
    monkeypatch.setattr(Asker, "opening", lambda self, index, seed: ("summary", "Sum up:"))
    assert asker.prompt(0, 0, write(passage)) == "Sum up:" + " word" * 40 + "."  # up to a whole sentence
    assert asker.prompt(0, 0, write(" word" * 9 + ".")) is None


def test_what_all_prompts_share_is_not_compared():
    """A chat template around a short prompt is no overlap."""
    target = tiny("llama")
    texts = ["say hi", "bake bread", "sing"]
    found = [Conversation(str(i), "x", 0.0, target.encode([{"role": "user", "content": t}]), [1]) for i, t in
             enumerate(texts)]  # fmt: skip
    assert data._bare_texts(target, found) == texts


@pytest.mark.parametrize(
    "wrong", [{"prompts": 0}, {"shard": True}, {"reply_tokens": "5"}, {"held_out": 0}, {"seed": 1.5}]
)
def test_settings_refuse_what_makes_no_data(wrong):
    right = {"prompts": 5, "shard": 2, "reply_tokens": 3, "temperatures": (0.0,), "held_out": 2, "seed": 0}
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        Settings(**{**right, **wrong})


def test_shards_cut_the_prompts():
    settings = Settings(10, 4, 8, (0.0, 1.0), 5, 0)
    assert settings.shards == 3
    assert [list(settings.indices(i)) for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert settings.samplings == [Sampling(0.0), Sampling(1.0)]
