from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twostroke.engines.errors import ConfigError, EngineError, RequestError
from twostroke.engines.loading import LoadedEngine
from twostroke.runtime.generation import Generation
from twostroke.runtime.llm import LLM
from twostroke.runtime.outputs import CompletionOutput, RequestOutput
from twostroke.runtime.sampling_params import SamplingParams
from twostroke.runtime.tokenizer import Tokenizer
from twostroke.tests.runtime.byte_level_tokenizer import write_tokenizer
from twostroke.tests.runtime.scripted_engine import EOS, MARGIN, VOCAB, write_scripted_engine

PROMPT = [0, 3, 4]
STORY = "a naïve story 😀 of the end\nSTOP and what nobody shall read"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def story_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(STORY, add_special_tokens=False)


@pytest.fixture(scope="module", params=[0, 5], ids=["plain", "drafted"])
def llm(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    story_ids: list[int],
) -> Iterator[LLM]:
    """An LLM that answers every three-token prompt with the story, plainly or in blocks of up to six tokens."""
    folder = write_scripted_engine(tmp_path_factory.mktemp("story"), PROMPT + story_ids, draft_length=request.param)
    write_tokenizer(folder)
    with LLM(folder, max_batch_size=4) as llm:
        yield llm
        assert llm.stats()["running"] == llm.stats()["waiting"] == 0


def answer_of(output: RequestOutput | list[RequestOutput]) -> CompletionOutput:
    assert isinstance(output, RequestOutput)
    assert output.finished
    return output.outputs[0]


def ordinary(llm: LLM, story_ids: list[int]) -> None:
    """One ordinary request is answered as ever."""
    assert answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=4))).token_ids == story_ids[:4]


def test_an_answer_has_text_ids_reason_and_prompt(llm: LLM, story_ids: list[int], tokenizer: Tokenizer) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=9))
    answer = answer_of(output)
    assert isinstance(output, RequestOutput)
    assert answer.token_ids == story_ids[:9]
    assert answer.length == 9
    assert answer.text == tokenizer.decode(story_ids[:9])
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert output.prompt_token_ids == PROMPT
    assert output.prompt is None


@pytest.mark.parametrize("max_tokens", range(1, 13))
@pytest.mark.parametrize("streaming", [False, True])
def test_exactly_max_tokens_are_delivered(llm: LLM, story_ids: list[int], max_tokens: int, streaming: bool) -> None:
    outputs = list(llm.generate_async(PROMPT, SamplingParams(max_tokens=max_tokens), streaming=streaming))
    assert answer_of(outputs[-1]).token_ids == story_ids[:max_tokens]
    assert answer_of(outputs[-1]).finish_reason == "length"
    if not streaming:
        assert len(outputs) == 1


def test_text_prompts_are_encoded_and_kept(llm: LLM, tokenizer: Tokenizer) -> None:
    output = llm.generate("hi", SamplingParams(max_tokens=1))
    assert isinstance(output, RequestOutput)
    assert (output.prompt, output.prompt_token_ids) == ("hi", tokenizer.encode("hi"))
    output = llm.generate({"prompt": "hi"}, SamplingParams(max_tokens=1, add_special_tokens=False))
    assert isinstance(output, RequestOutput)
    assert output.prompt_token_ids == tokenizer.encode("hi", add_special_tokens=False)


@pytest.mark.parametrize("prompt", [PROMPT, tuple(PROMPT), np.array(PROMPT), {"prompt_token_ids": PROMPT}])
def test_token_ids_come_in_any_sequence(llm: LLM, story_ids: list[int], prompt: Any) -> None:
    assert answer_of(llm.generate(prompt, SamplingParams(max_tokens=3))).token_ids == story_ids[:3]


def test_a_list_of_prompts_gives_outputs_in_its_order(llm: LLM, story_ids: list[int]) -> None:
    script = PROMPT + story_ids
    prompts = [PROMPT[:length] for length in (1, 2, 3, 1, 2, 3, 1)]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=n) for n in range(1, 8)])
    assert isinstance(outputs, list)
    for n, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        assert output.outputs[0].token_ids == script[len(prompt) : len(prompt) + n]


