from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.runtime.detokenizer import AnswerText, Detokenizer, StopMatcher
from twostroke.runtime.tokenizer import Tokenizer
from twostroke.tests.runtime.byte_level_tokenizer import THINK, USER, write_tokenizer

SOME_IDS = st.lists(st.integers(0, 319), max_size=40)
SOME_TEXT = st.text(alphabet="abé😀\n", max_size=30)
SOME_STOPS = st.lists(st.text(alphabet="abé😀\n", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def chunks(text: str, cuts: list[int]) -> list[str]:
    """`text` cut at the given places, as tokens would cut it."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


@given(ids=SOME_IDS, skip=st.booleans())
def test_joined_pieces_equal_the_decoding_of_all_ids(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30))
def test_text_comes_back_without_a_replacement_character_in_any_piece(tokenizer: Tokenizer, text: str) -> None:
    pieces = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    for piece in pieces:
        assert "�" not in piece or "�" in text


def test_a_character_cut_at_the_end_is_one_replacement_character(tokenizer: Tokenizer) -> None:
    emoji = [token for byte in "😁".encode() for token in [byte_id(tokenizer, byte)]]
    assert stream(tokenizer, emoji) == ["", "", "", "😁", ""]
    assert stream(tokenizer, emoji[:3]) == ["", "", "", "�"]


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    return next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == bytes([byte]))


def test_control_tokens_stay_out_of_the_text_and_added_words_do_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{USER}b{THINK}c", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == f"ab{THINK}c"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == f"a{USER}b{THINK}c"


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the text ends if it is read character by character: the plain definition."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@given(text=SOME_TEXT, stops=SOME_STOPS, cuts=st.lists(st.integers(0, 30), max_size=10), include=st.booleans())
@settings(max_examples=400)
def test_text_ends_at_the_first_complete_stop_string_however_it_was_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    out, found = "", None
    for chunk in chunks(text, cuts):
        released, found = matcher.push(chunk)
        out += released
        if found:
            break
    expected = first_stop(text, stops)
    if expected is None:
        assert (out + matcher.flush(), found) == (text, None)
    else:
        start, stop = expected
        assert (out, found) == (text[: start + (len(stop) if include else 0)], stop)


@given(text=SOME_TEXT, stops=SOME_STOPS, cuts=st.lists(st.integers(0, 30), max_size=10))
def test_nothing_is_released_that_may_become_a_stop_string_and_everything_else_is(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    seen = out = ""
    for chunk in chunks(text, cuts):
        released, found = matcher.push(chunk)
        if found:
            break
        seen, out = seen + chunk, out + released
        held = seen[len(out) :]
        assert not any(stop.startswith(seen[start:]) for start in range(len(out)) for stop in stops)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_strings_before_min_tokens_are_ordinary_text(tokenizer: Tokenizer) -> None:
    ids = [token for byte in b"aXbXc" for token in [byte_id(tokenizer, byte)]]
    answer = AnswerText(tokenizer, stop_strings=["X"], min_tokens=3)
    piece = answer.push(ids)
    assert (piece.text, piece.kept, piece.stop) == ("aXb", 4, "X")
    at_once = AnswerText(tokenizer, stop_strings=["X"], min_tokens=2).push(ids)
    assert (at_once.text, at_once.kept, at_once.stop) == ("a", 2, "X"), "the last token needed may end the answer"


def test_a_stop_string_completed_before_min_tokens_does_not_count_while_it_is_held_back(tokenizer: Tokenizer) -> None:
    """`ab` ends at the third token, but goes on being held: it begins `xabc` too."""
    ids = [byte_id(tokenizer, byte) for byte in b"xabz"]
    answer = AnswerText(tokenizer, stop_strings=["ab", "xabc"], min_tokens=4)
    piece = answer.push(ids)
    assert (piece.text + answer.flush(), piece.kept, piece.stop) == ("xabz", 4, None)


@given(ids=SOME_IDS, block=st.integers(1, 6), stops=SOME_STOPS)
def test_blocks_do_not_change_text_or_tokens(
    tokenizer: Tokenizer, ids: list[int], block: int, stops: list[str]
) -> None:
    def run(size: int) -> tuple[str, int, str | None]:
        answer, text, kept = AnswerText(tokenizer, stop_strings=stops), "", 0
        for start in range(0, len(ids), size):
            piece = answer.push(ids[start : start + size])
            text, kept = text + piece.text, kept + piece.kept
            if piece.stop:
                return text, kept, piece.stop
        return text + answer.flush(), kept, None

    assert run(block) == run(1)


def test_ids_end_with_the_token_that_completes_the_stop_string_inside_a_block(tokenizer: Tokenizer) -> None:
    ids = [token for byte in b"12ab34" for token in [byte_id(tokenizer, byte)]]
    piece = AnswerText(tokenizer, stop_strings=["ab"]).push(ids)
    assert (piece.text, piece.kept, piece.stop) == ("12", 4, "ab")
    piece = AnswerText(tokenizer, stop_strings=["ab"], include_stop=True).push(ids)
    assert (piece.text, piece.kept, piece.stop) == ("12ab", 4, "ab")


@pytest.mark.parametrize("spelling", [" ab", "ab", "a|b", "cab"])
def test_a_stop_word_is_found_in_the_text_whatever_its_tokens(tokenizer: Tokenizer, spelling: str) -> None:
    ids = [token for part in spelling.split("|") for token in tokenizer.encode(part, add_special_tokens=False)]
    piece = AnswerText(tokenizer, stop_strings=["ab"]).push(ids)
    assert piece.stop == "ab"
    assert piece.text == spelling.replace("|", "").removesuffix("ab")


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"ab{THINK}", add_special_tokens=False)
    assert AnswerText(tokenizer).push(ids, ends_with_stop_token=True).text == "ab"
    assert AnswerText(tokenizer, include_stop=True).push(ids, ends_with_stop_token=True).text == f"ab{THINK}"
