"""Cost of one speculative iteration over one plain decode step, on the CPU, in one process.

    python perf/iteration_cpu.py            writes perf/results/iteration_cpu-<device>.{json,md}

Models `toy-cpu` (V4 with DSpark) and `toy-cpu-v32` (V3.2 with MTP), random weights: the work of an iteration does not
depend on what is accepted. Both arms decode the same prompts; their steps alternate, and the plain arm is also timed
against itself to show the noise. The ratio is the mean accepted length at which speculation breaks even on this
machine. Gates: no memory kept and no array made by our code in an iteration after warm-up, ids equal in both arms.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime

from twostroke.builder.build import BuildOptions, build
from twostroke.engines.loading import LoadedEngine, load_engine_directory
from twostroke.perf.provenance import commit, device, processor
from twostroke.runtime.request import Request
from twostroke.runtime.runtime_config import RuntimeConfig
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.scheduler import Scheduler
from twostroke.tests.checkpoints import F4, T32, write_checkpoint

RESULTS = Path(__file__).parent / "results"
TABLE = "iteration_cpu"
BATCHES = (1, 2, 4, 8)
WARM_UP, MEASURED = 20, 200
PROMPT = 32
TRANSIENT_LIMIT = 4096  # bytes of Python objects an iteration may make and drop; any array is larger than what is left

TOY_CPU: dict[str, Any] = {
    **F4,
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "compress_ratios": [0, 4, 16, 4, 0, 0],
    "sliding_window": 16,
    "max_position_embeddings": 2048,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 511,
    "dspark_target_layer_ids": [2, 3],
    "dspark_markov_rank": 16,
}

TOY_CPU_V32: dict[str, Any] = {
    **T32,
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "max_position_embeddings": 2048,
}

MODELS = {"toy-cpu": TOY_CPU, "toy-cpu-v32": TOY_CPU_V32}


def scheduler(loaded: LoadedEngine, batch: int, draft_length: int | None) -> Scheduler:
    """A scheduler whose `batch` requests are all past prefill and have room for every measured step."""
    made = Scheduler(loaded, RuntimeConfig(max_batch_size=batch, max_num_tokens=64, draft_length=draft_length))
    rng = np.random.default_rng(0)
    rows = (loaded.manifest.speculative.draft_len if draft_length is None else draft_length) + 1
    for index in range(batch):
        prompt = tuple(int(t) for t in rng.integers(2, 500, PROMPT))
        params = SamplingParams(max_tokens=rows * (WARM_UP + 2 * MEASURED) + 100, seed=index, ignore_eos=True)
        made.submit(Request(str(index), prompt, params))
    while any(not entry.decoding for entry in made._entries.values()):
        made.step()
    return made


def timed(step: Any) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e6


def allocations(step: Any) -> tuple[int, int]:
    """Bytes kept after an iteration, and the most held at once within one; the smallest of twenty, so that a growing
    list of the caller does not count."""
    tracemalloc.start()
    kept, peaks = [], []
    for _ in range(20):
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        step()
        after, peak = tracemalloc.get_traced_memory()
        kept.append(after - before)
        peaks.append(peak - before)
    tracemalloc.stop()
    return max(0, min(kept)), min(peaks)


def measure(loaded: LoadedEngine, batch: int) -> dict[str, Any]:
    """One row of the table."""
    arms = {name: scheduler(loaded, batch, length) for name, length in (("plain", 0), ("again", 0), ("fast", None))}
    steps = {name: (lambda made=made: iterate(made)) for name, made in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(WARM_UP + MEASURED):
        for name, step in steps.items():
            took = timed(step)
            if index >= WARM_UP:
                times[name].append(took)
    kept, transient = allocations(steps["fast"])
    plain, fast = median(times["plain"]), median(times["fast"])
    return {
        "batch": batch,
        "plain_us_p50": round(plain, 1),
        "iteration_us_p50": round(fast, 1),
        "iteration_us_p10": round(float(np.percentile(times["fast"], 10)), 1),
        "iteration_us_p99": round(float(np.percentile(times["fast"], 99)), 1),
        "ratio": round(fast / plain, 3),
        "noise": round(median(times["again"]) / plain, 3),
        "retained_bytes": kept,
        "transient_bytes": transient,
    }


def iterate(made: Scheduler) -> None:
    """One iteration and the reading of its results, without the scheduler's bookkeeping of requests."""
    entries = list(made._running)
    reach = max(int(made.slots.position[slot]) for slot in entries) + 12
    made._iteration.launch(entries, reach)
    made._iteration.collect()