def test_a_stop_string_ends_ids_and_text_with_the_token_that_completes_it(
    llm: LLM, story_ids: list[int], tokenizer: Tokenizer
) -> None:
    kept = next(n for n in range(len(story_ids)) if "STOP" in tokenizer.decode(story_ids[:n]))
    for include in (False, True):
        params = SamplingParams(max_tokens=60, stop=["nobody", "STOP"], include_stop_str_in_output=include)
        params.return_generation_logits = True
        output = llm.generate(PROMPT, params)
        answer = answer_of(output)
        assert isinstance(output, RequestOutput)
        assert (answer.finish_reason, answer.stop_reason) == ("stop", "STOP")
        assert answer.text == STORY[: STORY.index("STOP") + (4 if include else 0)]
        assert answer.token_ids == story_ids[:kept]
        assert answer.generation_logits is not None
        assert len(answer.generation_logits) == kept
        assert output.acceptance is not None
        assert output.acceptance.emitted == kept - 1
        assert output.acceptance.accepted <= kept - 1
        assert sum(output.acceptance.accepted_at) == output.acceptance.accepted


def test_what_may_become_a_stop_string_is_not_streamed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, stop="STOP and")
    streamed = ""
    for output in llm.generate_async(PROMPT, params, streaming=True):
        streamed += output.outputs[0].text_diff
        assert "S" not in streamed
        assert output.outputs[0].text == streamed
    assert streamed == STORY[: STORY.index("STOP")]


def test_a_stop_at_the_last_allowed_token_is_a_stop(llm: LLM, story_ids: list[int], tokenizer: Tokenizer) -> None:
    kept = next(n for n in range(len(story_ids)) if "STOP" in tokenizer.decode(story_ids[:n]))
    at = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=kept, stop="STOP")))
    before = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=kept - 1, stop="STOP")))
    assert (at.finish_reason, at.length) == ("stop", kept)
    assert (before.finish_reason, before.length) == ("length", kept - 1)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("draft_length", [0, 5])
def test_what_comes_behind_a_stop_string_is_counted_nowhere(
    tmp_path: Path, tokenizer: Tokenizer, story_ids: list[int], draft_length: int, lag: int
) -> None:
    """Not in the answer's own counters and not in the totals, though the budget or more tokens came in one step."""
    folder = write_scripted_engine(tmp_path, PROMPT + story_ids, draft_length=draft_length)
    write_tokenizer(folder)
    starts = {n: tokenizer.decode(story_ids[:n]) for n in range(1, 15)}  # each is complete with its last token
    asked = [(start, n, n + more) for n, start in starts.items() if "\ufffd" not in start for more in (0, 1, 3, 40)]
    with LLM(folder, max_batch_size=4, lag=lag) as llm:
        iterations = emitted = accepted = 0
        for stop, length, budget in asked:
            output = llm.generate(PROMPT, SamplingParams(max_tokens=budget, stop=stop))
            answer = answer_of(output)
            assert (answer.finish_reason, answer.length) == ("stop", length)
            assert isinstance(output, RequestOutput)
            assert output.acceptance is not None
            assert output.acceptance.emitted == length - 1
            iterations += output.acceptance.iterations
            emitted += output.acceptance.emitted
            accepted += output.acceptance.accepted
        stats = llm.stats()
    total = stats["acceptance"]
    assert (total["iterations"], total["emitted"], total["accepted"]) == (iterations, emitted, accepted)
    assert sum(total["accepted_at"]) == accepted
    assert {reason: count for reason, count in stats["finished"].items() if count} == {"stop": len(asked)}


