import numpy as np
import pytest

from twostroke.plugins.accept import Purpose, gumbel_rows, philox4x32, uniforms
from twostroke.plugins.accept.philox import gumbel, uniform32, uniform64

# Random123, tests/kat_vectors, lines "philox4x32 10".
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert philox4x32(counter, key).tolist() == expected


def test_philox_of_many_counters_equals_one_at_a_time():
    words = np.random.default_rng(0).integers(2**32, size=(5, 3, 6))
    together = philox4x32(words[..., :4], words[..., 4:])
    assert together.shape == (5, 3, 4)
    assert together.dtype == np.uint32
    for place in np.ndindex(5, 3):
        assert (together[place] == philox4x32(words[place][:4], words[place][4:])).all()


def test_uniforms_stay_inside_the_open_interval_and_gumbel_noise_is_finite():
    ends = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    assert uniform64(ends).tolist() == [(x + 0.5) / 2**32 for x in ends.tolist()]
    for u in (uniform64(ends), uniform32(ends)):
        assert (u > 0).all()
        assert (u < 1).all()
    assert uniform32(ends).dtype == np.float32
    assert np.isfinite(gumbel(ends)).all()


def test_every_part_of_the_key_changes_the_noise():
    base = {"seed": 5, "position": 9, "k": 1, "purpose": Purpose.DRAFT}
    others = [{"seed": 6}, {"seed": 5 + 2**32}, {"position": 10}, {"k": 2}, {"purpose": Purpose.BONUS}]
    values = {float(uniforms(**{**base, **other})) for other in [{}, *others]}
    assert len(values) == 1 + len(others)


def test_noise_of_a_token_is_word_token_mod_4_of_block_token_div_4():
    seed, position, k = 2**40 + 3, 77, 2
    out = np.empty((1, 11), np.float32)
    gumbel_rows(seed, position, k, Purpose.RESIDUAL, out)
    for token in range(11):
        words = philox4x32([token // 4, position, k, Purpose.RESIDUAL], [3, 2**8])
        assert out[0, token] == gumbel(words)[token % 4]


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 40_001])
def test_noise_rows_do_not_depend_on_their_neighbours(vocab_size):
    seeds, positions = np.array([1, 2, 3], np.uint64), np.array([7, 8, 9])
    together = np.full((5, vocab_size), -1, np.float32)
    gumbel_rows(seeds, positions, 1, Purpose.DRAFT, together, np.array([4, 0, 2]))
    assert (together[[1, 3]] == -1).all()
    for row, seed, position in zip((4, 0, 2), seeds, positions, strict=True):
        alone = np.empty((1, vocab_size), np.float32)
        gumbel_rows(seed, position, 1, Purpose.DRAFT, alone)
        assert (alone[0] == together[row]).all()


def test_gumbel_noise_has_the_gumbel_distribution():
    from scipy import stats

    out = np.empty((1, 200_000), np.float32)
    gumbel_rows(1, 1, 1, Purpose.DRAFT, out)
    assert stats.kstest(out[0], "gumbel_r").pvalue > 1e-3
