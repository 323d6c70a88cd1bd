"""Held-out figures: bits per byte beside n-gram models, loops in greedy text, greedy acceptance of the draft."""

from typing import Any

import torch
from tokenizers import Tokenizer

from twostroke.builder.demo.corpus import Prompt
from twostroke.builder.demo.generate import chain
from twostroke.builder.demo.loops import repeats_eight_thrice, repeats_thrice
from twostroke.builder.demo.models import DemoModel
from twostroke.builder.demo.ngram import NGram, bits_per_byte
from twostroke.builder.demo.shape import BOS, EOS
from twostroke.builder.demo.whole_sequence import Weights

BYTE_ORDER, TOKEN_ORDER = 6, 5  # symbols per gram: five bytes of context, four tokens of context


def ngram_bits_per_byte(training: list[str], held: list[str], tokenizer: Tokenizer) -> dict[str, float]:
    total = sum(len(text.encode()) for text in held)
    by_byte = NGram([list(text.encode()) for text in training], 256, BYTE_ORDER)
    ids = [encoding.ids[1:] for encoding in tokenizer.encode_batch(training)]
    by_token = NGram(ids, tokenizer.get_vocab_size(), TOKEN_ORDER)
    return {
        "bytes": bits_per_byte(by_byte, [list(text.encode()) for text in held], total),
        "tokens": bits_per_byte(by_token, [e.ids[1:] for e in tokenizer.encode_batch(held)], total),
    }


@torch.no_grad()
def target_bits_per_byte(
    model: DemoModel, weights: Weights, held: list[str], tokenizer: Tokenizer, window: int = 512
) -> float:
    """Windows of `window` tokens, the beginning token first, that move by half: every token is scored once."""
    device = next(iter(weights.values())).device
    bits, total = 0.0, sum(len(text.encode()) for text in held)
    rows: list[list[int]] = []
    scored: list[tuple[int, int]] = []  # targets of the row that count
    for encoding in tokenizer.encode_batch(held):
        ids = encoding.ids[1:]
        done = 0
        while done < len(ids):
            begin = 0 if done == 0 else done - window // 2
            row = [BOS, *ids[begin : begin + window]]
            scored.append((done - begin, len(row) - 1))
            rows.append(row + [BOS] * (window + 1 - len(row)))
            done = begin + window
    for place in range(0, len(rows), 32):
        tokens = torch.tensor(rows[place : place + 32], device=device)
        logits = model.target(weights, tokens[:, :-1]).logits
        nats = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].double().cpu()
        for row, (low, high) in zip(nats, scored[place : place + 32], strict=True):
            bits += row[low:high].sum().item() / torch.log(torch.tensor(2.0)).item()
    return bits / total


@torch.no_grad()
def completions(
    model: DemoModel, weights: Weights, prompts: list[Prompt], count: int
) -> list[tuple[list[int], list[int]]]:
    """Per prompt: its token ids and `count` greedily chosen ones. Padding comes last, where no real row sees it."""
    device = next(iter(weights.values())).device
    lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)
    longest = int(lengths.max())
    tokens = torch.full((len(prompts), longest + count), BOS, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.token_ids)] = torch.tensor(prompt.token_ids, device=device)
    every = torch.arange(len(prompts), device=device)
    for step in range(count):
        logits = model.target(weights, tokens[:, : longest + step]).logits
        tokens[every, lengths + step] = logits[every, lengths + step - 1].argmax(-1)
    generated = tokens[every[:, None], lengths[:, None] + torch.arange(count, device=device)].tolist()
    return [(list(prompt.token_ids), row) for prompt, row in zip(prompts, generated, strict=True)]


def text_only(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


def loop_rates(generated: list[list[int]]) -> dict[str, float]:
    texts = [text_only(tokens) for tokens in generated]
    return {
        "eight_tokens_thrice": sum(map(repeats_eight_thrice, texts)) / len(texts),
        "any_period_to_8_thrice": sum(map(repeats_thrice, texts)) / len(texts),
        "any_period_to_40_thrice": sum(repeats_thrice(text, 40) for text in texts) / len(texts),
    }


def acceptance(
    model: DemoModel, weights: Weights, greedy: list[tuple[list[int], list[int]]], count: int = 128
) -> dict[str, Any]:
    """Chain drafting along the target's greedy text; each text holds `count` tokens and as many more as are
    drafted at a time, and ends at an end token."""
    device = next(iter(weights.values())).device
    size = model.draft_length
    per_prompt: list[float] = []
    iterations: list[int] = []
    reached = [0] * size
    for prompt, generated in greedy:
        length = min(count, len(text_only(generated[:count])) + 1)
        if length < 2:
            continue
        tokens = torch.tensor([prompt + generated], device=device)
        accepted = model.accepted_lengths(model.config, weights, tokens, len(prompt)).tolist()
        emitted = chain(accepted, length)
        per_prompt.append(sum(emitted) / len(emitted))
        iterations += emitted
        place = 0
        for step in emitted:
            for k in range(accepted[place]):
                reached[k] += 1
            place += step
    ordered = sorted(per_prompt)
    return {
        "tokens_per_iteration": sum(iterations) / len(iterations),
        "mean_over_prompts": sum(per_prompt) / len(per_prompt),
        "lowest_decile": ordered[len(ordered) // 10],
        "lowest": ordered[0],
        "accepted_by_position": [value / len(iterations) for value in reached],
        "iterations": len(iterations),
        "prompts": len(per_prompt),
    }
