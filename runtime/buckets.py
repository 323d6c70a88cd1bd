"""Which prepared shape a step runs in. A shape is keyed by requests and by rows per request, never by their product:
six rows of two requests and four rows of three are different programs.

Matrix kernels round a lone row differently from the same row among others, so no step ever has one token or
one logit row: both are padded to two. A proposal needs no padding, its block has several rows.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 2


@dataclass(frozen=True)
class StepShape:
    """Sizes of one target step: N tokens of R requests, M logit rows."""

    requests: int
    tokens: int
    logit_rows: int


def default_buckets(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, ... up to `largest`, which always belongs to them."""
    sizes = {1, 2, 4, *range(8, largest + 1, 8), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def choose_bucket(buckets: tuple[int, ...], requests: int) -> int:
    """The smallest bucket that holds `requests`; `buckets` ascend and end at the largest batch."""
    for bucket in buckets:
        if bucket >= requests:
            return bucket
    raise ValueError(f"{requests} requests in one step, expected at most {buckets[-1]}")


def iteration_shape(bucket: int, rows: int) -> StepShape:
    """The verify step of `bucket` requests with `rows` rows each, every row judged."""
    padded = max(SMALLEST, bucket * rows)
    return StepShape(requests=bucket, tokens=padded, logit_rows=padded)


def prefill_buckets(max_num_tokens: int) -> tuple[int, ...]:
    """Token counts of prefill steps: powers of two below `max_num_tokens`, and itself."""
    sizes = {max(SMALLEST, max_num_tokens)}
    size = SMALLEST
    while size < max_num_tokens:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def prefill_shape(buckets: tuple[int, ...], token_buckets: tuple[int, ...], requests: int, tokens: int) -> StepShape:
    """The packed prefill step of `requests` chunks with `tokens` tokens in all: a logit row a request, and no more than
    tokens, because a chunk without a token ends no prompt."""
    if tokens > token_buckets[-1]:
        raise ValueError(f"{tokens} tokens in one prefill step, expected at most max_num_tokens = {token_buckets[-1]}")
    bucket, padded = choose_bucket(buckets, requests), choose_bucket(token_buckets, tokens)
    return StepShape(requests=bucket, tokens=padded, logit_rows=min(max(SMALLEST, bucket), padded))
