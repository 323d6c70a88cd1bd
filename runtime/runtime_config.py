"""What an operator may choose about a runtime, and what that comes to on one engine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from twostroke.engines.attention_backends import depth_refusal
from twostroke.engines.errors import ConfigError
from twostroke.engines.manifest import Manifest
from twostroke.runtime.buckets import default_buckets


@dataclass(frozen=True)
class RuntimeConfig:
    """Choices made at start-up. None means what the engine allows.

    `max_batch_size` requests run at once, more wait; without it as many as the build recorded. `max_num_tokens` prompt
    tokens go through one prefill step. With `draft_length` below the engine's block dspark drafts the full block and
    cuts it, mtp stops early: either way the proposals of shared positions are those of the full block; 0 decodes
    plainly. `confidence_threshold` verifies the leading drafts whose confidence reaches it (0: all); a draft that gives
    none refuses it. `cuda_graph_batch_sizes` lists the request buckets; `max_batch_size` always belongs to them.
    `kv_pages` pages are shared by all requests, scratch not counted. The host reads results `lag` iterations behind the
    launch. `enable_prefix_caching` is refused: there is no prefix cache yet.
    """

    max_batch_size: int | None = None
    max_num_tokens: int = 64
    max_seq_len: int | None = None
    draft_length: int | None = None
    confidence_threshold: float = 0.0
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    kv_pages: int | None = None
    threads: int = 1
    lag: int = 0
    enable_prefix_caching: bool = False

    def __post_init__(self) -> None:
        if self.max_batch_size is not None:
            _at_least("max_batch_size", self.max_batch_size, 1)
        _at_least("max_num_tokens", self.max_num_tokens, 1)
        _at_least("threads", self.threads, 1)
        if self.threads > (cores := os.cpu_count() or 1):
            raise ConfigError(f"threads is {self.threads}, expected at most {cores}, the cores of this machine")
        _at_least("lag", self.lag, 0)
        if self.enable_prefix_caching is not False:
            raise ConfigError(
                f"enable_prefix_caching is {self.enable_prefix_caching!r}, expected False: there is no prefix cache "
                "yet, every prompt is computed from its first token; leave it out"
            )
        if self.max_seq_len is not None:
            _at_least("max_seq_len", self.max_seq_len, 2)
        if self.draft_length is not None:
            _at_least("draft_length", self.draft_length, 0)
        if self.kv_pages is not None:
            _at_least("kv_pages", self.kv_pages, 1)
        threshold = self.confidence_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0.0 <= threshold <= 1.0:
            raise ConfigError(f"confidence_threshold is {threshold!r}, expected 0 (verify all) to 1")
        sizes = self.cuda_graph_batch_sizes
        if sizes is not None and not isinstance(sizes, tuple | list):
            raise ConfigError(f"cuda_graph_batch_sizes is {sizes!r}, expected a list of sizes")
        for size in sizes or ():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"cuda_graph_batch_sizes holds {size!r}, expected sizes of 1 or more")
        if self.max_batch_size is not None:
            self._buckets(self.max_batch_size)

    def _buckets(self, largest: int) -> tuple[int, ...]:
        """Request counts an iteration exists for, ascending; the last one is `largest`, the batch size."""
        for size in self.cuda_graph_batch_sizes or ():
            if not 1 <= size <= largest:
                raise ConfigError(
                    f"cuda_graph_batch_sizes holds {size}, expected sizes in 1..{largest} (max_batch_size)"
                )
        return tuple(sorted({*(self.cuda_graph_batch_sizes or default_buckets(largest)), largest}))

    def limits(self, manifest: Manifest) -> Limits:
        """These choices on the engine of `manifest`; ConfigError where it cannot honour one."""
        build = manifest.build_config
        block = manifest.speculative.draft_len
        draft_length = block if self.draft_length is None else self.draft_length
        if draft_length > block:
            raise ConfigError(
                f"draft_length is {draft_length}, but the engine's draft ({manifest.speculative.method}) was built "
                f"for blocks of {block} tokens; ask for {block} or fewer"
            )
        target = manifest.steps.get("target")
        if target is not None and (refusal := depth_refusal(target.engine, build.decode_backend, draft_length)):
            raise ConfigError(f"draft_length is {draft_length}: {refusal}")
        if self.confidence_threshold and not draft_length:
            raise ConfigError(
                f"confidence_threshold is {self.confidence_threshold}, but nothing is drafted (draft method "
                f"{manifest.speculative.method}, draft_length {draft_length}); leave it out"
            )
        if self.confidence_threshold > 0 and not _gives_confidence(manifest):
            raise ConfigError(
                f"confidence_threshold is {self.confidence_threshold}, but the engine's draft "
                f"({manifest.speculative.method}) gives no confidence for its tokens; leave it out"
            )
        max_seq_len = build.max_seq_len if self.max_seq_len is None else self.max_seq_len
        if max_seq_len > build.max_seq_len:
            raise ConfigError(
                f"max_seq_len is {max_seq_len}, but the engine was built for {build.max_seq_len}; ask for that or "
                "less, or rebuild with a larger --max-seq-len"
            )
        pages_per_slot = -(-max_seq_len // build.tokens_per_page)
        max_batch_size = build.max_batch_size if self.max_batch_size is None else self.max_batch_size
        return Limits(
            max_batch_size=max_batch_size,
            buckets=self._buckets(max_batch_size),
            max_num_tokens=self.max_num_tokens,
            max_seq_len=max_seq_len,
            draft_length=draft_length,
            confidence_threshold=self.confidence_threshold,
            tokens_per_page=build.tokens_per_page,
            pages_per_slot=pages_per_slot,
            pages=max_batch_size * pages_per_slot if self.kv_pages is None else self.kv_pages,
            vocab_size=build.vocab_size,
            eos_token_ids=build.eos_token_ids,
            lag=self.lag,
        )


@dataclass(frozen=True)
class Limits:
    """A runtime's numbers on one engine, all resolved. `pages` counts what requests share, without the scratch page."""

    max_batch_size: int
    buckets: tuple[int, ...]
    max_num_tokens: int
    max_seq_len: int
    draft_length: int
    confidence_threshold: float
    tokens_per_page: int
    pages_per_slot: int
    pages: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    lag: int

    @property
    def slots(self) -> int:
        """S: a slot for each running request, and scratch."""
        return self.max_batch_size + 1

    @property
    def rows(self) -> int:
        """T: rows the target judges per request and iteration."""
        return self.draft_length + 1


def _gives_confidence(manifest: Manifest) -> bool:
    """Whether a step says how sure the draft is of its tokens."""
    bindings = (binding for step in manifest.steps.values() for binding in step.bindings)
    return any(binding.name == "confidence" and binding.role == "output" for binding in bindings)


def _at_least(name: str, value: int, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f"{name} is {value!r}, expected a whole number of at least {lowest}")
