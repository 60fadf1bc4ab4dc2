"""Write a drafting head as a checkpoint that other software reads.

    python -m drafters.export drafter=eagle drafter.checkpoint=FOLDER target=smollm2 out=exported

EAGLE-3, DFlash, DSpark and MTP modules are written in the layout of speculators, which vLLM serves (MTP modules it
serves as MiMo's: ``layout=mimo``); EAGLE-1 and Medusa heads in that of their reference code. Settings are those of
conf/export.yaml.
"""

import sys
from pathlib import Path

from omegaconf import DictConfig
from torch import Tensor

from drafters import initial
from drafters.checkpoints import mtp
from drafters.checkpoints.files import Written
from drafters.dflash import DFlash
from drafters.draft_model import DraftModel
from drafters.dspark import DSpark
from drafters.eagle import Eagle
from drafters.mtp import Mtp
from drafters.neural import Neural
from specbench import cli
from specbench.errors import ConfigError
from specbench.model import CausalLM

LAYOUTS = ("mimo",)


def export(
    drafter: Neural, target: CausalLM, folder: Path, layout: str | None = None, ends: bool = False
) -> dict[str, str]:
    """Write what ``drafter`` drafts with for ``target`` to ``folder``; returns the SHA-256 of the files.

    ``layout``: see conf/export.yaml. ``ends``: the target's embeddings and output head are written as well, where the
    network has none of its own. Raises ConfigError for what the layout cannot say, or if the folder is there already.
    """
    model = drafter.build(target)
    written = _as_mimo(drafter, model, target) if layout else drafter.write(model, target)
    tensors = {**_ends(drafter, target), **written.tensors} if ends else written.tensors
    return Written(written.config, tensors).save(folder)


def _as_mimo(drafter: Neural, model: DraftModel, target: CausalLM) -> Written:
    if not isinstance(drafter, Mtp):
        raise ConfigError("layout=mimo is one of MTP modules; leave it out, or use drafter=mtp")
    return mtp.write_mimo(model, drafter.spec, target)


def _ends(drafter: Neural, target: CausalLM) -> dict[str, Tensor]:
    if not isinstance(drafter, Eagle | DFlash | DSpark):
        raise ConfigError("ends=true is for drafter=eagle, dflash or dspark; the other layouts have no place for them")
    table = target.model.get_input_embeddings().weight
    if initial.scales_embeddings(target):
        raise ConfigError(f"ends=true: {target.name} scales its embeddings, which the layout cannot say")
    head = initial.read_weight(target.model.get_output_embeddings(), target.width, target)
    return {"embed_tokens.weight": table.detach().cpu(), "lm_head.weight": head.cpu()}


def run(cfg: DictConfig) -> None:
    """What the command line asks for."""
    if cfg.layout is not None and cfg.layout not in LAYOUTS:
        raise ConfigError(f"layout={cfg.layout} is unknown; choices: null, {', '.join(LAYOUTS)}")
    folder = Path(str(cfg.out))
    drafter = cli.make(cfg.drafter)
    if not isinstance(drafter, Neural):
        raise ConfigError(
            f"{type(drafter).__name__} has no network to write; use eagle, eagle1, mtp, medusa, dflash, dspark"
        )
    files = export(drafter, cli.make(cfg.target), folder, cfg.layout, cfg.ends)
    cli.out.print(f"{folder}: {', '.join(files)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(cli.run_command("export", run))
