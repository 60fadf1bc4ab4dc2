"""speculators 0.9 loads a head without embeddings of its own with whatever memory held. Environment: requirements*.txt.

    python scripts/parity/speculators_embeddings.py

It fills embeddings with NaN when a model is made, and takes the target's for those that are still NaN when a checkpoint
has been loaded (speculators/model.py, _load_verifier_weights). Under transformers 5 a model that is loaded is made
without memory, and what the file lacks gets memory later that nobody fills: the mark is gone, the target's are not
taken, and nothing is said. So our exports for speculators are written with ``ends=true``.
"""

import shutil
import tempfile
from contextlib import chdir
from pathlib import Path

import torch
from loguru import logger
from reference import VERIFIER, load_file, save_file, target_tables, write_verifier
from speculators.models.eagle3.core import Eagle3DraftModel

CASE = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "parity" / "eagle3_plain"
LOADS = 20


def main() -> None:
    logger.remove()
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch), torch.no_grad():
        write_verifier(Path(VERIFIER))
        shutil.copytree(CASE, "head")
        tensors = load_file("head/model.safetensors")
        theirs = tensors.pop("embed_tokens.weight")
        save_file(tensors, "head/model.safetensors", {"format": "pt"})
        right = 0
        for _ in range(LOADS):
            used = [torch.randn(theirs.shape) for _ in range(50)]
            del used  # memory that was used before, as in any longer process
            loaded = Eagle3DraftModel.from_pretrained("head").embed_tokens.weight
            right += torch.equal(loaded, target_tables()[0])
        print(
            f"of {LOADS} loads {right} gave the target's embeddings; the last has values up to {loaded.abs().max():.3g}"
        )


if __name__ == "__main__":
    main()
