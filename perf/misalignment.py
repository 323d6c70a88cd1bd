"""What a misaligned MTP layer costs: tokens per iteration, and how far the draft's logits move.

    python perf/misalignment.py CHECKPOINT          writes perf/results/misalignment-<folder's name>.{json,md}

No engine takes part. The numpy reference of the tests answers prompts greedily and then drafts along each answer, once
for every alignment it knows: the right one, all rows one position on (which must change nothing), and the documented
mistakes. Acceptance comes from a run of its own for each alignment, which observes what it got accepted. For the change
of the logits a mistaken layer observes the right one's rows and its chain is made to follow the right one's tokens, so
that nothing but the alignment differs. Prompts are held-out standard library sources, or random ids for a checkpoint
without tokenizer.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from twostroke.builder.checkpoint import Checkpoint
from twostroke.builder.demo import corpus
from twostroke.engines.errors import ConfigError, TwostrokeError
from twostroke.perf.iteration_cpu import RESULTS, commit
from twostroke.tests.builder.deepseek_v32_reference import (
    MISTAKES,
    RIGHT,
    UNIFORM_SHIFT,
    Alignment,
    Drafter,
    Memory,
    Network,
    Target,
)

TABLE = "misalignment"
ALIGNMENTS: Mapping[str, Alignment] = {"right": RIGHT, "all rows one position on": UNIFORM_SHIFT, **MISTAKES}


@dataclass(frozen=True)
class Text:
    """A prompt with the target's greedy answer, the target's rows of all tokens but the last, and where an iteration
    may start: at a token of the answer that is not its end, with a full block of the answer behind it."""

    tokens: Sequence[int]
    rows: Target
    anchors: range


def read(folder: Path) -> Network:
    """The reference network of a V3.2 checkpoint with an MTP layer."""
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    wanted = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
    if config.model_type != "deepseek_v32" or wanted not in checkpoint.entries:
        raise ConfigError(
            f"{folder}: a checkpoint of deepseek_v32 with its MTP layer is expected, found one of {config.model_type} "
            f"with{'' if wanted in checkpoint.entries else 'out'} {wanted}"
        )
    weights = {name: checkpoint.read(name).float().numpy() for name in checkpoint.entries}
    return Network(json.loads((folder / "config.json").read_text()), weights)


def prompts(folder: Path, network: Network, count: int) -> list[list[int]]:
    """`count` prompts in the checkpoint's own tokens; 32 random ids each without a tokenizer."""
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        _, held = corpus.split(corpus.stdlib_root())
        return [list(prompt.token_ids) for prompt in corpus.prompts(held, tokenizer, count)]
    rng = np.random.default_rng(0)
    return [rng.integers(2, network.config["vocab_size"], 32).tolist() for _ in range(count)]


def answered(network: Network, prompt: Sequence[int], count: int, depth: int) -> Text:
    """`count` tokens of answer, and `depth` more to judge the last block by; fewer where the text ends."""
    memories = [Memory() for _ in range(network.layers)]
    tokens, rows = list(prompt), [network.target(prompt, memories)]
    while len(tokens) < len(prompt) + count + depth:
        tokens.append(int(rows[-1].logits[-1].argmax()))
        if tokens[-1] == network.config["eos_token_id"]:
            break
        rows.append(network.target(tokens[-1:], memories, len(tokens) - 1))
    joined = Target(*(np.concatenate(parts)[: len(tokens) - 1] for parts in zip(*rows, strict=True)))
    return Text(tokens, joined, range(len(prompt), min(len(prompt) + count, len(tokens) - 1)))


def agreeing(drafted: Sequence[int], told: Sequence[int]) -> int:
    """How many leading drafts are what the target says."""
    same = [a == b for a, b in zip(drafted, told, strict=False)]
    return same.index(False) if False in same else len(same)


def iterations(network: Network, text: Text, depth: int, alignment: Alignment) -> Iterator[tuple[int, int]]:
    """(position of the anchor, accepted drafts) of each iteration of a run along `text`."""
    drafter, hidden, done = Drafter(network, alignment), alignment.hidden(text.rows), 0
    position = text.anchors.start
    while position in text.anchors:
        drafter.observe(hidden, text.tokens, done, position)
        accepted = agreeing(drafter.chain(depth)[0], text.tokens[position + 1 :])
        yield position, accepted
        done, position = position, position + accepted + 1


