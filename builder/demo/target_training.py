"""The target: next-token loss, then a short phase against loops on its own greedy continuations."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.builder.demo.budget import Pace
from twostroke.builder.demo.generate import continuations
from twostroke.builder.demo.loops import loop_tokens
from twostroke.builder.demo.models import DemoModel
from twostroke.builder.demo.optimiser import Optimiser, balance_experts, captured
from twostroke.builder.demo.shape import is_trained
from twostroke.builder.demo.token_stream import TokenStream
from twostroke.builder.demo.trace import Trace
from twostroke.builder.demo.whole_sequence import Config

INDEXER_WEIGHT = 0.1
HOPELESS = 5.0  # nats per token; unigrams give about 6.3


def trained_part(model: DemoModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The target's weights that gradients change."""
    return {name: tensor for name, tensor in model.part(weights, drafting=False).items() if is_trained(name)}


def language_loss(
    model: DemoModel, weights: dict[str, Tensor], tokens: Tensor, dropout: float, config: Config | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Tokens [B, L] -> total loss, next-token loss in nats, load of each routed layer's experts."""
    trace = Trace()
    logits = model.target(weights, tokens[:, :-1], trace=trace, dropout=dropout, config=config).logits
    following = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return following + INDEXER_WEIGHT * trace.indexer_loss(), following.detach(), trace.loads()


def unlikelihood_loss(model: DemoModel, weights: dict[str, Tensor], tokens: Tensor, marked: Tensor) -> Tensor:
    """-log(1 - p) of the marked tokens of generated text (Welleck et al. 2020, sequence level)."""
    logits = model.target(weights, tokens[:, :-1]).logits
    log_p = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    wanted = marked[:, 1:].float()
    penalty = -torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
    return (penalty * wanted).sum() / wanted.sum().clamp(min=1)


def train_target(
    model: DemoModel,
    weights: dict[str, Tensor],
    stream: TokenStream,
    *,
    steps: int,
    batch: int,
    length: int,
    learning_rate: float,
    dropout: float,
    seconds: float | None,
    log: Callable[[str], None],
    check: Callable[[], float],
) -> int:
    """Returns the steps taken. `check` gives held-out bits per byte; it is printed now and then and steers nothing."""
    device = stream.tokens.device
    pace = Pace(steps, seconds, device)
    optimiser = Optimiser(trained_part(model, weights), learning_rate, steps)

    def stepper(config: Config) -> Callable[[Tensor], Tensor]:
        def step(tokens: Tensor) -> Tensor:
            loss, following, loads = language_loss(model, weights, tokens, dropout, config)
            optimiser.descend(loss)
            balance_experts(weights, loads)
            return following

        return captured(step, stream.cuts(batch, length))

    optimiser.set_rate(pace)
    warming = model.warm_up_share > 0
    run = stepper(model.warm_up_config if warming else model.config)
    began, seen = time.perf_counter(), torch.zeros((), device=device)
    every = max(1, steps // 10)
    while pace.share < 1:
        if warming and pace.share >= model.warm_up_share:
            warming, run = False, stepper(model.config)
            log(f"target: the indexer chooses from step {pace.done} on")
        optimiser.set_rate(pace)
        seen += run(stream.cuts(batch, length))
        pace.tick()
        if pace.done % every == 0:
            mean = seen.item() / every
            passed = time.perf_counter() - began
            log(f"target {pace.done}/{steps} nats/token {mean:.4f} held-out bpb {check():.4f} {passed:.0f} s")
            if pace.done > 500 and mean > HOPELESS:
                raise RuntimeError(f"the target does not learn: {mean:.2f} nats per token; lower --learning-rate")
            seen.zero_()
    log(f"target: {pace.done} steps taken")
    return pace.done


def train_against_loops(
    model: DemoModel,
    weights: dict[str, Tensor],
    stream: TokenStream,
    *,
    rounds: int,
    steps_per_round: int,
    sequences: int,
    prompt_length: int,
    count: int,
    batch: int,
    length: int,
    learning_rate: float,
    strength: float,
    dropout: float,
    seconds: float | None,
    log: Callable[[str], None],
) -> int:
    """Each round continues prompts from training modules and pushes down the tokens that close a loop. A round begins
    only while time is left, the first one always; returns the steps taken."""
    optimiser = Optimiser(trained_part(model, weights), learning_rate, rounds * steps_per_round, warmup=10)
    pace = Pace(rounds * steps_per_round, None, stream.tokens.device)
    started = time.perf_counter()
    for number in range(rounds):
        if number and seconds is not None and time.perf_counter() - started > seconds:
            log(f"loops: no time for round {number}")
            break
        began = time.perf_counter()
        prompts = stream.cuts(sequences, prompt_length, top_level_share=0.8)
        tokens = continuations(model, weights, prompts, count)
        marked = loop_tokens(tokens, prompt_length)
        looping = marked.any(1)
        tokens, marked = tokens[looping], marked[looping]
        if not len(tokens):
            log(f"loops round {number}: none")
            continue
        for _ in range(steps_per_round):
            picks = torch.randint(len(tokens), (min(batch, len(tokens)),), device=tokens.device)
            loss, following, _ = language_loss(model, weights, stream.cuts(batch, length), dropout)
            against = unlikelihood_loss(model, weights, tokens[picks], marked[picks])
            optimiser.set_rate(pace)
            optimiser.descend(loss + strength * against)
            pace.tick()
        log(
            f"loops round {number}: {looping.float().mean().item():.3f} of continuations loop, nats/token "
            f"{following.item():.3f}, unlikelihood {against.item():.3f}, {time.perf_counter() - began:.0f} s"
        )
    return pace.done