def ids_agree(loaded: LoadedEngine) -> bool:
    """Greedy ids of eight prompts, with and without speculation."""
    answers = []
    for length in (0, None):
        made = Scheduler(loaded, RuntimeConfig(max_batch_size=8, draft_length=length))
        rng = np.random.default_rng(1)
        for index in range(8):
            prompt = tuple(int(t) for t in rng.integers(2, 500, PROMPT))
            made.submit(Request(str(index), prompt, SamplingParams(max_tokens=64, seed=0, ignore_eos=True)))
        ids: dict[str, list[int]] = {}
        while made.has_work:
            for progress in made.step():
                ids.setdefault(progress.request_id, []).extend(progress.token_ids)
        answers.append(ids)
    return answers[0] == answers[1]


def nodes(folder: Path, steps: dict[str, Any]) -> dict[str, int]:
    """Nodes of each step's graph before the engine's own optimiser, constants not counted."""
    found = {}
    for name, step in steps.items():
        graph = onnx.load(folder / step.file, load_external_data=False).graph
        found[name] = sum(node.op_type != "Constant" for node in graph.node)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device())
    options = parser.parse_args()
    models = [model(name, values) for name, values in MODELS.items()]
    table = {
        "table": TABLE,
        "models": models,
        "device": options.device,
        "processor": processor(),
        "versions": {"python": platform.python_version(), "onnxruntime": onnxruntime.__version__},
        "commit": commit(),
    }
    RESULTS.mkdir(exist_ok=True)
    name = f"{TABLE}-{options.device}"
    (RESULTS / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")
    text = markdown(table)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
    passed = all(
        found["ids_identical"] and row["retained_bytes"] == 0 and row["transient_bytes"] < TRANSIENT_LIMIT
        for found in models
        for row in found["rows"]
    )
    return 0 if passed else 1


def model(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Everything the table says of one model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_checkpoint(folder / "checkpoint", values)
        manifest = build(folder / "checkpoint", folder / "engine", BuildOptions())
        loaded = load_engine_directory(folder / "engine")
        return {
            "model": name,
            "method": manifest.speculative.method,
            "draft_length": manifest.speculative.draft_len,
            "rows": [measure(loaded, batch) for batch in BATCHES],
            "ids_identical": ids_agree(loaded),
            "graph_nodes": nodes(folder / "engine", manifest.steps),
        }


def markdown(table: dict[str, Any]) -> str:
    lines = [
        f"# One iteration over one plain step on {table['device']}",
        "",
        f"{table['processor']}; onnxruntime {table['versions']['onnxruntime']}, Python {table['versions']['python']}, "
        f"commit {table['commit']}. Regenerate with `python perf/iteration_cpu.py`.",
        "",
        "The ratio is the mean accepted length (bonus included) at which speculation breaks even. Times are medians of "
        f"{MEASURED} steps after {WARM_UP}, one thread; noise is the plain arm over itself.",
    ]
    for found in table["models"]:
        counts = ", ".join(f"{name} {count}" for name, count in found["graph_nodes"].items())
        lines += [
            "",
            f"## {found['model']}: {found['method']}, {found['draft_length']} drafted tokens",
            "",
            "| batch | plain step us | iteration us (p10 / p50 / p99) | ratio | noise | kept bytes | transient bytes |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['batch']} | {r['plain_us_p50']:.0f} | {r['iteration_us_p10']:.0f} / {r['iteration_us_p50']:.0f} / "
            f"{r['iteration_us_p99']:.0f} | {r['ratio']:.2f} | {r['noise']:.2f} | {r['retained_bytes']} "
            f"| {r['transient_bytes']} |"
            for r in found["rows"]
        ]
        lines += [
            "",
            f"Graph nodes before the engine's optimiser: {counts}. Greedy ids "
            f"{'identical' if found['ids_identical'] else 'DIFFERENT'} with and without speculation.",
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
