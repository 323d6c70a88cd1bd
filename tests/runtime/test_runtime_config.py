"""Choices of the operator: what is refused, and what the rest comes to on an engine."""

import pytest

from twostroke.engines.errors import ConfigError
from twostroke.engines.manifest import Binding, BuildConfig, Manifest, Speculative, Step
from twostroke.runtime.buckets import choose_bucket, default_buckets, iteration_shape, prefill_buckets, prefill_shape
from twostroke.runtime.runtime_config import RuntimeConfig

PROPOSE = Step("propose", "onnxruntime", "portable", "", (Binding("confidence", "float32", ("R", 5), "output"),))


def manifest(draft_len: int = 5, max_seq_len: int = 128, max_batch_size: int = 8) -> Manifest:
    return Manifest(
        schema=1,
        twostroke_version="0",
        pretrained_config={},
        build_config=BuildConfig(max_seq_len, draft_len, 4, 320, (1,), 0, max_batch_size=max_batch_size),
        speculative=Speculative("dspark", draft_len, 192),
        steps={"propose": PROPOSE},
        state=(),
        files={},
    )


@pytest.mark.parametrize("depth", [6, 7, 10])
def test_draft_length_above_the_block_is_refused_with_both_numbers(depth: int) -> None:
    with pytest.raises(ConfigError, match=rf"draft_length is {depth}, .*blocks of 5 tokens"):
        RuntimeConfig(draft_length=depth).limits(manifest())


@pytest.mark.parametrize("depth", [None, 0, 3, 5])
def test_draft_length_up_to_the_block_is_taken(depth: int | None) -> None:
    assert RuntimeConfig(draft_length=depth).limits(manifest()).draft_length == (5 if depth is None else depth)


def test_as_many_requests_run_as_the_build_recorded_unless_the_runtime_is_told_otherwise() -> None:
    built = manifest(max_batch_size=20)
    assert (RuntimeConfig().limits(built).max_batch_size, RuntimeConfig().limits(built).buckets[-1]) == (20, 20)
    for asked in (3, 40):
        limits = RuntimeConfig(max_batch_size=asked).limits(built)
        assert (limits.max_batch_size, limits.slots) == (asked, asked + 1)
    with pytest.raises(ConfigError, match=r"cuda_graph_batch_sizes holds 21, expected sizes in 1\.\.20"):
        RuntimeConfig(cuda_graph_batch_sizes=(1, 21)).limits(built)


def test_a_confidence_threshold_without_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"confidence_threshold is 0\.5, but nothing is drafted"):
        RuntimeConfig(confidence_threshold=0.5, draft_length=0).limits(manifest())
    assert RuntimeConfig(confidence_threshold=0.5, draft_length=1).limits(manifest()).confidence_threshold == 0.5


@pytest.mark.parametrize("asked", [True, 1, None])
def test_a_prefix_cache_is_refused_because_there_is_none_yet(asked: object) -> None:
    """A-14."""
    with pytest.raises(ConfigError, match=rf"enable_prefix_caching is {asked}, .*there is no prefix cache yet"):
        RuntimeConfig(enable_prefix_caching=asked)
    assert RuntimeConfig(enable_prefix_caching=False) == RuntimeConfig()


def test_max_seq_len_above_the_engines_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len is 129, .*built for 128"):
        RuntimeConfig(max_seq_len=129).limits(manifest())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_num_tokens": 0}, "max_num_tokens"),
        ({"max_num_tokens": 2.5}, "max_num_tokens"),
        ({"draft_length": -1}, "draft_length"),
        ({"confidence_threshold": 1.5}, "confidence_threshold"),
        ({"confidence_threshold": float("nan")}, "confidence_threshold"),
        ({"kv_pages": 0}, "kv_pages"),
        ({"max_seq_len": 1}, "max_seq_len"),
        ({"lag": -1}, "lag"),
        ({"threads": True}, "threads"),
        ({"max_batch_size": 8, "cuda_graph_batch_sizes": (1, 9)}, "cuda_graph_batch_sizes"),
        ({"confidence_threshold": "0.5"}, "confidence_threshold"),
        ({"cuda_graph_batch_sizes": (0, 9)}, "cuda_graph_batch_sizes"),
        ({"cuda_graph_batch_sizes": 3}, "cuda_graph_batch_sizes"),
        ({"cuda_graph_batch_sizes": (1.5,)}, "cuda_graph_batch_sizes"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options: dict, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        RuntimeConfig(**options)


@pytest.mark.parametrize("requests", range(1, 17))
@pytest.mark.parametrize("sizes", [None, (1,), (1, 2)])
def test_the_widest_batch_always_has_a_bucket(requests: int, sizes: tuple[int, ...] | None) -> None:
    sizes = None if sizes is None else tuple(size for size in sizes if size <= requests)
    buckets = RuntimeConfig(max_batch_size=requests, cuda_graph_batch_sizes=sizes).limits(manifest()).buckets
    assert buckets[-1] == requests
    assert all(choose_bucket(buckets, running) >= running for running in range(1, requests + 1))


def test_default_buckets_double_to_eight_and_then_step_by_eight() -> None:
    assert default_buckets(36) == (1, 2, 4, 8, 16, 24, 32, 36)
    assert default_buckets(3) == (1, 2, 3)


def test_layouts_of_equal_token_count_are_different_shapes() -> None:
    shapes = {iteration_shape(requests, rows) for requests, rows in ((12, 1), (6, 2), (4, 3), (3, 4), (2, 6))}
    assert len(shapes) == 5
    assert {shape.tokens for shape in shapes} == {12}


def test_no_step_has_a_single_row() -> None:
    shape = iteration_shape(1, 1)
    assert (shape.requests, shape.tokens, shape.logit_rows) == (1, 2, 2)
    shape = prefill_shape((1, 2), prefill_buckets(32), 1, 1)
    assert (shape.requests, shape.tokens, shape.logit_rows) == (1, 2, 2)


def test_a_prefill_step_beyond_the_token_budget_is_refused_by_name() -> None:
    buckets = prefill_buckets(32)
    assert prefill_shape((1,), buckets, 1, 32).tokens == 32
    with pytest.raises(ValueError, match=r"33 tokens in one prefill step, expected at most max_num_tokens = 32"):
        prefill_shape((1,), buckets, 1, 33)
