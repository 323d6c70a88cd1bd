"""The demo models: which config, networks and losses belong together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from twostroke.builder.demo import dspark_training, mtp_training, shape, shape_v32, whole_sequence, whole_sequence_v32
from twostroke.builder.demo.trace import Trace
from twostroke.builder.demo.whole_sequence import Config, Weights


class TargetRows(Protocol):
    """What the recipe reads of a target's output."""

    @property
    def logits(self) -> Tensor: ...  # [B, T, V]

    @property
    def inputs(self) -> list[Tensor]: ...  # what `earlier` of a continuing call takes


@dataclass(frozen=True)
class DemoModel:
    """One target with its draft. Functions take the config first; `target` and the like are called with it."""

    name: str
    raw: Mapping[str, Any]  # config.json
    initial: Callable[[Config, int], dict[str, Tensor]]  # float32 weights by checkpoint name
    network: Callable[..., TargetRows]  # tokens [B, T], then earlier, trace, dropout
    draft_prefix: str  # of the names of the draft's weights
    draft_length: int  # tokens drafted an iteration
    # Texts [B, L], first position of the target's own words, anchors a text -> loss, agreement of greedy picks by
    # drafted position, expert loads.
    draft_loss: Callable[[Config, Weights, Tensor, int, int], tuple[Tensor, Tensor, dict[str, Tensor]]]
    # Greedy text [1, L], first anchor -> accepted drafts at every anchor that has `draft_length` tokens behind it.
    accepted_lengths: Callable[[Config, Weights, Tensor, int], Tensor]
    warm_up: Mapping[str, Any] = field(default_factory=dict)  # config fields in the first part of the target's training
    warm_up_share: float = 0.0
    recipe: Mapping[str, Any] = field(default_factory=dict)  # options of `train` that differ from its defaults

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(**self.raw)

    @property
    def warm_up_config(self) -> SimpleNamespace:
        return SimpleNamespace(**{**self.raw, **self.warm_up})

    def target(
        self,
        weights: Weights,
        tokens: Tensor,
        earlier: list[Tensor] | None = None,
        trace: Trace | None = None,
        dropout: float = 0.0,
        config: Config | None = None,
    ) -> TargetRows:
        """Rows of the target; `config` stands in for the model's own."""
        return self.network(config or self.config, weights, tokens, earlier, trace, dropout)

    def is_draft(self, name: str) -> bool:
        return name.startswith(self.draft_prefix)

    def part(self, weights: Weights, *, drafting: bool) -> dict[str, Tensor]:
        """The draft's weights, or the target's."""
        return {name: tensor for name, tensor in weights.items() if self.is_draft(name) == drafting}

    def shards(self, weights: Weights) -> tuple[dict[str, Tensor], ...]:
        """The target's file and the draft's."""
        return self.part(weights, drafting=False), self.part(weights, drafting=True)


def v4_dspark(**overrides: Any) -> DemoModel:
    """V4 with DSpark. `overrides` replace config fields, for tests at other sizes."""
    raw = shape.demo_config() | overrides
    return DemoModel(
        name="v4-dspark",
        raw=raw,
        initial=shape.initial_weights,
        network=whole_sequence.target,
        draft_prefix="mtp.",
        draft_length=raw["dspark_block_size"],
        draft_loss=dspark_training.loss_at_random_anchors,
        accepted_lengths=dspark_training.accepted_lengths,
    )


def v32_mtp(**overrides: Any) -> DemoModel:
    """V3.2 with its MTP layer."""
    raw = shape_v32.demo_config() | overrides
    prefix = f"model.layers.{raw['num_hidden_layers']}."
    return DemoModel(
        name="v32-mtp",
        raw=raw,
        initial=shape_v32.initial_weights,
        network=whole_sequence_v32.target,
        draft_prefix=prefix,
        draft_length=mtp_training.DEPTH,
        draft_loss=mtp_training.draft_loss,
        accepted_lengths=mtp_training.accepted_lengths,
        # As in the V3.2 report: the indexer first learns beside attention over everything, then chooses for it.
        warm_up={"index_topk": raw["max_position_embeddings"]},
        warm_up_share=0.2,
        recipe=shape_v32.RECIPE,
    )


MODELS: Mapping[str, Callable[..., DemoModel]] = {"v4-dspark": v4_dspark, "v32-mtp": v32_mtp}
