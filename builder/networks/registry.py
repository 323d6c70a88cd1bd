"""Which networks there are. Adding one is its file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from twostroke.builder import draft_detection
from twostroke.builder.config import DeepseekV4Config, ModelConfig, parse_deepseek_v4
from twostroke.builder.inventory import TensorSpec, inventory, target_inventory
from twostroke.builder.networks import deepseek_v4, deepseek_v32
from twostroke.builder.networks.dspark import Observe, Propose
from twostroke.builder.networks.layers import StepSpec
from twostroke.builder.strict_json import Fields


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
    """A family of checkpoints, by `model_type`. The config that `parse` returns is what all others take.

    `target_tensors(config, quantised=...)` are the tensors of the target, `all_tensors` those of its drafter too, whose
    names start with `draft_prefix(config)`. `detect_draft(config, tensor names, requested)` chooses the draft method.
    `network(config, draft_len, max_seq_len, taps)` makes the target step for pages of `tokens_per_page`.
    """

    parse: Callable[[Fields], ModelConfig]
    target_tensors: Callable[..., tuple[TensorSpec, ...]]
    all_tensors: Callable[..., tuple[TensorSpec, ...]]
    draft_prefix: Callable[..., str]
    detect_draft: Callable[..., str]
    network: Callable[..., TargetNetwork]
    tokens_per_page: int


def _no_draft(config: ModelConfig) -> Draft:
    return Draft(0, (), 0, lambda: ())


def _dspark(config: DeepseekV4Config) -> Draft:
    dspark = config.dspark
    assert dspark is not None, "draft detection chose dspark without its config"

    def steps() -> tuple[StepSpec, ...]:
        return Observe(config, dspark).step(), Propose(config, dspark).step()

    layers = dspark.target_layer_ids
    return Draft(dspark.block_size, layers, len(layers) * config.hidden_size, steps)


_DEEPSEEK_V4 = Target(
    parse_deepseek_v4,
    target_inventory,
    inventory,
    lambda config: "mtp.",
    draft_detection.detect_draft,
    deepseek_v4.DeepseekV4,
    deepseek_v4.TOKENS_PER_PAGE,
)

_DEEPSEEK_V32 = Target(
    deepseek_v32.parse_config,
    deepseek_v32.target_tensors,
    deepseek_v32.all_tensors,
    deepseek_v32.draft_prefix,
    deepseek_v32.detect_draft,
    deepseek_v32.DeepseekV32,
    deepseek_v32.TOKENS_PER_PAGE,
)

TARGETS: Mapping[str, Target] = {"deepseek_v4": _DEEPSEEK_V4, "deepseek_v32": _DEEPSEEK_V32}
DRAFTS: Mapping[str, Callable[..., Draft]] = {"none": _no_draft, "dspark": _dspark}