def changes(network: Network, text: Text, depth: int, alignment: Alignment, anchors: Sequence[int]) -> np.ndarray:
    """Largest difference of any logit at each depth, [depth], between chains of the right layer and this one."""
    right, other, done = Drafter(network), Drafter(network, alignment), 0
    largest = np.zeros(depth)
    for position in anchors:
        right.observe(RIGHT.hidden(text.rows), text.tokens, done, position)
        other.observe(alignment.hidden(text.rows), text.tokens, done, position)
        tokens, expected = right.chain(depth)
        largest = np.maximum(largest, np.abs(other.chain(depth, tokens)[1] - expected).max(axis=1))
        done = position
    return largest


def measure(
    network: Network, texts: Sequence[Text], anchors: Sequence[Sequence[int]], depth: int, name: str
) -> dict[str, Any]:
    """One row of the table. `anchors` are those of the right run, for each text."""
    alignment = ALIGNMENTS[name]
    runs = [list(iterations(network, text, depth, alignment)) for text in texts]
    accepted = np.array([count for run in runs for _, count in run])
    emitted = [
        min(count + 1, len(text.tokens) - 1 - position)  # no bonus token behind the end of the text
        for text, run in zip(texts, runs, strict=True)
        for position, count in run
    ]
    moved = [changes(network, text, depth, alignment, each) for text, each in zip(texts, anchors, strict=True)]
    return {
        "alignment": name,
        "mean_accepted_length": round(sum(emitted) / len(emitted), 4),
        "accepted_by_position": [round(float((accepted > k).mean()), 4) for k in range(depth)],
        "iterations": len(emitted),
        "largest_logit_change": [float(f"{value:.3g}") for value in np.max(moved, axis=0)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of a V3.2 checkpoint with its MTP layer")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="of answer to each prompt")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table goes (perf/results)")
    options = parser.parse_args(argv)
    folder = options.checkpoint.resolve()
    try:
        network = read(folder)
        asked = prompts(folder, network, options.prompts)
        longest = max(map(len, asked)) + options.tokens + options.depth
        if longest > (limit := network.config["max_position_embeddings"]):
            raise ConfigError(f"{folder}: prompts and answers take {longest} tokens, the model {limit}: lower --tokens")
        texts = [answered(network, prompt, options.tokens, options.depth) for prompt in asked]
        if not any(text.anchors for text in texts):
            raise ConfigError(f"{folder}: every answer ends with its first token; there is nothing to draft")
    except TwostrokeError as error:
        print(error, file=sys.stderr)
        return 2
    anchors = [[at for at, _ in iterations(network, text, options.depth, RIGHT)] for text in texts]
    table = {
        "table": TABLE,
        "model": folder.name,
        "depth": options.depth,
        "prompts": len(texts),
        "prompts_from": "standard library" if (folder / "tokenizer.json").is_file() else "random ids",
        "tokens": options.tokens,
        "logit_spread": round(float(np.mean([text.rows.logits.std() for text in texts])), 3),
        "rows": [measure(network, texts, anchors, options.depth, name) for name in ALIGNMENTS],
        "versions": {"numpy": np.__version__},
        "commit": commit(),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{TABLE}-{folder.name}"
    path.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
    written = markdown(table)
    path.with_suffix(".md").write_text(written)
    print(written)
    return 0


def markdown(table: dict[str, Any]) -> str:
    lines = [
        f"# Misaligned MTP drafting: {table['model']}, depth {table['depth']}",
        "",
        f"{table['prompts']} prompts ({table['prompts_from']}), {table['tokens']} greedy tokens each; float64 numpy "
        f"{table['versions']['numpy']}, commit {table['commit']}. Regenerate with `python perf/misalignment.py "
        "CHECKPOINT`.",
        "",
        "| what the layer is given | tokens per iteration | accepted at position | largest logit change at depth |",
        "|---|---|---|---|",
    ]
    for row in table["rows"]:
        shares = " / ".join(f"{share:.2f}" for share in row["accepted_by_position"])
        moved = " / ".join(f"{value:.2g}" for value in row["largest_logit_change"])
        lines.append(f"| {row['alignment']} | {row['mean_accepted_length']:.2f} | {shares} | {moved} |")
    lines += [
        "",
        f"Positions and depths 1 to {table['depth']}; tokens per iteration count the bonus. The target's logits have a "
        f"standard deviation of {table['logit_spread']}. Rope and the indexer know differences of positions only, so "
        "that a mistake of position shows where drafted rows and committed ones disagree. With the row of the last "
        "position only, all other rows are missing from the layer's memory.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
