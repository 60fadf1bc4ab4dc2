"""Is specbench right, and fast, on this machine's GPU? ``bash scripts/gpu_check.sh``: minutes, nothing is downloaded.

Part 1, correctness: tiny random models of every family in float32 and bfloat16, every drafter that needs no checkpoint.
Text must be that of plain decoding (in bfloat16 it may part at a near-tie); recorded forwards must be the direct ones.
Part 2, speed: a model of the shape of Llama 3.1 8B in bfloat16. Its weights are random, but wired so that it counts in
a circle (``count_in_circles``): that text has no near-ties, and every drafter guesses it. So tokens per pass are
the best there can be and say nothing about real text; the times of forwards and of all that is around them do.

Prints a table and writes gpu_check.json. Exit codes: 0 done, whatever the speed; 1 a check failed or a measurement
broke off; 2 nothing could be run.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from drafters import eagle
from drafters.dflash import DFlash
from drafters.dspark import DSpark
from drafters.eagle import Eagle
from drafters.eagle1 import Eagle1
from drafters.medusa import Medusa
from drafters.mtp import Mtp
from drafters.ngram import NGram
from drafters.none import NoDrafter
from drafters.oracle import Oracle
from drafters.small_lm import SmallLM
from drafters.suffix import Suffix
from specbench import provenance
from specbench.cache import RaggedCache
from specbench.decoding import PARTS, Step, decode
from specbench.drafting import Drafter, Request
from specbench.errors import ConfigError
from specbench.losslessness import divergence
from specbench.model import ROUNDING, CausalLM
from specbench.sampling import Sampling
from specbench.stopping import StopRule
from specbench.targets import TINY, byte_tokenizer, load_tiny, resolve_device

DTYPES = ("float32", "bfloat16")
PROMPTS = ("abc abc abd abc abc abd ab", "one two one two one", "x")  # uneven, with repeats for n-grams to find
NEW = 24  # tokens after each of these prompts
KS = (1, 4)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)
SEED = 0

CIRCLE = 16  # tokens
FIRST_CIRCLE = 17  # the circles before it hold the bytes and marks of the tokenizer
DRAFTED = 4  # k of every method that is timed
WIDTHS = {1: (1, 2, 3, 4, 5, 8, 16), 8: (1, 2, 3, 4, 5)}  # batch size: tokens a row of the forwards that are timed

LEAST_OF_BOUND = 70.0  # %: plain decoding at batch 1, of what memory bandwidth allows
MOST_VERIFY = 1.1  # x: a forward of 5 tokens a row over one of 1
MOST_OUTSIDE = 3.0  # %: of a round, outside the forwards of target and drafter


class CheckError(Exception):
    """A check did not hold; says how."""


@dataclass(frozen=True)
class Check:
    """A line of part 1; ``note`` is the reason of a failure, or what is worth knowing of a success."""

    name: str
    ok: bool
    note: str


@dataclass(frozen=True)
class Number:
    """A measured value with its unit and, where there is one, the target it is held against and how it came out."""

    value: float
    unit: str
    target: str
    verdict: str


@dataclass
class Report:
    """All that was found so far, kept on disk. ``failure``: why a part broke off. ``elapsed_s``: seconds of each."""

    path: Path
    facts: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    numbers: dict[str, Number] = field(default_factory=dict)
    elapsed_s: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    finished: bool = False

    @property
    def sound(self) -> bool:
        """Whether every check held and nothing broke off."""
        return self.failure is None and all(check.ok for check in self.checks)

    def check(self, name: str, work: Callable[[], str]) -> None:
        """Note whether ``work``, which returns a note, runs without an exception; whatever goes wrong is one line."""
        try:
            found = Check(name, True, work())
        except Exception as error:
            found = Check(name, False, str(error) if isinstance(error, CheckError) else describe(error))
        self.checks.append(found)
        print(f"{'ok    ' if found.ok else 'FAILED'} {name}{': ' if found.note else ''}{found.note}", flush=True)
        self.save()

    def number(self, name: str, value: float, unit: str, least: float | None = None, most: float | None = None) -> None:
        """Note a value, and whether it keeps its target, if it has one: at least ``least`` or at most ``most``."""
        target = verdict = ""
        if least is not None:
            target, verdict = f"at least {least:g} {unit}", "pass" if value >= least else "below target"
        if most is not None:
            target, verdict = f"at most {most:g} {unit}", "pass" if value <= most else "below target"
        self.numbers[name] = Number(value, unit, target, verdict)
        self.save()

    def timed(self, part: str, work: Callable[[], None]) -> None:
        """Run a part of the whole; what breaks it off is noted, and what was found before stays."""
        began = perf_counter()
        try:
            work()
        except Exception as error:
            self.failure = f"{part}: {describe(error)}"
            print(f"broke off: {self.failure}", flush=True)
        self.elapsed_s[part] = round(perf_counter() - began, 1)
        print(f"{part} took {self.elapsed_s[part]} s\n", flush=True)
        self.save()

    def save(self) -> None:
        """Write the JSON, whole or not at all."""
        kept = {key: value for key, value in asdict(self).items() if key not in ("path", "facts")}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        scratch.write_text(json.dumps({**self.facts, "sound": self.sound, **kept}, indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.path)

    def table(self) -> str:
        """The numbers in columns, and how many checks held."""
        rows = [(name, f"{n.value:.4g} {n.unit}", n.target, n.verdict) for name, n in self.numbers.items()]
        wide = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = [f"{a:<{wide[0]}}  {b:>{wide[1]}}  {c:<{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]
        wrong = sum(not check.ok for check in self.checks)
        lines.append(f"\nchecks: {len(self.checks) - wrong} ok, {wrong} FAILED")
        below = sum(number.verdict == "below target" for number in self.numbers.values())
        lines.append(f"{below} numbers are below target; that is a finding about this machine or code, not a failure")
        return "\n".join([*lines, f"broke off: {self.failure}"] if self.failure else lines)


def describe(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def run(
    lm: CausalLM, drafter: Drafter, requests: Sequence[Request], k: int, law: Sampling, new: int, split: bool = False
) -> tuple[list[list[int]], list[Step]]:
    """Replies of ``new`` tokens to ``requests``, decoded together by a ``drafter`` bound to ``lm``, and the rounds
    after the prefill."""
    steps = list(decode(lm, drafter, requests, k, law, SEED, StopRule(new), split=split))
    replies: list[list[int]] = [[] for _ in requests]
    for step in steps:
        for row, committed in zip(step.rows, step.committed, strict=True):
            replies[row] += committed
    return replies, steps[1:]


# part 1: correctness


def correctness(report: Report, device: torch.device) -> None:
    """Every family in every precision; whatever keeps one from being checked at all is one failed line."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    for family in TINY:
        for dtype in DTYPES:
            load = partial(load_tiny, family, dtype=dtype, device=str(device))
            report.check(f"{family} {dtype}: all was run", partial(check_family, report, f"{family} {dtype}", load))


