"""The demo itself: the same prompts decoded plainly and with speculation, what each cost, and whether they agree."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from twostroke.engines.errors import ConfigError
from twostroke.engines.loading import load_engine_directory
from twostroke.runtime.demo.scoring import bits
from twostroke.runtime.llm import LLM
from twostroke.runtime.sampling_params import SamplingParams

Prompts = Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class HeldOutText:
    """Text nobody trained on: rows for `scoring.bits`, the bytes they score, what training recorded for all of it."""

    rows: Sequence[tuple[Sequence[int], int]]
    scored_bytes: int
    recorded: dict[str, float]


@dataclass(frozen=True)
class Completion:
    """One prompt's answer by one engine: ids, decode seconds after the first token, tokens per iteration."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    seconds: float
    tokens_per_iteration: float


def show(folder: Path, prompts: Prompts, held_out: HeldOutText, *, max_tokens: int, threads: int, as_json: bool) -> int:
    """Runs both arms over `prompts`, one at a time, and prints the comparison. Exit code 1 if the answers differ."""
    with _progress(as_json) as bar:
        plain, _ = _complete(folder, prompts, max_tokens, threads, bar, "plain", draft_length=0)
        fast, stats = _complete(folder, prompts, max_tokens, threads, bar, "speculative", draft_length=None)
        task = bar.add_task("scoring text", total=len(held_out.rows))
        total = bits(load_engine_directory(folder, threads), held_out.rows, lambda row: bar.update(task, completed=row))
    result = _figures(folder, plain, fast, stats, total / held_out.scored_bytes)
    if as_json:
        print(json.dumps(result))
    else:
        _print(plain, fast, result, held_out)
    return 0 if result["identical"] else 1


def _complete(
    folder: Path,
    prompts: Prompts,
    max_tokens: int,
    threads: int,
    bar: Progress,
    name: str,
    draft_length: int | None,
) -> tuple[list[Completion], dict[str, Any]]:
    params = SamplingParams(max_tokens=max_tokens)
    found = []
    task = bar.add_task(f"{name} decoding", total=len(prompts))
    with LLM(folder, max_batch_size=1, draft_length=draft_length, threads=threads) as llm:
        if llm.manifest.speculative.method == "none":
            raise ConfigError(f"{folder} holds no draft: there is nothing to compare; build it with --draft auto")
        llm.generate(prompts[0], SamplingParams(max_tokens=min(16, max_tokens)))  # binds every shape before the clock
        warm = llm.stats()
        for prompt in prompts:
            generation = llm.generate_async(prompt, params, streaming=True)
            first = None
            for _ in generation:
                first = first or time.perf_counter()
            output = generation.result()
            answer, acceptance = output.outputs[0], output.acceptance
            found.append(
                Completion(
                    output.prompt_token_ids,
                    answer.token_ids,
                    answer.text,
                    time.perf_counter() - (first or 0.0),
                    acceptance.mean_accepted_length if acceptance and acceptance.iterations else 1.0,
                )
            )
            bar.advance(task)
        stats = llm.stats()
    return found, _since(warm["acceptance"], stats["acceptance"])


def _since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Acceptance counters without those of the warm-up."""

    def difference(old: Any, new: Any) -> Any:
        if isinstance(new, list):
            return [b - a for a, b in zip([*old, *[0] * (len(new) - len(old))], new, strict=True)]
        return new - old

    return {name: difference(before[name], after[name]) for name in after}


def _figures(
    folder: Path, plain: list[Completion], fast: list[Completion], acceptance: dict[str, Any], bits_per_byte: float
) -> dict[str, Any]:
    per_prompt = sorted(c.tokens_per_iteration for c in fast)
    iterations = max(1, acceptance["iterations"])
    return {
        "identical": all(a.token_ids == b.token_ids for a, b in zip(plain, fast, strict=True)),
        "mean_accepted_length": acceptance["emitted"] / iterations,
        "acceptance_by_position": [accepted / iterations for accepted in acceptance["accepted_at"]],
        "lowest_decile": per_prompt[len(per_prompt) // 10],
        "bits_per_byte": bits_per_byte,
        "ms_per_token_plain": _ms_per_token(plain),
        "ms_per_token_speculative": _ms_per_token(fast),
        "completions": [
            {"prompt_ids": a.prompt_ids, "plain_ids": a.token_ids, "speculative_ids": b.token_ids}
            for a, b in zip(plain, fast, strict=True)
        ],
        "engine": _engine(folder),
    }


def _engine(folder: Path) -> dict[str, Any]:
    manifest = load_engine_directory(folder).manifest
    step = manifest.steps["target"]
    return {"name": step.engine, "device": step.device, "versions": step.versions, "directory": str(folder)}


def _ms_per_token(completions: list[Completion]) -> float:
    """Decode time after the first token, over the tokens it brought."""
    tokens = sum(len(c.token_ids) - 1 for c in completions)
    return 1e3 * sum(c.seconds for c in completions) / max(1, tokens)


def _print(plain: list[Completion], fast: list[Completion], result: dict[str, Any], held_out: HeldOutText) -> None:
    sample = max(fast, key=lambda c: len(c.text.split()))
    print(sample.text.rstrip("\n"))
    print("-" * 72)
    speedup = result["ms_per_token_plain"] / result["ms_per_token_speculative"]
    positions = "  ".join(f"{k}: {share:.2f}" for k, share in enumerate(result["acceptance_by_position"], 1))
    same = "identical" if result["identical"] else "DIFFERENT"
    print(f"{len(plain)} prompts, {mean(len(c.token_ids) for c in plain):.0f} tokens each on average")
    print(
        f"tokens per iteration    {result['mean_accepted_length']:.2f}  (lowest decile {result['lowest_decile']:.2f})"
    )
    print(f"accepted at position    {positions}")
    print(
        f"ms per token            plain {result['ms_per_token_plain']:.2f}, speculative "
        f"{result['ms_per_token_speculative']:.2f}  ({speedup:.2f} times as fast)"
    )
    print(f"bits per byte           {result['bits_per_byte']:.2f} on {held_out.scored_bytes} held-out bytes")
    recorded = ", ".join(f"{name} {value:.2f}" for name, value in held_out.recorded.items())
    print(f"  on all held-out text  {recorded} (Kneser-Ney; measured in training)")
    print(f"answers                 {same} with and without speculation")


def _progress(as_json: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=as_json or not sys.stderr.isatty(),
    )
