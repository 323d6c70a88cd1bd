"""Which networks there are. Adding one is its file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from twostroke.builder.config import DeepseekV4Config
from twostroke.builder.networks.deepseek_v4 import TOKENS_PER_PAGE, DeepseekV4
from twostroke.builder.networks.dspark import Observe, Propose
from twostroke.builder.networks.layers import StepSpec


@dataclass(frozen=True)
class Draft:
    """What a draft method asks of a build: tokens per block, the target layers it taps, its steps in export order."""

    block_size: int
    taps: tuple[int, ...]
    taps_width: int
    steps: Callable[[], tuple[StepSpec, ...]]


class TargetNetwork(Protocol):
    """A target network."""

    def step(self) -> StepSpec:
        """The declaration of the target step."""


@dataclass(frozen=True)
class Target:
    """How to make a target network, `network(config, draft_len, max_seq_len, taps)`, and its page size."""

    network: Callable[..., TargetNetwork]
    tokens_per_page: int


def _no_draft(config: DeepseekV4Config) -> Draft:
    return Draft(0, (), 0, lambda: ())


def _dspark(config: DeepseekV4Config) -> Draft:
    dspark = config.dspark
    assert dspark is not None, "draft detection chose dspark without its config"

    def steps() -> tuple[StepSpec, ...]:
        return Observe(config, dspark).step(), Propose(config, dspark).step()

    layers = dspark.target_layer_ids
    return Draft(dspark.block_size, layers, len(layers) * config.hidden_size, steps)


TARGETS: Mapping[str, Target] = {"deepseek_v4": Target(DeepseekV4, TOKENS_PER_PAGE)}
DRAFTS: Mapping[str, Callable[[DeepseekV4Config], Draft]] = {"none": _no_draft, "dspark": _dspark}