def check_family(report: Report, label: str, load: Callable[..., CausalLM]) -> str:
    """All checks of a family in one precision, a line each."""
    lm, plain, small = load(), load(engine="plain"), load(seed=1)
    requests = [Request(f"prompt {i}", lm.tokenizer(text).input_ids) for i, text in enumerate(PROMPTS)]

    def referenced(law: Sampling, *groups: Sequence[Request]) -> list[list[Request]]:
        """Groups of requests with what plain decoding makes of each group."""
        replies = [run(lm, NoDrafter(), group, 0, law, NEW)[0] for group in groups]
        return [
            [replace(request, reference=reply) for request, reply in zip(group, said, strict=True)]
            for group, said in zip(groups, replies, strict=True)
        ]

    alone = [group[0] for group in referenced(GREEDY, *([request] for request in requests))]
    groups = referenced(GREEDY, requests, requests[:1])
    report.check(f"{label}: none, batch 3 as batch 1", partial(check_text, lm, NoDrafter(), [alone]))
    drafters: dict[str, Drafter] = {
        "ngram": NGram(),
        "suffix": Suffix(),
        "oracle, 70 % right": Oracle(hit_rate=0.7),
        "small_lm": SmallLM(small),
        "small_lm, the target itself": SmallLM(lm),
        # heads that are not trained: nearly all they draft is wrong, and no text may show it
        "eagle": Eagle(network=eagle.Options(vocabulary=128)),
        "eagle1": Eagle1(),
        "mtp": Mtp(),
        "mtp, depths": Mtp(depths=max(KS)),
        "medusa": Medusa(),
        "dflash": DFlash(),
        "dspark": DSpark(),
    }
    sampling = {"small_lm, proposal=sample": SmallLM(small, proposal="sample")}
    for name, drafter in {**drafters, **sampling}.items():
        report.check(f"{label}: {name}", partial(check_text, lm, drafter, groups))
    report.check(f"{label}: recorded forwards", partial(check_recording, lm))
    if lm.dtype == torch.float32:  # in bfloat16 other ways to compute the same part at every other prompt
        report.check(f"{label}: engine=plain", partial(check_text, plain, NoDrafter(), groups))
        groups = referenced(SAMPLED, requests, requests[:1])
        for name, drafter in drafters.items():
            report.check(f"{label}: {name}, temperature 1", partial(check_text, lm, drafter, groups, SAMPLED))
        report.check(f"{label}: sampled drafts, temperature 1", partial(check_sampled_drafts, lm, requests))
    return ""


