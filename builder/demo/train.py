"""Make a demo model's folder.

    python -m twostroke.builder.demo.train -o runtime/demo/v4-dspark
    python -m twostroke.builder.demo.train --model v32-mtp -o runtime/demo/v32-mtp

Stages: tokenizer, target, loops, texts (the target's own), draft, figures. `--work DIR` keeps what each stage made and
a later call goes on from there. `--minutes` shortens stages that would take longer, so that a model comes out in time.
"""

import argparse
import hashlib
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers import __version__ as tokenizers_version
from torch import Tensor

from twostroke.builder.demo import corpus, evaluate
from twostroke.builder.demo.budget import Budget
from twostroke.builder.demo.checkpoint import as_stored, load, save, write_json
from twostroke.builder.demo.draft_training import own_text, train_draft
from twostroke.builder.demo.models import MODELS
from twostroke.builder.demo.target_training import train_against_loops, train_target
from twostroke.builder.demo.token_stream import TokenStream
from twostroke.builder.demo.tokenizer import train_tokenizer

NOT_RECORDED = ("output", "work", "stdlib", "sources_of", "device")
# Shares of --minutes after which a stage must have ended; the rest is for the figures.
TARGET_MARK, LOOPS_MARK, TEXTS_MARK, DRAFT_MARK = 0.42, 0.5, 0.62, 0.92


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="v4-dspark", choices=tuple(MODELS), help="which one (v4-dspark)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--work", type=Path, help="folder for what the stages hand on (default: nothing is kept)")
    parser.add_argument("--stdlib", type=Path, default=corpus.stdlib_root(), help="Lib folder to learn from")
    parser.add_argument("--sources-of", default=f"CPython {platform.python_version()}", help="what --stdlib is of")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, help="for everything (default: as long as the steps take)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2600, help="steps of the target")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--length", type=int, default=640)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--loop-rounds", type=int, default=5)
    parser.add_argument("--loop-steps", type=int, default=30, help="steps of each round")
    parser.add_argument("--loop-strength", type=float, default=0.5)
    parser.add_argument("--loop-learning-rate", type=float, default=3e-4)
    parser.add_argument("--sequences", type=int, default=32768, help="texts that the target writes for the draft")
    parser.add_argument("--astray", type=int, default=16, help="tokens sampled first in half of these texts")
    parser.add_argument("--generation-batch", type=int, default=4096)
    parser.add_argument("--prompt-length", type=int, default=96)
    parser.add_argument("--generated", type=int, default=160, help="tokens of each such text")
    parser.add_argument("--draft-steps", type=int, default=9000)
    parser.add_argument("--draft-batch", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=24, help="drafted blocks per text and step")
    parser.add_argument("--draft-learning-rate", type=float, default=2e-3)
    parser.add_argument("--prompts", type=int, default=100)
    parser.set_defaults(**MODELS[parser.parse_args(argv).model]().recipe)
    return parser.parse_args(argv)


class Stages:
    """Runs a stage unless its file is there already, and keeps the seconds."""

    def __init__(self, folder: Path | None, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def log(self, line: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f}] {line}", flush=True)

    def run(self, name: str, make: Any) -> Any:
        path = self.folder / f"{name}.pt" if self.folder else None
        if path and path.exists():
            self.log(f"{name}: from {path}")
            return torch.load(path, map_location=self.device)
        began = time.perf_counter()
        made = make()
        self.seconds[name] = round(time.perf_counter() - began, 1)
        self.log(f"{name}: {self.seconds[name]} s")
        if path:
            torch.save(made, path)
        return made


