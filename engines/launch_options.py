"""The choices of a launch line in every spelling people type, as one value that both commands use.

The line that starts DeepSeek-V3.2 with MTP in SGLang is one line; here it is typed at `build` and at `generate`. What a
command settles it takes from `LaunchOptions`; what the build has settled is checked against the engine directory, so
nothing is accepted and ignored. This lives beside the manifest because builder and runtime both need it, may not
import each other, and the choices end here: in fields of a manifest, and in what an engine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.engines.attention_backends import ENGINES, Phase, backend_refusal, kv_cache_refusal
from twostroke.engines.errors import ConfigError
from twostroke.engines.launch_flags import ALGORITHM, BLOCK_SIZE, DRAFT_TOKENS, MEANING, STEPS, Choice, Flag, Typed
from twostroke.engines.manifest import Manifest


@dataclass(frozen=True)
class Given:
    """An option that was given, and how it was typed."""

    flag: Flag
    typed: Typed

    def readings(self) -> Iterator[tuple[Choice, str | int]]:
        """What it chooses; nothing where it leaves its choice open."""
        value = self.flag.read(self.typed)
        if value is not None:
            yield self.flag.choice, value
        if self.flag is BLOCK_SIZE:
            yield "draft", "dspark"


@dataclass(frozen=True)
class LaunchOptions:
    """What a command line chose; None where it chose nothing.

    `draft` "none" is plain decoding. `chosen_by` holds the option that made a choice, for sentences about it. `older`
    says of every outdated name and value what it is called now.
    """

    draft: str | None = None
    draft_len: int | None = None
    max_batch_size: int | None = None
    prefill_backend: str | None = None
    decode_backend: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel: int | None = None
    chosen_by: Mapping[Choice, Typed] = field(default_factory=dict)
    older: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Sequence[Given]) -> LaunchOptions:
        """The choices of a line. ConfigError for a value that means nothing here, and for two options that contradict
        each other; the sentence names both."""
        _check_depth_spellings({each.flag.names[0]: each.typed for each in given})
        values: dict[Choice, Any] = {}
        chosen_by: dict[Choice, Typed] = {}
        for each in given:
            for choice, value in each.readings():
                if values.setdefault(choice, value) != value:
                    first, second = _shown(chosen_by[choice], values[choice]), _shown(each.typed, value)
                    raise ConfigError(f"{second} contradicts {first}: both say {MEANING[choice]}")
                chosen_by.setdefault(choice, each.typed)
        _check_switched_off(values, chosen_by)
        no_field = ("topk", "attention", "prefix_cache")
        fields = {choice: value for choice, value in values.items() if choice not in no_field}
        return cls(**fields, chosen_by=chosen_by, older=tuple(dict.fromkeys(_older_spellings(given))))

    def check_engine(self, engine: str) -> None:
        """ConfigError with every choice that `engine` cannot honour, in one sentence."""
        _refuse([*self._of_parallelism(), *self._of_engine(engine)])

    def check_built(self, manifest: Manifest, where: object) -> None:
        """ConfigError with every choice that the engine directory `where` was not built for, in one sentence."""
        target = manifest.steps.get("target")
        of_engine = self._of_engine(target.engine) if target is not None and target.engine in ENGINES else []
        _refuse([*self._of_parallelism(), *(of_engine or self._of_build(manifest, where))])

    def _of_parallelism(self) -> list[str]:
        if self.tensor_parallel in (None, 1):
            return []
        return [f"{self._typed('tensor_parallel')}: there is no tensor parallelism yet, accepted is 1"]

    def _of_engine(self, engine: str) -> list[str]:
        phases: tuple[tuple[Choice, Phase, str | None], ...] = (
            ("prefill_backend", "prefill", self.prefill_backend),
            ("decode_backend", "decode", self.decode_backend),
        )
        found = [
            f"{self._typed(choice)}: {why}"
            for choice, phase, name in phases
            if name is not None and (why := backend_refusal(engine, phase, name))
        ]
        if self.kv_cache_dtype is not None and (why := kv_cache_refusal(engine, self.kv_cache_dtype)):
            found.append(f"{self._typed('kv_cache_dtype')}: {why}")
        return found

    def _of_build(self, manifest: Manifest, where: object) -> list[str]:
        build, speculative = manifest.build_config, manifest.speculative
        built: dict[Choice, tuple[str | None, str]] = {
            "prefill_backend": (self.prefill_backend, build.prefill_backend),
            "decode_backend": (self.decode_backend, build.decode_backend),
            "kv_cache_dtype": (self.kv_cache_dtype, build.kv_cache_dtype),
        }
        found = [
            f"{self._typed(choice)}, but {where} was built with {is_built}: leave it out, or rebuild with it"
            for choice, (asked, is_built) in built.items()
            if asked not in (None, is_built)
        ]
        method, draft_len = speculative.method, speculative.draft_len
        drafts = "without a draft" if method == "none" else f"with {method}, {draft_len} tokens an iteration"
        if self.draft not in (None, "none", method):
            found.append(f"{self._typed('draft')} asks for draft method {self.draft}, but {where} was built {drafts}")
        elif self.draft_len is not None and self.draft_len > draft_len:
            advice = f"ask for {draft_len} or fewer, or rebuild with more" if draft_len else "rebuild with a draft"
            asked_len = f"{self._typed('draft_len')} asks for {self.draft_len} drafted tokens"
            found.append(f"{asked_len}, but {where} was built {drafts}: {advice}")
        return found

    def _typed(self, choice: Choice) -> str:
        return str(self.chosen_by.get(choice, choice))


def _check_depth_spellings(typed: Mapping[str, Typed]) -> None:
    """What the two numbers of a chain must satisfy, and the one that means different things here and in SGLang."""
    steps, rows, block, algorithm = (typed.get(f.names[0]) for f in (STEPS, DRAFT_TOKENS, BLOCK_SIZE, ALGORITHM))
    if steps is None or not isinstance(steps.value, int):
        return
    if rows is not None and rows.value != steps.value + 1:
        raise ConfigError(
            f"{rows} contradicts {steps}: with --speculative-eagle-topk 1 the draft is a chain and num_draft_tokens = "
            f"num_steps + 1 (the drafts and the token they follow), here {steps.value + 1}"
        )
    alone = rows is None and block is None
    if alone and steps.value == 1 and algorithm is not None and algorithm.value == "DSPARK":
        raise ConfigError(
            f"{steps} with {algorithm}: SGLang drafts a whole block in that one step, here it would be one token; say "
            f"{BLOCK_SIZE.names[0]} instead"
        )


def _check_switched_off(values: Mapping[Choice, Any], chosen_by: Mapping[Choice, Typed]) -> None:
    """Where drafting is switched off, nothing else about drafts may be asked for."""
    about_drafts = [choice for choice in values if choice in ("draft", "draft_len", "topk")]
    off = [chosen_by[choice] for choice in about_drafts if values[choice] in ("none", 0)]
    drafting = [chosen_by[choice] for choice in about_drafts if values[choice] not in ("none", 0)]
    if off and drafting:
        raise ConfigError(f"{drafting[0]} contradicts {off[0]}, which switches drafting off")


def _older_spellings(given: Sequence[Given]) -> Iterator[str]:
    for each in given:
        if each.typed.option in each.flag.older:
            yield f"{each.typed.option} is now {each.flag.names[0]}"
        if each.typed.value in each.flag.older_values:
            yield f"{each.typed.value} is now {each.flag.older_values[str(each.typed.value)]}"


def _shown(typed: Typed, value: str | int) -> str:
    """An option as typed, and what it comes to where that differs."""
    return str(typed) if typed.value in (None, value) else f"{typed} ({value})"


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))