def check_text(lm: CausalLM, drafter: Drafter, groups: Sequence[Sequence[Request]], law: Sampling = GREEDY) -> str:
    """Each group, decoded together with each draft length, must say what its references say."""
    forgiven = []
    drafter.bind(lm)
    for group in groups:
        for k in KS if drafter.max_k is None else (drafter.max_k,):
            replies, _ = run(lm, drafter, group, k, law, NEW)
            for request, reply in zip(group, replies, strict=True):
                parted = divergence(lm, request.uid, request.tokens, request.reference or [], reply, law, SEED)
                if parted is None:
                    continue
                if lm.dtype == torch.float32 or parted.verdict == "mismatch":
                    raise CheckError(
                        f"batch {len(group)}, k={k}, {request.uid}: not plain decoding's from token {parted.position} "
                        f"on, by a margin of {parted.margin:.3g} where {parted.tolerance:.3g} may be rounding"
                    )
                forgiven.append(parted.margin / parted.tolerance)
    return f"{len(forgiven)} near-ties, margin up to {max(forgiven):.0%} of what may be rounding" if forgiven else ""


def check_sampled_drafts(lm: CausalLM, requests: Sequence[Request]) -> str:
    """Where a model samples drafts for itself the two laws are one, and every draft is accepted."""
    drafter = SmallLM(lm, proposal="sample")
    drafter.bind(lm)
    _, steps = run(lm, drafter, requests, max(KS), SAMPLED, NEW)
    proposed, accepted = (sum(sum(getattr(step, kind)) for step in steps) for kind in ("proposed", "accepted"))
    if accepted < proposed:
        raise CheckError(f"the target drafts for itself, and {accepted} of {proposed} drafts were accepted")
    return ""


def check_recording(lm: CausalLM) -> str:
    """Replays, at uneven lengths that change from pass to pass, against the same forwards run directly."""
    recorded, direct = (CausalLM(lm.model, lm.tokenizer, name=lm.name, record=record) for record in (True, False))
    ours = recorded.new_cache(2, 64)
    theirs = RaggedCache(2, ours.slots, lm.device, max_position=ours.max_position, whole=ours.whole)
    tokens = torch.randint(0, lm.vocab_size, (2, 64), generator=torch.Generator().manual_seed(SEED)).to(lm.device)
    for row, length in enumerate((5, 9)):
        recorded.prefill(tokens[row, :length], ours, row)
        direct.prefill(tokens[row, :length], theirs, row)
    worst = 0.0
    for start, steps in enumerate((1, 5, 1, 5, 5, 1)):
        block = tokens[:, start : start + steps].contiguous()
        output, right = recorded.forward(block, ours, taps=(1,)), direct.forward(block, theirs, taps=(1,))
        for a, b in ((output.logits, right.logits), (output.taps, right.taps)):
            assert a is not None
            assert b is not None
            off = ((a.float() - b.float()).square().mean().sqrt() / b.float().std()).item()
            if not off <= ROUNDING[lm.dtype]:
                raise CheckError(f"a replay of {steps} tokens a row is off by {off:.1%} of the spread of what is right")
            worst = max(worst, off)
        for cache in (ours, theirs):
            cache.advance(torch.tensor([1, steps]))
    if not len(ours.recordings):
        raise CheckError("forwards cannot be recorded, so each is launched kernel by kernel; the warning says why")
    return f"off by {worst:.1e} of the spread" if worst else "bit for bit"


# part 2: speed


@dataclass(frozen=True)
class Size:
    """A Llama and how long to time it. ``cached``: tokens before the first that is timed; ``new``: tokens decoded;
    ``probe``: bytes of the tensor that memory bandwidth is measured with. The drafter has ``draft_layers`` layers."""

    layers: int
    draft_layers: int
    shape: dict[str, int]
    cached: int
    new: int
    repeats: int
    probe: int


LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LLAMA_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {
    "8b": Size(32, 4, LLAMA_8B, cached=512, new=128, repeats=20, probe=1 << 32),
    "tiny": Size(2, 1, LLAMA_TINY, cached=32, new=20, repeats=3, probe=1 << 20),
}