def detached(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in weights.items()}


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    budget = Budget(options.minutes)
    steps: dict[str, int] = {}
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    stages = Stages(options.work, device)
    model = MODELS[options.model]()
    training, held = corpus.split(options.stdlib)
    stages.log(f"{len(training)} training modules, {len(held)} held out")
    texts, held_texts = list(training.values()), list(held.values())

    tokenizer = Tokenizer.from_str(
        stages.run("tokenizer", lambda: train_tokenizer(texts, model.raw["vocab_size"]).to_str())
    )
    prompts = corpus.prompts(held, tokenizer, options.prompts)
    stream = TokenStream(texts, tokenizer, device, options.seed)
    stages.log(f"{len(stream.tokens)} training tokens, {len(stream.line_starts)} top-level lines")

    weights = {name: tensor.to(device) for name, tensor in model.initial(model.config, options.seed).items()}

    def make_target() -> dict[str, Tensor]:
        steps["target"] = train_target(
            model,
            weights,
            stream,
            steps=options.steps,
            batch=options.batch,
            length=options.length,
            learning_rate=options.learning_rate,
            dropout=options.dropout,
            seconds=budget.until(TARGET_MARK),
            log=stages.log,
            check=lambda: evaluate.target_bits_per_byte(model, weights, held_texts, tokenizer),
        )
        return detached(model.part(weights, drafting=False))

    def target_figures() -> dict[str, Any]:
        rounded = as_stored(weights)
        torch.backends.cuda.matmul.allow_tf32 = False
        bits = evaluate.target_bits_per_byte(model, rounded, held_texts, tokenizer)
        greedy = evaluate.completions(model, rounded, prompts, 128 + model.draft_length)
        torch.backends.cuda.matmul.allow_tf32 = True
        loops = evaluate.loop_rates([generated[:128] for _, generated in greedy])
        stages.log(f"held out: {bits:.4f} bits per byte, loops {loops}")
        return {"bits_per_byte": bits, "loops": loops, "greedy": greedy}

    def against_loops() -> dict[str, Tensor]:
        steps["loops"] = train_against_loops(
            model,
            weights,
            stream,
            rounds=options.loop_rounds,
            steps_per_round=options.loop_steps,
            sequences=options.generation_batch,
            prompt_length=options.prompt_length,
            count=128,
            batch=options.batch,
            length=options.length,
            learning_rate=options.loop_learning_rate,
            strength=options.loop_strength,
            dropout=options.dropout,
            seconds=budget.until(LOOPS_MARK),
            log=stages.log,
        )
        return detached(model.part(weights, drafting=False))

    def write_texts() -> Tensor:
        return own_text(
            model,
            weights,
            stream,
            sequences=options.sequences,
            batch=options.generation_batch,
            prompt_length=options.prompt_length,
            count=options.generated,
            astray=options.astray,
            seconds=budget.until(TEXTS_MARK),
            log=stages.log,
        ).to(torch.int16)

    def make_draft(written: Tensor) -> dict[str, Tensor]:
        steps["draft"] = train_draft(
            model,
            weights,
            written,
            first_anchor=options.prompt_length,
            anchors=options.anchors,
            steps=options.draft_steps,
            batch=options.draft_batch,
            learning_rate=options.draft_learning_rate,
            seconds=budget.until(DRAFT_MARK),
            log=stages.log,
        )
        return detached(model.part(weights, drafting=True))

    weights |= stages.run("target", make_target)
    before = stages.run("target_figures", target_figures)
    weights |= stages.run("loops", against_loops)
    # From here on the target is what its file will say: rounded, and frozen.
    weights |= as_stored(model.part(weights, drafting=False))
    after = stages.run("loops_figures", target_figures)
    written = stages.run("texts", write_texts).long()
    weights |= stages.run("draft", lambda: make_draft(written))

    torch.backends.cuda.matmul.allow_tf32 = False
    save(options.output, model.raw, model.shards(weights), tokenizer)
    _, stored, tokenizer = load(options.output)
    stored = {name: tensor.to(device) for name, tensor in stored.items()}
    drafting = evaluate.acceptance(model, stored, after["greedy"])
    stages.log(f"acceptance {drafting}")
    ngrams = evaluate.ngram_bits_per_byte(texts, held_texts, tokenizer)
    stages.log(f"n-gram bits per byte {ngrams}")
    limit = f" --minutes {options.minutes:g}" if options.minutes else ""
    record = {
        "command": f"python -m twostroke.builder.demo.train --model {model.name}{limit} -o runtime/demo/{model.name}",
        "options": {k: v for k, v in vars(options).items() if k not in NOT_RECORDED},
        "bits_per_byte": {
            "target": after["bits_per_byte"],
            "target_before_loop_phase": before["bits_per_byte"],
            f"{evaluate.BYTE_ORDER - 1}_bytes_of_context_kneser_ney": ngrams["bytes"],
            f"{evaluate.TOKEN_ORDER}_gram_of_tokens_kneser_ney": ngrams["tokens"],
        },
        "loops": {"before": before["loops"], "after": after["loops"]},
        "acceptance": drafting,
        "corpus": {
            "training_modules": len(training),
            "held_out_modules": sorted(held),
            "training_bytes": sum(len(text.encode()) for text in texts),
            "held_out_bytes": sum(len(text.encode()) for text in held_texts),
            "training_tokens": len(stream.tokens),
            "sources_of": options.sources_of,
            "sha256": hashlib.sha256("".join(texts + held_texts).encode()).hexdigest(),
        },
        "steps_taken": steps,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "tokenizers": tokenizers_version},
        "seconds": stages.seconds,
    }
    write_json(options.output / "training.json", record)
    size = sum(path.stat().st_size for path in options.output.iterdir())
    stages.log(f"{options.output}: {size} bytes")
    if size >= 10_000_000:
        sys.exit(f"{options.output} holds {size} bytes, allowed are 9,999,999")
    print(json.dumps({k: record[k] for k in ("bits_per_byte", "loops", "acceptance")}, indent=1))


if __name__ == "__main__":
    main()