def test_a_stop_token_stays_in_the_ids_and_out_of_the_text(
    llm: LLM, story_ids: list[int], tokenizer: Tokenizer
) -> None:
    place = next(n for n in range(5, 12) if story_ids[n] not in story_ids[:n])
    answer = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=60, stop_token_ids=[story_ids[place]])))
    assert answer.token_ids == story_ids[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", story_ids[place])
    assert answer.text == tokenizer.decode(story_ids[:place])


@pytest.mark.parametrize("draft_length", [0, 5])
def test_stop_before_length_inside_a_block(tmp_path: Path, draft_length: int) -> None:
    folder = write_scripted_engine(tmp_path, [0, 10, 11, EOS, 20, 21, 22], draft_length=draft_length)
    with LLM(folder) as llm:
        five = answer_of(llm.generate([0], SamplingParams(max_tokens=5)))
        two = answer_of(llm.generate([0], SamplingParams(max_tokens=2)))
        more = answer_of(llm.generate([0], SamplingParams(max_tokens=5, ignore_eos=True)))
        other = answer_of(llm.generate([0], SamplingParams(max_tokens=5, end_id=20)))
    assert (five.token_ids, five.finish_reason, five.stop_reason) == ([10, 11, EOS], "stop", None)
    assert (two.token_ids, two.finish_reason) == ([10, 11], "length")
    assert (more.token_ids, more.finish_reason) == ([10, 11, EOS, 20, 21], "length")
    assert (other.token_ids, other.finish_reason) == ([10, 11, EOS, 20], "stop")


def test_streamed_pieces_join_to_the_buffered_answer(llm: LLM, story_ids: list[int], tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=len(story_ids))
    text, token_ids = "", []
    for output in llm.generate_async(PROMPT, params, streaming=True):
        text += output.outputs[0].text_diff
        token_ids += output.outputs[0].token_ids_diff
        assert "�" not in output.outputs[0].text_diff
    assert (text, token_ids) == (STORY, story_ids)
    assert answer_of(llm.generate(PROMPT, params)).text == text


def test_results_can_be_awaited_and_iterated_over_in_an_event_loop(llm: LLM, story_ids: list[int]) -> None:
    async def both() -> tuple[list[RequestOutput], list[RequestOutput]]:
        async def pieces() -> list[RequestOutput]:
            generation = llm.generate_async(PROMPT, SamplingParams(max_tokens=20), streaming=True)
            return [output async for output in generation]

        async def whole() -> RequestOutput:
            return await llm.generate_async(PROMPT, SamplingParams(max_tokens=20))

        first, *rest = await asyncio.gather(pieces(), whole(), whole(), whole())
        return first, rest

    streamed, awaited = asyncio.run(both())
    assert [token for output in streamed for token in output.outputs[0].token_ids_diff] == story_ids[:20]
    assert streamed[-1].finished
    assert all(output.outputs[0].token_ids == story_ids[:20] for output in awaited)


def test_an_aborted_request_ends_as_cancelled_with_what_it_has(llm: LLM, story_ids: list[int]) -> None:
    generation = llm.generate_async(PROMPT, SamplingParams(max_tokens=90, ignore_eos=True), streaming=True)
    next(iter(generation))
    generation.abort()
    answer = answer_of(generation.result(timeout=10))
    assert generation.aborted()
    if answer.finish_reason == "cancelled":
        assert answer.token_ids == (story_ids + [2] * 90)[: answer.length]
    generation.abort()
    ordinary(llm, story_ids)


def test_result_gives_up_after_its_timeout_and_the_request_goes_on() -> None:
    generation = Generation(1, None, [0], SamplingParams(), streaming=False, abort=lambda request_id: None)
    with pytest.raises(TimeoutError, match=r"not finished after 0\.01 seconds"):
        generation.result(timeout=0.01)
    generation.publish(text="a", token_ids=[10], finish_reason="length")
    assert answer_of(generation.result(timeout=0)).text == "a"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "inputs is empty"),
        ([[]], "prompt 0: the prompt is empty"),
        ([-1], r"token 0 of prompt is -1, expected a token id in 0\.\.319"),
        ([[-1]], "prompt 0: token 0 of prompt is -1"),
        ([VOCAB], "token 0 of prompt is 320"),
        ([1.5], r"token 0 of prompt is 1\.5"),
        ([True], "token 0 of prompt is True"),
        ([[[1]]], r"prompt 0: token 0 of prompt is \[1\]"),
        ([5] * 96, r"prompt has 96 tokens, but .* may have 96, so at most 95"),
        ([5] * 200, "prompt has 200 tokens"),
        ([5] * 100_000, "prompt has 100000 tokens"),
        (b"bytes", "the prompt is a bytes"),
        ("a\udcffb", r"the prompt has '\\udcff' at character 1, expected text that UTF-8 can hold"),
        (5, "inputs is a int"),
        ({"text": "a"}, r"keys \['text'\], expected prompt or prompt_token_ids"),
        ({"prompt": "a", "cache_salt": "b"}, r"keys \['cache_salt', 'prompt'\], expected prompt or"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "expected prompt or prompt_token_ids"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_request_served(
    llm: LLM, story_ids: list[int], prompt: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompt, SamplingParams(max_tokens=4))
    assert caught.value.field in ("prompt", "inputs")
    ordinary(llm, story_ids)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"end_id": VOCAB}, "end_id"),
        ({"stop_token_ids": [1, VOCAB]}, "stop_token_ids"),
        ({"bad_token_ids": [VOCAB]}, "bad_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"bad_token_ids": list(range(VOCAB))}, "bad_token_ids"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)}, "logit_bias"),
        ({"speculative": 9}, "speculative"),
        ({"min_tokens": 94, "max_tokens": 95}, "min_tokens"),
    ],
)
def test_parameters_that_do_not_fit_the_engine_are_refused_by_name(
    llm: LLM, story_ids: list[int], given: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        llm.generate(PROMPT, SamplingParams(**given))
    assert caught.value.field == field
    ordinary(llm, story_ids)


def test_one_bad_prompt_in_a_list_is_named_by_its_index_and_nothing_runs(llm: LLM) -> None:
    before = llm.stats()["prefill_tokens"]
    with pytest.raises(RequestError, match="prompt 1: token 0 of prompt is -1"):
        llm.generate([PROMPT, [-1], PROMPT])
    assert llm.stats()["prefill_tokens"] == before


def test_parameters_of_the_wrong_number_or_kind_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="sampling_params has 2 entries, expected one SamplingParams, or 3"):
        llm.generate([PROMPT] * 3, [SamplingParams()] * 2)
    with pytest.raises(RequestError, match="sampling_params has a dict"):
        llm.generate(PROMPT, {"max_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="generate_async takes one prompt"):
        llm.generate_async([PROMPT, PROMPT])  # type: ignore[list-item]


def test_a_parameter_changed_after_construction_is_checked_again(llm: LLM) -> None:
    params = SamplingParams()
    params.max_tokens = 0
    with pytest.raises(RequestError, match="max_tokens is 0"):
        llm.generate(PROMPT, params)


def test_a_budget_beyond_the_context_is_cut_and_says_length(llm: LLM) -> None:
    answer = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=100_000_000)))
    assert (answer.length, answer.finish_reason) == (96 - len(PROMPT), "length")


