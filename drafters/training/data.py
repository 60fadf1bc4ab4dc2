"""Make training data: prompts, by the target itself or from a set, and the target's replies.

    python -m drafters.training.data target=smollm2

A target learns nothing from this; its drafters learn what it says. The work is cut into shards, each of which depends
on the seed alone and appears whole or not at all: an interrupted run goes on where it was. Once all are there they are
joined, without prompts that repeat others or that the built-in evaluation set contains. Settings are those of
conf/training_data.yaml.
"""

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drafters.training import corpus
from drafters.training.asking import Asker
from drafters.training.corpus import Conversation, Corpus
from drafters.training.replies import Task, continue_all
from specbench import cli, provenance
from specbench.errors import ConfigError, RunError
from specbench.model import CausalLM
from specbench.prompts import PromptSet, load_builtin, overlap
from specbench.sampling import Sampling

SHARD = "shard-{:04d}.parquet"
STATE = "settings.json"
ROWS, ROWS_GPU = 64, 512  # texts continued together

Asked = tuple[int, str, str]  # number, kind and text of a prompt


@dataclass(frozen=True)
class Settings:
    """What the data depend on. prompts: how many are asked for, before any are dropped. shard: so many at a time.
    reply_tokens: most tokens of a reply. temperatures: each prompt is answered at each of them. held_out: the replies
    to every so-manieth prompt are kept for validation."""

    prompts: int
    shard: int
    reply_tokens: int
    temperatures: tuple[float, ...]
    held_out: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("prompts", "shard", "reply_tokens", "held_out"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value} is no whole number from 1 on")
        if type(self.seed) is not int:
            raise ConfigError(f"seed={self.seed} is no whole number")
        if self.held_out == 1:
            raise ConfigError("held_out=1 keeps all replies for validation and leaves none to train on; give 2 or more")
        if not self.temperatures:
            raise ConfigError("temperatures=[] answers nothing; give [0] for greedy replies, [0,1] for both kinds")

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.prompts // self.shard)

    @property
    def samplings(self) -> list[Sampling]:
        """One for each temperature. Raises ConfigError for what is none."""
        return [Sampling(temperature) for temperature in self.temperatures]

    def indices(self, shard: int) -> range:
        """The prompts of a shard."""
        return range(shard * self.shard, min((shard + 1) * self.shard, self.prompts))


def make_shard(
    target: CausalLM, prompts: PromptSet | None, settings: Settings, shard: int, rows: int, path: Path
) -> None:
    """Write a shard to ``path``, with the tokens written and the seconds taken for each stage."""
    began = time.perf_counter()
    if prompts is None:
        asked, written = _ask(target, settings, settings.indices(shard), rows)
    else:
        chosen = [(i, prompts.conversations[i]) for i in settings.indices(shard)]
        asked, written = [(i, c.category, c.turns[0]) for i, c in chosen], 0
    between = time.perf_counter()
    found = _answer(target, settings, asked, rows)
    stages = {
        "asked": len(settings.indices(shard)),
        "prompt_tokens": written,
        "prompt_seconds": round(between - began, 1),
        "reply_tokens": sum(len(c.reply) for c in found),
        "reply_seconds": round(time.perf_counter() - between, 1),
    }
    corpus.write_table(path, found, target.vocab_size, stages)


def _ask(target: CausalLM, settings: Settings, indices: Sequence[int], rows: int) -> tuple[list[Asked], int]:
    """Prompts that the target writes, and how many tokens it wrote for them."""
    asker = Asker(target)
    tasks = [asker.task(i, settings.seed) for i in indices]
    asked, written = [], 0
    for place, tokens in continue_all(target, tasks, asker.stop_ids, rows, settings.seed):
        written += len(tokens)
        text = asker.prompt(indices[place], settings.seed, tokens)
        if text is not None:
            asked.append((indices[place], asker.opening(indices[place], settings.seed)[0], text))
    return sorted(asked), written


def _answer(target: CausalLM, settings: Settings, asked: Sequence[Asked], rows: int) -> list[Conversation]:
    """The target's replies to the prompts that fit its context."""
    tasks, found = [], []
    for index, kind, text in asked:
        prompt = target.encode([{"role": "user", "content": text}])
        if target.context is None or len(prompt) + settings.reply_tokens <= target.context:
            tasks += [
                (kind, Task(f"{index:06d}/{s.temperature:g}", prompt, s, settings.reply_tokens))
                for s in settings.samplings
            ]
    for place, reply in continue_all(target, [task for _, task in tasks], target.eos_ids, rows, settings.seed):
        kind, task = tasks[place]
        found.append(Conversation(task.uid, kind, task.sampling.temperature, task.prompt, reply))
    return sorted(found, key=lambda c: c.id)