def speed(report: Report, size: Size, device: torch.device) -> None:
    """All numbers, and that the text of this model is right too."""
    bandwidth = measure_bandwidth(report, size, device)
    lm = build(size, size.layers, device, seed=0)
    report.check("speed model: rotary frequencies", partial(check_rotary, lm))
    slot_bytes = 2 * 2 * size.layers * size.shape["num_key_value_heads"] * size.shape["head_dim"]  # of keys and values
    for batch, widths in WIDTHS.items():
        requests = counting(size, batch)
        passes = time_passes(lm, size, requests, widths)
        for width, seconds in passes.items():
            name = f"forward, batch {batch}, {width} tokens a row"
            report.number(name, 1e3 * seconds, "ms")
            least_bytes = lm.pass_bytes + batch * size.cached * slot_bytes  # each read once
            report.number(f"{name}: of memory bandwidth", 100 * least_bytes / seconds / bandwidth, "%")
        report.number(f"forward, batch {batch}, 5 tokens over 1", passes[5] / passes[1], "x", most=MOST_VERIFY)

        plain = time_rounds(report, "none", lm, NoDrafter(), 0, requests, passes)
        report.number(f"plain decoding, batch {batch}", batch / plain, "tokens/s")
        if batch == 1:
            bound = bandwidth / (lm.pass_bytes + (size.cached + size.new / 2) * slot_bytes)  # tokens/s
            report.number(
                "plain decoding, batch 1, of the bandwidth bound", 100 / plain / bound, "%", least=LEAST_OF_BOUND
            )
        for name, drafter in {"ngram": NGram(), "oracle": Oracle()}.items():
            seconds = time_rounds(report, name, lm, drafter, DRAFTED, requests, passes)
            report.number(f"{name}, batch {batch}: speedup, every draft right", plain / seconds, "x")
        if batch == 1:
            small = build(size, size.draft_layers, device, seed=1)
            steps = time_passes(small, size, requests, (1, 2))
            report.number("small_lm, batch 1: a draft step over a target step", steps[1] / passes[1], "x")
            drafting = steps[2] + (DRAFTED - 1) * steps[1]  # after a full accept it is two tokens behind
            time_rounds(report, "small_lm", lm, SmallLM(small), DRAFTED, requests, passes, drafting)


