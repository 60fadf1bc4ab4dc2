"""DSpark checkpoints: DeepSpec's layout, with its options at the top of the configuration, and that of speculators."""

from typing import Any

from drafters.checkpoints import common, dflash, files
from drafters.checkpoints.files import Loaded, Written
from drafters.draft_model import DraftModel
from specbench.errors import ConfigError
from specbench.model import CausalLM

KINDS = ("vanilla", "gated", "rnn")
FLAT = {"network.markov_head.": "", "network.confidence_head.": "confidence_proj."}


def read(path: str, target: CausalLM) -> Loaded:
    """A checkpoint for ``target``. Raises ConfigError for one of another kind, or that does not fit."""
    source = files.read(path)
    fields, ids = dflash.backbone(source, target, "DSpark")
    named = source.config.get("speculators_model_type") == "dspark"
    if not named and source.get("markov_rank", None, *dflash.NESTED) is None and not source.has(dflash.HEADS):
        raise common.refuse(source, "DSpark", "markov_head, confidence_head or markov_rank; use drafter=dflash")
    flat = "markov_w1.weight" in source.tensors  # ModelOpt
    w1, w2 = (source.tensor(f"{'' if flat else 'markov_head.'}markov_{name}.weight") for name in ("w1", "w2"))
    rank = source.get("markov_rank", 0 if w1 is None else w1.shape[1], *dflash.NESTED)
    kind = source.get("markov_head_type", "vanilla", *dflash.NESTED)
    if kind not in KINDS:
        raise ConfigError(
            f"drafter.checkpoint={source.name}: markov_head_type={kind} is unknown; known: {', '.join(KINDS)}"
        )
    if w1 is not None and len(w1) < target.vocab_size:
        raise ConfigError(
            f"drafter.checkpoint={source.name}: its sequential head knows {len(w1)} tokens, and {target.name} has "
            f"{target.vocab_size}"
        )
    confidence = source.tensor("confidence_proj.weight" if flat else "confidence_head.proj.weight")
    fields |= {
        "rank": rank,
        "kind": kind,
        "tokens": target.vocab_size if w1 is None else len(w1),
        "outputs": target.vocab_size if w2 is None else len(w2),
        # what is said to be there and is not will be found missing
        "confidence": confidence is not None or bool(source.get("enable_confidence_head", False, *dflash.NESTED)),
        "confidence_reads_token": confidence is not None and confidence.shape[1] > fields["shape"].width,
    }
    fields["confidence_temperatures"] = tuple(float(t) for t in source.get("confidence_temperatures", ()))
    names = {**FLAT, **dflash.NAMES, **FLAT} if flat else dflash.NAMES  # FLAT first, and nothing over it
    return Loaded(source, fields, names, ids, dflash.unused())


def write(model: DraftModel, spec: Any, target: CausalLM) -> Written:
    """In the speculators layout."""
    tensors, config = dflash.write_backbone(model, spec, target, "dspark")
    return Written(
        {
            "architectures": ["DSparkDraftModel"],
            **config,
            "markov_rank": spec.rank,
            "markov_head_type": spec.kind,
            "enable_confidence_head": spec.confidence,
            "confidence_head_with_markov": spec.confidence_reads_token,
            **({"confidence_temperatures": list(spec.confidence_temperatures)} if spec.confidence_temperatures else {}),
        },
        tensors,
    )
