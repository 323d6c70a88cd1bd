"""Which requests are refused, and how the limits of the others come about."""

import numpy as np
import pytest

from twostroke.engines.errors import RequestError
from twostroke.runtime.request import check_prompt, draft_depth, token_limit


def refusal(function, *arguments: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        function(*arguments)
    return caught.value


def test_an_empty_prompt_is_refused_by_field() -> None:
    assert refusal(check_prompt, [], 320, 96).field == "prompt"


@pytest.mark.parametrize("length", [96, 97, 200, 100_000])
def test_a_prompt_without_room_for_an_answer_is_refused_with_limit_and_length(length: int) -> None:
    error = refusal(check_prompt, [1] * length, 320, 96)
    assert error.field == "prompt"
    assert str(length) in str(error)
    assert "96" in str(error)


@pytest.mark.parametrize("token", [-1, 320, 1.5, True, "1", None])
def test_an_id_outside_the_vocabulary_is_refused_with_its_place(token: object) -> None:
    error = refusal(check_prompt, [3, token], 320, 96)
    assert error.field == "prompt"
    assert "token 1 of prompt" in str(error)
    assert repr(token) in str(error)


def test_numpy_ids_are_token_ids() -> None:
    check_prompt(np.array([0, 319], np.int32), 320, 96)


@pytest.mark.parametrize("budget", [0, -1, 2.5, "5", True])
def test_an_output_budget_that_is_none_is_refused_by_field(budget: object) -> None:
    assert refusal(token_limit, 10, budget, 96).field == "max_tokens"


def test_a_budget_beyond_the_context_is_cut_to_it() -> None:
    assert token_limit(10, 100_000_000, 96) == 96
    assert token_limit(10, 5, 96) == 15


def test_a_request_may_shorten_its_drafts_but_not_lengthen_them() -> None:
    assert [draft_depth(wish, 3) for wish in (None, "off", 0, 2, 3)] == [3, 0, 0, 2, 3]
    error = refusal(draft_depth, 4, 3)
    assert error.field == "speculative"
    assert "4" in str(error)
    assert "3" in str(error)
