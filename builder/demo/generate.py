"""Continuations by the target itself, many sequences in step, and what its draft makes of them."""

from types import SimpleNamespace

import torch
from torch import Tensor

from twostroke.builder.demo.whole_sequence import Weights, draft, greedy_draft, target


@torch.no_grad()
def continuations(
    config: SimpleNamespace,
    weights: Weights,
    prompts: Tensor,
    count: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Prompts [B, L] of one length -> [B, L + count]; greedy at temperature 0."""
    tokens = [prompts]
    output = target(config, weights, prompts)
    for step in range(count):
        logits = output.logits[:, -1]
        if temperature:
            probabilities = (logits / temperature).softmax(-1)
            following = torch.multinomial(probabilities, 1, generator=generator)
        else:
            following = logits.argmax(-1, keepdim=True)
        tokens.append(following)
        if step < count - 1:
            output = target(config, weights, following, earlier=output.inputs)
    return torch.cat(tokens, 1)


@torch.no_grad()
def accepted_lengths(config: SimpleNamespace, weights: Weights, tokens: Tensor, first: int) -> Tensor:
    """Greedy text [1, L] -> accepted drafts at every anchor position first..L-1-G, [L - G - first]."""
    size = config.dspark_block_size
    taps = target(config, weights, tokens).taps
    positions = torch.arange(first, tokens.shape[1] - size, device=tokens.device)
    anchors = tokens[0, positions]
    output = draft(config, weights, taps, anchors[None], positions[None])
    drafted = greedy_draft(config, weights, output, anchors[None])[0][0]  # [A, G]
    truth = tokens[0][positions[:, None] + 1 + torch.arange(size, device=tokens.device)]
    return (drafted == truth).long().cumprod(-1).sum(-1)


def chain(accepted: list[int], tokens_wanted: int) -> list[int]:
    """Tokens emitted by each iteration of a run of `tokens_wanted` tokens.

    `accepted[i]` is the accepted draft length with the i-th generated token as anchor. Prefill emits the first token;
    every iteration emits its accepted drafts and the bonus; what passes the end is not counted.
    """
    emitted: list[int] = []
    place = 0
    while place < tokens_wanted - 1:
        step = min(accepted[place] + 1, tokens_wanted - 1 - place)
        emitted.append(step)
        place += step
    return emitted