def measure_bandwidth(report: Report, size: Size, device: torch.device) -> float:
    """Bytes a second that device memory gives: the better of reading a large tensor and of copying it."""
    source = torch.rand(size.probe // 4, device=device)
    copy = torch.empty_like(source)
    read = size.probe / median(device_seconds(source.sum, device) for _ in range(size.repeats))
    both = 2 * size.probe / median(device_seconds(partial(copy.copy_, source), device) for _ in range(size.repeats))
    report.number("memory, read by a sum", read / 1e9, "GB/s")
    report.number("memory, read and written by a copy", both / 1e9, "GB/s")
    return max(read, both)


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work`` by the GPU's own clock; by the host's where there is none."""
    if device.type != "cuda":
        began = perf_counter()
        work()
        return perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def build(size: Size, layers: int, device: torch.device, seed: int) -> CausalLM:
    """A random Llama, made on the device in bfloat16, that counts in circles."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        **size.shape,
        num_hidden_layers=layers,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    count_in_circles(model)
    return CausalLM(model, tokenizer, name=f"random llama of {layers} layers")


@torch.no_grad()
def count_in_circles(model: Any) -> None:
    """Make each token's likeliest follower the next of its circle of CIRCLE tokens, by a wide margin.

    The output row of a token is the input row of the one before it, and the blocks add little to the residual stream.
    """
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    table.normal_()
    head.copy_(table.view(-1, CIRCLE, table.shape[1]).roll(1, dims=1).view(table.shape)).mul_(table.shape[1] ** -0.5)
    for block in model.model.layers:
        block.self_attn.o_proj.weight.mul_(0.01)
        block.mlp.down_proj.weight.mul_(0.01)


def counting(size: Size, batch: int) -> list[Request]:
    """Prompts of ``cached`` tokens that count, each row in its own circle, and how they go on."""
    requests = []
    for row in range(batch):
        text = [CIRCLE * (FIRST_CIRCLE + row) + i % CIRCLE for i in range(size.cached + size.new)]
        requests.append(Request(f"row {row}", text[: size.cached], reference=text[size.cached :]))
    return requests


def check_rotary(lm: CausalLM) -> str:
    """Rotary frequencies are those of the configuration, in float32 whatever the precision of the weights."""
    found, width = lm.model.model.rotary_emb.inv_freq, lm.config.head_dim
    right = 500000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    off = (found.cpu().double() / right - 1).abs().max().item()
    if found.dtype != torch.float32 or not off < 1e-5:
        raise CheckError(f"they are {found.dtype} and off by up to {off:.1e} of their size")
    return ""


def time_passes(lm: CausalLM, size: Size, requests: Sequence[Request], widths: Sequence[int]) -> dict[int, float]:
    """Median seconds of a forward of each number of tokens a row after the prompts; they take turns."""
    cache = lm.new_cache(len(requests), size.cached + size.new + max(widths), steps=max(widths))
    for row, request in enumerate(requests):
        lm.prefill(torch.tensor(request.tokens, device=lm.device), cache, row)
    following = torch.tensor([request.tokens[:CIRCLE] for request in requests], device=lm.device)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(size.repeats + 2):
        for width in widths:
            block = following[:, :width].contiguous()
            wait(lm.device)
            began = perf_counter()
            lm.forward(block, cache)
            wait(lm.device)
            seconds[width].append(perf_counter() - began)
    lm.recycle(cache)
    return {width: median(values[2:]) for width, values in seconds.items()}  # the first two warm up


def wait(device: torch.device) -> None:
    """Let the GPU finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_rounds(
    report: Report,
    name: str,
    lm: CausalLM,
    drafter: Drafter,
    k: int,
    requests: Sequence[Request],
    passes: dict[int, float],
    drafting: float = 0.0,
) -> float:
    """Seconds per token of a row, and where a round's time goes: by its parts, where the device is waited for between
    them, and undisturbed, by what is left when the time of the same forwards alone is taken off. ``passes``: seconds of
    the target's forward by width; ``drafting``: seconds of the drafter's forwards in a round."""
    label, new = f"{name}, batch {len(requests)}", len(requests[0].reference or [])
    drafter.bind(lm)
    replies, _ = run(lm, drafter, requests, k, GREEDY, new)  # also warms up
    report.check(f"speed model: {label}", partial(check_counting, requests, replies))
    steps = [step for _ in range(3) for step in run(lm, drafter, requests, k, GREEDY, new)[1]]
    forwards = [passes[1 + max(map(len, step.drafted))] + drafting for step in steps]
    outside = median(1 - known / step.seconds for known, step in zip(forwards, steps, strict=True))
    report.number(f"{label}: round", 1e3 * median(step.seconds for step in steps), "ms")
    report.number(f"{label}: outside forwards", 100 * outside, "%", most=MOST_OUTSIDE)
    split = run(lm, drafter, requests, k, GREEDY, new, split=True)[1]
    for part in PARTS:
        share = median(step.parts[part] / step.seconds for step in split if step.parts)
        report.number(f"{label}: split, {part}", 100 * share, "%")
    tokens = sum(len(committed) for step in steps for committed in step.committed) / len(requests)
    report.number(f"{label}: tokens per pass", tokens / len(steps), "tokens")
    return sum(step.seconds for step in steps) / tokens


def check_counting(requests: Sequence[Request], replies: Sequence[Sequence[int]]) -> str:
    """Every row must go on counting."""
    for request, reply in zip(requests, replies, strict=True):
        if list(reply) != list(request.reference or []):
            raise CheckError(f"{request.uid} goes on with {list(reply)[:CIRCLE]}, not {request.tokens[:CIRCLE]}")
    return ""


# the whole


def facts(device: torch.device, size: str) -> dict[str, Any]:
    """What the numbers were measured on and with."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else provenance.machine()["cpu"],
        "driver": driver() if on_gpu else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": provenance.now(),
        "size": size,
        "machine": provenance.machine(),
        "code_sha256": provenance.code_sha256(),
        "git": provenance.git_state(),
    }


def driver() -> str | None:
    """Version of the NVIDIA driver, if nvidia-smi is there to tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--size", default="8b", choices=SIZES, help="of the model of part 2; tiny is a dry run")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_check"), help="folder to write to")
    parser.add_argument("--skip-speed", action="store_true", help="part 1 only")
    arguments = parser.parse_args(argv)
    try:
        device = resolve_device(arguments.device)
        if device.type != "cuda" and arguments.size == "8b":
            raise ConfigError(
                "--size 8b needs an NVIDIA GPU, and the device is the CPU; for a dry run type: "
                "bash scripts/gpu_check.sh --device cpu --size tiny"
            )
    except ConfigError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    report = Report(arguments.out / "gpu_check.json", facts(device, arguments.size))
    print(f"{report.facts['device']}, torch {torch.__version__}, transformers {transformers.__version__}\n", flush=True)
    report.timed("correctness", partial(correctness, report, device))
    if not arguments.skip_speed:
        report.timed("speed", partial(speed, report, SIZES[arguments.size], device))
    report.finished = True
    report.save()
    print(f"{report.table()}\n{report.path}")
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
