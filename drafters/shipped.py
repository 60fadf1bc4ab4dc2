"""Trained drafters that come with the project, one set per target: found by the target's files, not by its name.

drafters/pretrained/<set>/target.json      the target they were trained for
drafters/pretrained/<set>/<family>/        a checkpoint, and the card that says where it is from
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from specbench.errors import ConfigError
from specbench.model import CausalLM

SHIPPED = "shipped"  # what a configuration says instead of a folder
HOME = Path(__file__).parent / "pretrained"
TARGET = "target.json"


def home(target: CausalLM) -> Path | None:
    """The folder of the set for ``target``; None if there is none."""
    for path in sorted(HOME.glob(f"*/{TARGET}")):
        if json.loads(path.read_text())["files"] == dict(target.files):
            return path.parent
    return None


def find(family: str, target: CausalLM, setting: str) -> str:
    """The shipped checkpoint of a family. Raises ConfigError, which says how to train one, where there is none.

    ``setting``: what a user sets to another folder."""
    folder = home(target)
    if folder is None or not (folder / family / "config.json").exists():
        raise ConfigError(
            f"no {family} comes with specbench for {target.name}. Train one: python -m drafters.training "
            f"drafter={family} target=…, and use it: {setting}=FOLDER"
        )
    return str(folder / family)


def prompts_of(checkpoint: str | None, target: CausalLM) -> Sequence[str]:
    """Texts of the prompts that the drafter in this folder was trained on, if the data lie beside it and are those that
    its card names."""
    try:
        home = Path(str(checkpoint))
        table = json.loads((home / "card.json").read_text())["data"]["table_sha256"]
        data = home.parent / "data"
        if json.loads((data / "manifest.json").read_text())["table_sha256"] != table:
            return ()
    except (OSError, ValueError, KeyError):
        return ()
    return _texts(data / "conversations.parquet", target.tokenizer)


@cache
def _texts(table: Path, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    prompts = set(map(tuple, pq.read_table(table, columns=["prompt"])["prompt"].to_pylist()))
    return tokenizer.batch_decode([list(prompt) for prompt in sorted(prompts)], skip_special_tokens=True)