def test_a_seed_is_drawn_for_each_request_and_reported(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 3, SamplingParams(max_tokens=2, temperature=1.0))
    assert isinstance(outputs, list)
    assert len({output.seed for output in outputs}) == 3
    given = llm.generate(PROMPT, SamplingParams(max_tokens=2, temperature=1.0, seed=7))
    assert isinstance(given, RequestOutput)
    assert given.seed == 7


def test_the_same_seed_gives_the_same_answer_in_any_company(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=4.0, seed=11)
    alone = answer_of(llm.generate(PROMPT, params)).token_ids
    crowd = llm.generate([PROMPT] * 3, [SamplingParams(max_tokens=20, temperature=3.0), params, SamplingParams()])
    assert isinstance(crowd, list)
    assert crowd[1].outputs[0].token_ids == alone


def test_bias_and_forbidden_tokens_change_the_answer(llm: LLM, story_ids: list[int]) -> None:
    wanted = story_ids[0]
    answer = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=1, bad_token_ids=[wanted])))
    assert answer.token_ids[0] != wanted
    answer = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=1, logit_bias={9: MARGIN + 1})))
    assert answer.token_ids == [9]
    answer = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=1, logit_bias={wanted: -math.inf})))
    assert answer.token_ids[0] != wanted


def test_generation_logits_are_the_rows_that_judged(llm: LLM, story_ids: list[int]) -> None:
    answer = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=9, return_generation_logits=True)))
    assert answer.generation_logits is not None
    assert answer.generation_logits.shape == (9, VOCAB)
    assert answer.generation_logits.argmax(axis=1).tolist() == story_ids[:9]
    assert answer.generation_logits.max() == MARGIN
    assert answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=9))).generation_logits is None


