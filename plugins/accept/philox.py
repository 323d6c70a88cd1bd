"""Counter-based noise: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A word of noise is a pure function of a 128-bit counter and a 64-bit key, so any thread, device or batch computes the
same one. Here the key is the request's seed (low word first) and the counter is

    (block, position, k, purpose)

`block` is token // 4 for noise over the vocabulary (word token % 4 belongs to the token) and 0 for a single uniform.
`position` is the anchor's absolute position and `k` = 1..T the place in the block, except for `Purpose.COUPLED`: there
`position` is the absolute position of the token being chosen and k is 0, because that noise must not know the block.
No counter is used twice in a sequence: every iteration moves the anchor by at least one.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ROUNDS = 10
# Counters per pass: eight uint64 temporaries of this length stay in a core's second-level cache.
_PASS = 8192


class Purpose(IntEnum):
    """What a word is drawn for: the last counter word, so that no two uses share noise."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3
    COUPLED = 4


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Philox4x32-10 of each counter u32 [..., 4] under key u32 [..., 2] (leading axes broadcast): u32 [..., 4]."""
    counter = np.asarray(counter, dtype=np.uint64)
    key = np.asarray(key, dtype=np.uint64)
    return np.stack(
        _philox(
            (counter[..., 0], counter[..., 1], counter[..., 2], counter[..., 3]),
            (key[..., 0], key[..., 1]),
        ),
        axis=-1,
    )


def _philox(
    counter: tuple[NDArray[np.uint64], ...], key: tuple[NDArray[np.uint64], NDArray[np.uint64]]
) -> tuple[NDArray[np.uint32], ...]:
    """The ten rounds on separate counter words, each u64 below 2**32 and broadcastable with the others."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _WORD) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    words = np.broadcast_arrays(c0, c1, c2, c3)
    return tuple(word.astype(np.uint32) for word in words)


def uniform64(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """u = (x + 0.5) / 2**32, exact in float64 and inside the open interval (0, 1). Same shape as `words`."""
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def uniform32(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """`uniform64` rounded to float32; what would round to 1 becomes 1 - 2**-24, so the interval stays open."""
    return np.minimum(uniform64(words).astype(np.float32), np.float32(1 - 2.0**-24))


def gumbel(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Standard Gumbel noise -log(-log u), from float64 and rounded once; between -3.14 and 22.88. Shape of `words`."""
    noise = uniform64(words)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise.astype(np.float32)


def _words(seed: ArrayLike) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    seed = np.asarray(seed, dtype=np.uint64)
    return seed & _LOW, seed >> _WORD


def uniforms(seed: ArrayLike, position: ArrayLike, k: ArrayLike, purpose: ArrayLike) -> NDArray[np.float64]:
    """One uniform in (0, 1) per broadcast element of seed u64, position, k and purpose (word 0 of block 0)."""
    seed, position, k, purpose = np.broadcast_arrays(
        *(np.asarray(value, dtype=np.uint64) for value in (seed, position, k, purpose))
    )
    counter = (np.zeros(seed.shape, dtype=np.uint64), position, k, purpose)
    return uniform64(_philox(counter, _words(seed))[0])


def gumbel_rows(
    seed: ArrayLike,
    position: ArrayLike,
    k: ArrayLike,
    purpose: ArrayLike,
    out: NDArray[np.float32],
    rows: NDArray[np.intp] | None = None,
) -> None:
    """Write vocabulary-wide Gumbel noise for n keys (each argument [n] or a scalar) into rows of `out` f32 [any, V].

    Key j fills row `rows[j]`, or row j where `rows` is None (then n is the height of `out`). A row depends on its own
    key and V's leading tokens only: a narrower `out` holds the same values.
    """
    height, vocab_size = out.shape
    targets = np.arange(height, dtype=np.intp) if rows is None else rows
    size = targets.shape
    seed, position, k, purpose = (
        np.broadcast_to(np.asarray(value, dtype=np.uint64), size) for value in (seed, position, k, purpose)
    )
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    width = min(blocks.size, _PASS)
    step = max(1, _PASS // max(1, width))
    for top in range(0, targets.size, step):
        part = slice(top, top + step)
        key0, key1 = _words(seed[part, None])
        for left in range(0, blocks.size, width):
            counter = (blocks[None, left : left + width], position[part, None], k[part, None], purpose[part, None])
            noise = gumbel(np.stack(_philox(counter, (key0, key1)), axis=-1))
            first = 4 * left
            last = min(vocab_size, first + 4 * noise.shape[1])
            out[targets[part], first:last] = noise.reshape(noise.shape[0], -1)[:, : last - first]