def join(folder: Path, target: CausalLM, settings: Settings, facts: Mapping[str, Any]) -> Corpus:
    """Make one corpus of the shards in ``folder``, less what is repeated or reserved for evaluation."""
    numbers = [i for i in range(settings.shards) if (folder / SHARD.format(i)).exists()]  # all, unless time ran out
    shards = [folder / SHARD.format(i) for i in numbers]
    found = [c for path in shards for c in corpus.read_table(path)]
    found = [c for c in found if int(c.id.split("/")[0]) < settings.prompts]  # more may have been asked for before
    if not found:
        raise RunError("no prompt was of use, so there is nothing to train on; ask for more: prompts=NUMBER")
    by_prompt: dict[str, list[Conversation]] = {}
    for conversation in found:
        by_prompt.setdefault(conversation.id.split("/")[0], []).append(conversation)
    texts = _bare_texts(target, [answers[0] for answers in by_prompt.values()])
    shared = overlap.overlapping(texts, [turn for c in load_builtin().conversations for turn in c.turns])
    repeated = list(overlap.repetitions(texts))
    kept = [answers for answers, s, r in zip(by_prompt.values(), shared, repeated, strict=True) if not s and not r]
    if len(kept) < 2:
        raise RunError(
            f"of {len(by_prompt)} prompts {len(kept)} is left without those that repeat others or are in the "
            "evaluation set: too few to train on and to validate; ask for more: prompts=NUMBER"
        )
    every = min(settings.held_out, len(kept))
    conversations = [replace(c, held_out=i % every == every - 1) for i, answers in enumerate(kept) for c in answers]
    dropped = {
        "unusable": sum(len(settings.indices(i)) for i in numbers) - len(by_prompt),
        "in_evaluation": sum(shared),
        "repeated": sum(r and not s for s, r in zip(shared, repeated, strict=True)),
    }
    stages = [corpus.read_facts(path) for path in shards]
    speeds = {name: sum(stage[name] for stage in stages) for name in stages[0]}
    return corpus.write(folder, conversations, target, {**facts, "dropped": dropped, "written": speeds})


def _bare_texts(target: CausalLM, conversations: Sequence[Conversation]) -> list[str]:
    """What the prompts say, without what a chat template puts around all of them."""
    prompts = [list(c.prompt) for c in conversations]
    if len(prompts) < 2:
        return [target.tokenizer.decode(prompt) for prompt in prompts]
    before = _shared(prompts)
    after = _shared([prompt[before:][::-1] for prompt in prompts])
    return [target.tokenizer.decode(prompt[before : len(prompt) - after]) for prompt in prompts]


def _shared(texts: Sequence[list[int]]) -> int:
    """How many tokens all ``texts`` begin with."""
    first, last = min(texts), max(texts)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def run(cfg: DictConfig) -> None:
    """What the command line asks for."""
    plain = {f.name: cfg[f.name] for f in fields(Settings)}
    if not OmegaConf.is_list(cfg.temperatures):
        raise ConfigError(f"temperatures={cfg.temperatures} is no list; write temperatures=[0,1]")
    if any(isinstance(t, bool) or not isinstance(t, int | float) for t in cfg.temperatures):
        raise ConfigError(f"temperatures={cfg.temperatures} are no numbers; write temperatures=[0,1]")
    settings = Settings(**{**plain, "temperatures": tuple(float(t) for t in cfg.temperatures)})
    _ = settings.samplings  # refuse now what is no temperature
    prompts = None if cfg.source is None else cli.make(cfg.source)
    if prompts is not None:  # each is asked once
        settings = replace(settings, prompts=min(settings.prompts, len(prompts.conversations)))
    if cfg.minutes is not None and not cfg.minutes > 0:
        raise ConfigError(f"minutes={cfg.minutes} must be above 0, or null for no limit")
    if cfg.workers is not None and (type(cfg.workers) is not int or cfg.workers < 1):
        raise ConfigError(f"workers={cfg.workers} is no whole number from 1 on; null takes a core each")
    target: CausalLM = cli.make(cfg.target)
    if prompts is None:
        Asker(target)  # refuse now what cannot be asked
    folder = Path(str(cfg.out or corpus.default_folder(target)))
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        _same_question(folder, target, settings, prompts)
        missing = [i for i in range(settings.shards) if not _sound(folder / SHARD.format(i), len(settings.indices(i)))]
        rows = cfg.rows or (ROWS_GPU if target.device.type == "cuda" else ROWS)
        workers = cfg.workers or (1 if target.device.type == "cuda" else torch.get_num_threads())
        jobs = _in_time([Job(folder, settings, i, rows) for i in missing], cfg.minutes)
        made = (
            _in_turn(target, prompts, jobs)
            if min(workers, len(missing)) < 2
            else _side_by_side(OmegaConf.to_container(cfg, resolve=True), jobs, min(workers, len(missing)))
        )
        _show(made, settings.shards, len(missing))
        asked = "the target itself" if prompts is None else f"{prompts.name} {prompts.sha256}"
        facts = {
            "settings": asdict(settings),
            "source": asked,
            "rows": rows,
            "made_by": provenance.collect("drafters.training.data"),
        }
        done = join(folder, target, settings, facts)
    counts = done.manifest["counts"]
    cli.out.print(
        f"{folder}: {counts['conversations']} conversations, {counts['reply_tokens']} reply tokens, "
        f"{counts['held_out']} conversations held out",
        highlight=False,
        soft_wrap=True,
    )


