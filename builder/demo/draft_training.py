"""The draft: learns the frozen target's next tokens and distributions on text the target wrote itself."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from twostroke.builder.demo.budget import Pace
from twostroke.builder.demo.generate import continuations
from twostroke.builder.demo.models import DemoModel
from twostroke.builder.demo.optimiser import Optimiser, balance_experts, captured
from twostroke.builder.demo.shape import is_trained
from twostroke.builder.demo.token_stream import TokenStream


def own_text(
    model: DemoModel,
    weights: dict[str, Tensor],
    stream: TokenStream,
    *,
    sequences: int,
    batch: int,
    prompt_length: int,
    count: int,
    astray: int,
    seconds: float | None,
    log: Callable[[str], None],
) -> Tensor:
    """[sequences, prompt_length + count]: the target's greedy continuations of training prompts; fewer where the time
    is over, two batches at least.

    In every second batch the first `astray` tokens are sampled: on training prompts the target partly recites, and what
    it writes away from its training text is closer to what it writes after a new prompt.
    """
    parts: list[Tensor] = []
    began = time.perf_counter()
    for number, begin in enumerate(range(0, sequences, batch)):
        if number > 1 and seconds is not None:
            if parts[0].is_cuda:
                torch.cuda.synchronize()
            # The next batch takes as long as the last ones did.
            if (time.perf_counter() - began) * (number + 1) / number > seconds:
                log(f"texts: time for {begin} of {sequences}")
                break
        tokens = stream.cuts(min(batch, sequences - begin), prompt_length, top_level_share=0.7)
        sampled = astray * (number % 2)
        if sampled:
            tokens = continuations(model, weights, tokens, sampled, temperature=1.0)
        tokens = continuations(model, weights, tokens, count - sampled)
        parts.append(tokens)
    return torch.cat(parts)


def train_draft(
    model: DemoModel,
    weights: dict[str, Tensor],
    texts: Tensor,
    *,
    first_anchor: int,
    anchors: int,
    steps: int,
    batch: int,
    learning_rate: float,
    seconds: float | None,
    log: Callable[[str], None],
) -> int:
    """Returns the steps taken."""
    for tensor in weights.values():
        tensor.requires_grad_(False)
    trained = {name: tensor for name, tensor in model.part(weights, drafting=True).items() if is_trained(name)}
    optimiser = Optimiser(trained, learning_rate, steps)
    pace = Pace(steps, seconds, texts.device)

    def step(tokens: Tensor) -> Tensor:
        loss, agree, loads = model.draft_loss(model.config, weights, tokens, first_anchor, anchors)
        optimiser.descend(loss)
        balance_experts(weights, loads)
        return torch.cat((loss.detach()[None], agree))

    def some() -> Tensor:
        return texts[torch.randint(len(texts), (batch,), device=texts.device)]

    optimiser.set_rate(pace)
    run = captured(step, some())
    began, every = time.perf_counter(), max(1, steps // 10)
    seen = torch.zeros(1 + model.draft_length, device=texts.device)
    while pace.share < 1:
        optimiser.set_rate(pace)
        seen += run(some())
        pace.tick()
        if pace.done % every == 0:
            loss, *agree = (seen / every).tolist()
            by_position = " ".join(f"{value:.3f}" for value in agree)
            passed = time.perf_counter() - began
            log(f"draft {pace.done}/{steps} loss {loss:.4f} agreement {by_position} {passed:.0f} s")
            seen.zero_()
    log(f"draft: {pace.done} steps taken")
    return pace.done