def test_a_prompt_is_cut_on_the_left_when_asked(llm: LLM) -> None:
    output = llm.generate([5, 6, *PROMPT], SamplingParams(max_tokens=1, truncate_prompt_tokens=3))
    assert isinstance(output, RequestOutput)
    assert output.prompt_token_ids == PROMPT


def test_text_can_be_left_out(llm: LLM) -> None:
    answer = answer_of(llm.generate(PROMPT, SamplingParams(max_tokens=4, detokenize=False)))
    assert (answer.text, answer.length) == ("", 4)


def test_without_a_tokenizer_ids_work_and_text_is_refused(tmp_path: Path) -> None:
    with LLM(write_scripted_engine(tmp_path, [0, 10, 11])) as llm:
        answer = answer_of(llm.generate([0], SamplingParams(max_tokens=2)))
        assert (answer.token_ids, answer.text) == ([10, 11], "")
        with pytest.raises(RequestError, match=r"prompt is text.*tokenizer\.json") as caught:
            llm.generate("hi")
        assert caught.value.field == "prompt"
        with pytest.raises(RequestError, match="there is no tokenizer; give stop_token_ids") as caught:
            llm.generate([0], SamplingParams(stop="x"))
        assert caught.value.field == "stop"


def test_an_unknown_option_and_a_value_out_of_range_are_refused_before_serving(tmp_path: Path) -> None:
    folder = write_scripted_engine(tmp_path, [0, 10])
    with pytest.raises(TypeError, match="max_batchsize"):
        LLM(folder, max_batchsize=4)
    with pytest.raises(ConfigError, match="max_batch_size is 0"):
        LLM(folder, max_batch_size=0)
    with pytest.raises(ConfigError, match="max_seq_len is 1000"):
        LLM(folder, max_seq_len=1000)


def test_after_shutdown_requests_are_refused_and_running_ones_are_cancelled(tmp_path: Path) -> None:
    threads = threading.active_count()
    llm = LLM(write_scripted_engine(tmp_path, [0, 10, 11], max_seq_len=4096), max_batch_size=1)
    generations = [llm.generate_async([0], SamplingParams(max_tokens=4000)) for _ in range(3)]
    llm.shutdown()
    llm.shutdown()
    assert all(generation.result(timeout=1).outputs[0].finish_reason == "cancelled" for generation in generations)
    with pytest.raises(EngineError, match="shut down"):
        llm.generate([0])
    assert threading.active_count() == threads


