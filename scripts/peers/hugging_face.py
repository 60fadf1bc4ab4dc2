"""transformers' ``generate``: plain, prompt lookup, assisted. Arguments: model folder, dtype, assistant folder or -."""

import sys
import time
from typing import Any

import torch
import transformers
from protocol import Jobs, serve
from transformers import AutoModelForCausalLM


def start() -> tuple[Jobs, dict[str, str]]:
    folder, dtype, assistant_folder = sys.argv[1:]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def load(path: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        model.generation_config.eos_token_id = None  # every reply has the full length
        model.generation_config.pad_token_id = 0
        return model

    model = load(folder)
    assistant = None if assistant_folder == "-" else load(assistant_folder)

    @torch.inference_mode()
    def generate(tokens: list[int], new: int, **how: Any) -> dict[str, Any]:
        ids = torch.tensor([tokens])
        began = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=None, **how
        )
        return {"seconds": time.perf_counter() - began, "tokens": out[0, len(tokens) :].tolist()}

    def lookup(k: int, max_n: int, **request: Any) -> dict[str, Any]:
        return generate(**request, prompt_lookup_num_tokens=k, max_matching_ngram_size=max_n)

    def assisted(k: int, **request: Any) -> dict[str, Any]:
        # exactly k drafts a round, as ours: by default the assistant's confidence and luck shorten them
        assistant.generation_config.num_assistant_tokens = k
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        return generate(**request, assistant_model=assistant)

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return {"plain": generate, "ngram": lookup, "assisted": assisted}, versions


if __name__ == "__main__":
    serve(start)
