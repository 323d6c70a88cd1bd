"""Which networks there are. Adding one is its file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from twostroke.builder import draft_detection
from twostroke.builder.config import DeepseekV4Config, ModelConfig, parse_deepseek_v4
from twostroke.builder.inventory import TensorSpec, inventory, target_inventory
from twostroke.builder.networks import (
    deepseek_v4,
    deepseek_v4_nextn,
    deepseek_v32,
    deepseek_v32_checkpoint,
    deepseek_v32_nextn,
    dspark,
    mtp,
)
from twostroke.builder.networks.layers import StepSpec
from twostroke.builder.strict_json import Fields
from twostroke.engines.errors import BuildError


@dataclass(frozen=True)
class Draft:
    """What a draft method asks of a build: tokens per block, what it taps of the target (in the target network's own
    terms, W features in all), its steps in export order.

    `steps(max_seq_len, own)`: `own` are the names of the tensors that the draft does not share with the target.
    """

    block_size: int
    taps: tuple[int | str, ...]
    taps_width: int
    steps: Callable[[int, frozenset[str]], tuple[StepSpec, ...]]


class TargetNetwork(Protocol):
    """A target network."""

    def step(self) -> StepSpec:
        """The declaration of the target step."""


@dataclass(frozen=True)
class Target:
    """A family of checkpoints, by `model_type`. The config that `parse` returns is what all others take.

    `target_tensors(config, quantised=...)` are the tensors of the target, `all_tensors` those of its drafter too, whose
    names start with `draft_prefix(config)`. `detect_draft(config, tensor names, requested)` chooses the draft method.
    `network(config, draft_len, max_seq_len, taps)` makes the target step for pages of `tokens_per_page`;
    `drafts[method](config, max_draft_len)` is a draft method of the family; `draft_fields` are those of the config that
    describe the drafter. `index_keys[dtype](config)` is the config of a build that keeps index keys so.
    """

    parse: Callable[[Fields], ModelConfig]
    target_tensors: Callable[..., tuple[TensorSpec, ...]]
    all_tensors: Callable[..., tuple[TensorSpec, ...]]
    draft_prefix: Callable[..., str]
    detect_draft: Callable[..., str]
    network: Callable[..., TargetNetwork]
    tokens_per_page: int
    draft_fields: tuple[str, ...]
    drafts: Mapping[str, Callable[..., Draft]]
    index_keys: Mapping[str, Callable[..., ModelConfig]]


def _no_draft(config: ModelConfig, max_draft_len: int | None) -> Draft:
    if max_draft_len:
        raise BuildError(f"--max-draft-len is {max_draft_len}, but this build has no draft method")
    return Draft(0, (), 0, lambda max_seq_len, own: ())


def _dspark(config: DeepseekV4Config, max_draft_len: int | None) -> Draft:
    settings = config.dspark
    assert settings is not None, "draft detection chose dspark without its config"
    if max_draft_len not in (None, settings.block_size):
        raise BuildError(
            f"--max-draft-len is {max_draft_len}, but dspark drafts the block it was trained for, dspark_block_size = "
            f"{settings.block_size}; leave the option out and verify less of a block with the runtime's draft length, "
            "or give --force-draft-len for a block of another size, which changes every row of it"
        )

    def steps(max_seq_len: int, own: frozenset[str]) -> tuple[StepSpec, ...]:
        return dspark.Observe(config, settings).step(), dspark.Propose(config, settings).step()

    layers = settings.target_layer_ids
    return Draft(settings.block_size, layers, len(layers) * config.hidden_size, steps)


def _mtp(
    networks: tuple[Callable[..., TargetNetwork], ...], tap: str, width: Callable[..., int]
) -> Callable[..., Draft]:
    """MTP over the NextN layer of a family: the modules of its steps, the tap it reads and that one's features."""

    def draft(config: ModelConfig, max_draft_len: int | None) -> Draft:
        depth = mtp.DEFAULT_DEPTH if max_draft_len is None else max_draft_len
        if not 1 <= depth <= mtp.MAX_DEPTH:
            raise BuildError(f"--max-draft-len is {depth}; accepted for mtp: 1 to {mtp.MAX_DEPTH}")

        def steps(max_seq_len: int, own: frozenset[str]) -> tuple[StepSpec, ...]:
            return tuple(network(config, depth, max_seq_len, own).step() for network in networks)

        return Draft(depth, (tap,), width(config), steps)

    return draft


_DEEPSEEK_V4 = Target(
    parse_deepseek_v4,
    target_inventory,
    inventory,
    lambda config: "mtp.",
    draft_detection.detect_draft,
    deepseek_v4.DeepseekV4,
    deepseek_v4.TOKENS_PER_PAGE,
    ("num_nextn_predict_layers", "dspark"),
    {
        "none": _no_draft,
        "dspark": _dspark,
        "mtp": _mtp(deepseek_v4_nextn.STEPS, deepseek_v4.RESIDUAL, lambda config: config.hc_mult * config.hidden_size),
    },
    {"float32": lambda config: config},
)

_DEEPSEEK_V32 = Target(
    deepseek_v32_checkpoint.parse_config,
    deepseek_v32_checkpoint.target_tensors,
    deepseek_v32_checkpoint.all_tensors,
    deepseek_v32_checkpoint.draft_prefix,
    deepseek_v32_checkpoint.detect_draft,
    deepseek_v32.DeepseekV32,
    deepseek_v32.TOKENS_PER_PAGE,
    ("num_nextn_predict_layers",),
    {
        "none": _no_draft,
        "mtp": _mtp(deepseek_v32_nextn.STEPS, deepseek_v32.NORMED, lambda config: config.hidden_size),
    },
    {
        "float32": lambda config: config,
        deepseek_v32_checkpoint.FP8_INDEX_KEYS: deepseek_v32_checkpoint.with_fp8_index_keys,
    },
)

TARGETS: Mapping[str, Target] = {"deepseek_v4": _DEEPSEEK_V4, "deepseek_v32": _DEEPSEEK_V32}
