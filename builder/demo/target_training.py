"""The target: next-token loss, then a short phase against loops on its own greedy continuations."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.builder.demo.generate import continuations
from twostroke.builder.demo.loops import loop_tokens
from twostroke.builder.demo.optimiser import Optimiser, balance_experts, captured
from twostroke.builder.demo.shape import is_draft, is_trained
from twostroke.builder.demo.token_stream import TokenStream
from twostroke.builder.demo.whole_sequence import Trace, target

INDEXER_WEIGHT = 0.1
HOPELESS = 5.0  # nats per token; unigrams give about 6.3


def indexer_loss(trace: Trace) -> Tensor:
    """KL from the attention mass on compressed rows to the indexer's softmax: a top-k passes no gradient itself."""
    total = torch.zeros((), device=trace.indexer[0][0].device)
    for scores, mass in trace.indexer:
        total = total + (torch.xlogy(mass, mass) - mass * scores.log_softmax(-1)).sum(-1).mean()
    return total


def language_loss(
    config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor, dropout: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Tokens [B, L] -> total loss, next-token loss in nats, load of each routed layer's experts."""
    trace = Trace()
    logits = target(config, weights, tokens[:, :-1], trace=trace, dropout=dropout).logits
    following = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loads = {at: (route > 0).float().mean((0, 1)) for at, route in trace.routes}
    return following + INDEXER_WEIGHT * indexer_loss(trace), following.detach(), loads


def unlikelihood_loss(config: SimpleNamespace, weights: dict[str, Tensor], tokens: Tensor, marked: Tensor) -> Tensor:
    """-log(1 - p) of the marked tokens of generated text (Welleck et al. 2020, sequence level)."""
    logits = target(config, weights, tokens[:, :-1]).logits
    log_p = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    wanted = marked[:, 1:].float()
    penalty = -torch.log1p(-log_p.exp().clamp(max=1 - 1e-4))
    return (penalty * wanted).sum() / wanted.sum().clamp(min=1)


def train_target(
    config: SimpleNamespace,
    weights: dict[str, Tensor],
    stream: TokenStream,
    *,
    steps: int,
    batch: int,
    length: int,
    learning_rate: float,
    dropout: float,
    log: Callable[[str], None],
    check: Callable[[], float],
) -> None:
    """`check` gives held-out bits per byte; it is printed now and then and steers nothing."""
    trained = {name: tensor for name, tensor in weights.items() if is_trained(name) and not is_draft(name)}
    optimiser = Optimiser(trained, learning_rate, steps)

    def step(tokens: Tensor) -> Tensor:
        loss, following, loads = language_loss(config, weights, tokens, dropout)
        optimiser.descend(loss)
        balance_experts(weights, loads)
        return following

    optimiser.set_rate(0)
    run = captured(step, stream.cuts(batch, length))
    began, seen = time.perf_counter(), torch.zeros((), device=stream.tokens.device)
    every = max(1, steps // 10)
    for number in range(steps):
        optimiser.set_rate(number)
        seen += run(stream.cuts(batch, length))
        if (number + 1) % every == 0:
            mean = seen.item() / every
            seconds = time.perf_counter() - began
            log(f"target {number + 1}/{steps} nats/token {mean:.4f} held-out bpb {check():.4f} {seconds:.0f} s")
            if number >= 500 and mean > HOPELESS:
                raise RuntimeError(f"the target does not learn: {mean:.2f} nats per token; lower --learning-rate")
            seen.zero_()


def train_against_loops(
    config: SimpleNamespace,
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
    log: Callable[[str], None],
) -> None:
    """Each round continues prompts from training modules and pushes down the tokens that close a loop."""
    trained = {name: tensor for name, tensor in weights.items() if is_trained(name) and not is_draft(name)}
    optimiser = Optimiser(trained, learning_rate, rounds * steps_per_round, warmup=10)
    done = 0
    for number in range(rounds):
        began = time.perf_counter()
        prompts = stream.cuts(sequences, prompt_length, top_level_share=0.8)
        tokens = continuations(config, weights, prompts, count)
        marked = loop_tokens(tokens, prompt_length)
        looping = marked.any(1)
        tokens, marked = tokens[looping], marked[looping]
        if not len(tokens):
            log(f"loops round {number}: none")
            continue
        for _ in range(steps_per_round):
            picks = torch.randint(len(tokens), (min(batch, len(tokens)),), device=tokens.device)
            loss, following, _ = language_loss(config, weights, stream.cuts(batch, length), dropout)
            against = unlikelihood_loss(config, weights, tokens[picks], marked[picks])
            optimiser.set_rate(done)
            optimiser.descend(loss + strength * against)
            done += 1
        log(
            f"loops round {number}: {looping.float().mean().item():.3f} of continuations loop, nats/token "
            f"{following.item():.3f}, unlikelihood {against.item():.3f}, {time.perf_counter() - began:.0f} s"
        )