@dataclass(frozen=True)
class Job:
    """A shard to be made."""

    folder: Path
    settings: Settings
    shard: int
    rows: int

    def do(self, target: CausalLM, prompts: PromptSet | None) -> Path:
        """Make it; returns its file."""
        path = self.folder / SHARD.format(self.shard)
        make_shard(target, prompts, self.settings, self.shard, self.rows, path)
        return path


def _in_time(jobs: Sequence[Job], minutes: float | None) -> Iterator[Job]:
    """The jobs, as long as there is time to begin another; always the first."""
    began = time.monotonic()
    for number, job in enumerate(jobs):
        if number and minutes is not None and time.monotonic() - began > 60 * minutes:
            return
        yield job


def _in_turn(target: CausalLM, prompts: PromptSet | None, jobs: Iterator[Job]) -> Iterator[Path]:
    for job in jobs:
        yield job.do(target, prompts)


def _side_by_side(config: Any, jobs: Iterator[Job], workers: int) -> Iterator[Path]:
    """Shards by several processes of one thread each: threads that wait for each other would waste their cores."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _load, (config,)) as pool:
        try:
            running = {pool.submit(_work, job) for job in itertools.islice(jobs, workers)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    running |= {pool.submit(_work, job) for job in itertools.islice(jobs, 1)}
                    yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _load(config: Any) -> None:
    """Ready a worker process."""
    global _loaded
    torch.set_num_threads(1)
    cli.quiet()
    cfg = OmegaConf.create(config)
    _loaded = cli.make(cfg.target), None if cfg.source is None else cli.make(cfg.source)


def _work(job: Job) -> Path:
    return job.do(*_loaded)


_loaded: tuple[CausalLM, PromptSet | None]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunError(f"another process is making data in {folder}") from None
    try:
        yield
    finally:
        lock.release()


def _same_question(folder: Path, target: CausalLM, settings: Settings, prompts: PromptSet | None) -> None:
    """Raise ConfigError if the folder holds shards of other data."""
    question: dict[str, Any] = {
        "target": corpus.identity(target),
        "dtype": str(target.dtype),
        "settings": {**asdict(settings), "temperatures": list(settings.temperatures)},
        "source": None if prompts is None else prompts.sha256,
    }
    del question["settings"]["prompts"]  # more can be asked for later
    state = folder / STATE
    if not state.exists():
        state.write_text(json.dumps(question, indent=1) + "\n")
        return
    found = json.loads(state.read_text())
    corpus.check_target(found["target"], target, f"out={folder}", "give another folder as out=")
    if settings_of(found) != settings_of(question):
        differing = [
            name for name in settings_of(question) if settings_of(found).get(name) != settings_of(question)[name]
        ]
        raise ConfigError(
            f"out={folder} holds data made with other settings ({', '.join(differing)}); give another folder, or "
            "remove it"
        )


def settings_of(question: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a question, in one flat dictionary."""
    return {**question["settings"], "source": question["source"], "dtype": question["dtype"]}


def _sound(path: Path, asked: int) -> bool:
    """Whether a shard is there, whole, and of no fewer prompts than are ``asked`` for."""
    if not path.exists():
        return False
    try:
        corpus.read_table(path)
        sound = corpus.read_facts(path)["asked"] >= asked
    except (ConfigError, KeyError):
        sound = False
    if not sound:
        path.unlink()
    return sound


def _show(made: Iterator[Path], total: int, missing: int) -> None:
    """Wait for the shards, showing how far they are."""
    columns = (
        TextColumn("shards"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    terminal = cli.err.is_terminal
    began, tokens = time.perf_counter(), 0
    with Progress(*columns, console=cli.err, disable=not terminal, transient=True) as bar:
        task = bar.add_task("", total=total, completed=total - missing, speed="")
        for path in made:
            tokens += int(corpus.read_facts(path)["reply_tokens"])
            speed = f"{tokens / (time.perf_counter() - began):.0f} reply tokens/s"
            bar.update(task, advance=1, speed=speed)
            if not terminal:
                cli.err.print(f"{path.name} of {total}: {speed}", highlight=False)


if __name__ == "__main__":
    sys.exit(cli.run_command("training_data", run))
