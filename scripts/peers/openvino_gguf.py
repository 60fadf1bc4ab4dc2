"""OpenVINO GenAI on the GGUF file, 4-bit weights kept. Arguments: GGUF file, number of prompt-lookup drafts (0: plain
decoding), longest n-gram."""

import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Jobs, serve


def start() -> tuple[Jobs, dict[str, str]]:
    gguf, k, max_n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    engine = openvino_genai.LLMPipeline(gguf, "CPU", **({"prompt_lookup": True} if k else {}))

    def generate(tokens: list[int], new: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        if k:
            config.num_assistant_tokens, config.max_ngram_size = k, max_n
        ids = openvino.Tensor(np.array([tokens], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(tokens)), dtype=np.int64))
        began = time.perf_counter()
        out = engine.generate(openvino_genai.TokenizedInputs(ids, mask), config)
        return {"seconds": time.perf_counter() - began, "tokens": list(out.tokens[0])}

    return {"generate": generate}, {"openvino-genai": openvino_genai.__version__}


if __name__ == "__main__":
    serve(start)