def test_requests_and_aborts_from_many_threads_all_end_and_leave_nothing_behind(llm: LLM, story_ids: list[int]) -> None:
    endless = [*story_ids, *[2] * 96]
    wrong: list[object] = []

    def client(number: int) -> None:
        for turn in range(12):
            generation = llm.generate_async(PROMPT, SamplingParams(max_tokens=5 + 7 * turn), streaming=turn % 2 == 0)
            if (number + turn) % 3 == 0:
                generation.abort()
            answer = answer_of(generation.result(timeout=30))
            if answer.token_ids != endless[: answer.length] or answer.finish_reason not in ("length", "cancelled"):
                wrong.append(answer)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(timeout=60)
    assert not wrong
    assert not any(thread.is_alive() for thread in clients)
    ordinary(llm, story_ids)


def test_an_llm_nobody_holds_ends_its_thread(tmp_path: Path) -> None:
    threads = threading.active_count()
    llm = LLM(write_scripted_engine(tmp_path, [0, 10, 11]))
    llm.generate([0], SamplingParams(max_tokens=1))
    del llm
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads


def test_an_answer_that_cannot_be_put_together_hurts_nobody_else(
    tmp_path: Path, story_ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    broken, whole = tokenizer.token_bytes, story_ids[2]

    def token_bytes(token_id: int, skip_special_tokens: bool = True) -> bytes:
        if token_id == whole and not skip_special_tokens:
            raise RuntimeError("a token that has no bytes")
        return broken(token_id, skip_special_tokens)

    tokenizer.token_bytes = token_bytes  # type: ignore[method-assign]
    folder = write_scripted_engine(tmp_path, PROMPT + story_ids, draft_length=5)
    with caplog.at_level(logging.DEBUG), LLM(folder, tokenizer=tokenizer) as llm:
        good = llm.generate_async(PROMPT, SamplingParams(max_tokens=20))
        bad = llm.generate_async(PROMPT, SamplingParams(max_tokens=20, skip_special_tokens=False))
        with pytest.raises(RuntimeError, match="no bytes"):
            bad.result(timeout=10)
        assert answer_of(good.result(timeout=10)).token_ids == story_ids[:20]
        ordinary(llm, story_ids)


WORDS = ["hello world", "a", "naïve 😀", "the quick brown fox jumps over the lazy dog"]


@pytest.fixture(scope="module")
def drafted(drafted_engine: LoadedEngine) -> Iterator[LLM]:
    with LLM(drafted_engine.folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(drafted_engine: LoadedEngine) -> Iterator[LLM]:
    with LLM(drafted_engine.folder, draft_length=0) as llm:
        yield llm


@pytest.mark.parametrize("given", [{}, {"repetition_penalty": 1.3}, {"temperature": 1.0, "coupling": "gumbel"}])
def test_a_real_engine_gives_the_same_answers_with_and_without_drafts(
    drafted: LLM, plain: LLM, given: dict[str, Any]
) -> None:
    params = [SamplingParams(max_tokens=40, seed=seed, **given) for seed in range(len(WORDS))]
    ours, theirs = drafted.generate(WORDS, params), plain.generate(WORDS, params)
    assert isinstance(ours, list)
    assert isinstance(theirs, list)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.outputs[0].text == other.outputs[0].text
        assert mine.outputs[0].finish_reason == other.outputs[0].finish_reason
    assert drafted.stats()["acceptance"]["drafted"] > 0
    assert plain.stats()["acceptance"]["drafted"] == 0


def test_a_real_engine_streams_the_decoding_of_its_ids(drafted: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=2.0, seed=3, ignore_eos=True)
    outputs = list(drafted.generate_async("streams", params, streaming=True))
    answer = answer_of(outputs[-1])
    assert "".join(output.outputs[0].text_diff for output in outputs) == answer.text
    assert answer.text == Tokenizer(drafted.model).decode(answer.token_ids)
    assert answer.length == 60


def test_a_stop_string_of_a_real_engine_is_honoured_and_the_next_request_served(drafted: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
    whole = answer_of(drafted.generate("stop here", params))
    stop = whole.text[12:15]
    cut = answer_of(drafted.generate("stop here", dataclasses.replace(params, stop=stop)))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: cut.length]
    assert answer_of(drafted.generate("stop here", params)).token_ids == whole.token_ids
