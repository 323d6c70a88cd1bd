"""A launch line means the same in every spelling; what it cannot mean is refused with both sides of it."""

from __future__ import annotations

import dataclasses

import pytest

from twostroke.engines import attention_backends
from twostroke.engines.attention_backends import AttentionBackend, EngineChoices
from twostroke.engines.errors import ConfigError
from twostroke.engines.launch_options import LaunchOptions
from twostroke.engines.manifest import BuildConfig, Manifest, Speculative, Step
from twostroke.tests.launch_lines import LAUNCH_LINES, options

MTP_LINE = LaunchOptions(
    draft="mtp",
    draft_len=3,
    max_batch_size=32,
    prefill_backend="flashmla_sparse",
    decode_backend="flashmla_kv",
    tensor_parallel=8,
)
OUTDATED = {
    "2025": (
        "nsa is now dsa",
        "--nsa-prefill is now --dsa-prefill-backend",
        "flashmla_prefill is now flashmla_sparse",
        "--nsa-decode is now --dsa-decode-backend",
        "flashmla_decode is now flashmla_kv",
        "--cuda-graph-max-bs is now --cuda-graph-max-bs-decode",
    ),
    "0.5.4": (
        "nsa is now dsa",
        "--nsa-prefill-backend is now --dsa-prefill-backend",
        "--nsa-decode-backend is now --dsa-decode-backend",
        "--cuda-graph-max-bs is now --cuda-graph-max-bs-decode",
    ),
    "0.5.23": (),
}


def choices(found: LaunchOptions) -> LaunchOptions:
    """Without how they were typed."""
    return dataclasses.replace(found, chosen_by={}, older=())


def built(method: str = "dspark", draft_len: int = 5) -> Manifest:
    """The manifest of an engine directory, without its files."""
    return Manifest(
        schema=1,
        twostroke_version="0",
        pretrained_config={},
        build_config=BuildConfig(128, draft_len, 4, 320, (1,), 0),
        speculative=Speculative(method, draft_len, 0),
        steps={"target": Step("target", "onnxruntime", "portable", "target.portable.onnx", ())},
        state=(),
        files={},
    )


@pytest.mark.parametrize("command", ["build", "generate"])
@pytest.mark.parametrize("generation", LAUNCH_LINES)
def test_the_v32_launch_line_means_the_same_in_every_generation_of_names(generation: str, command: str) -> None:
    found = options(LAUNCH_LINES[generation], command)
    assert choices(found) == MTP_LINE
    assert found.older == OUTDATED[generation]


@pytest.mark.parametrize("generation", LAUNCH_LINES)
def test_what_the_engine_lacks_of_the_launch_line_is_said_at_once_and_as_typed(generation: str) -> None:
    found = options(LAUNCH_LINES[generation])
    for check in (lambda: found.check_engine("onnxruntime"), lambda: found.check_built(built("mtp", 3), "DIR")):
        with pytest.raises(ConfigError) as caught:
            check()
        parallel, prefill, decode = str(caught.value).split("; ")
        typed = LAUNCH_LINES[generation].split()
        assert parallel == f"{typed[0]} 8: there is no tensor parallelism yet, accepted is 1"
        for sentence, name, present in ((prefill, "prefill", "flashmla_sparse"), (decode, "decode", "flashmla_kv")):
            option = next(word for word in typed if word.endswith((f"-{name}", f"-{name}-backend")))
            assert sentence == (
                f"{option} {typed[typed.index(option) + 1]}: engine onnxruntime has portable for {name}, not {present}"
            )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--speculative-algorithm NEXTN", LaunchOptions(draft="mtp")),
        ("--speculative-algorithm DSPARK", LaunchOptions(draft="dspark")),
        ("--speculative-num-draft-tokens 4", LaunchOptions(draft_len=3)),
        ("--speculative-num-steps 1", LaunchOptions(draft_len=1)),
        ("--speculative-dspark-block-size 5", LaunchOptions(draft="dspark", draft_len=5)),
        (
            "--speculative-algorithm DSPARK --speculative-dspark-block-size 5 --speculative-num-draft-tokens 6",
            LaunchOptions(draft="dspark", draft_len=5),
        ),
        ("--speculative-algorithm DSPARK --speculative-num-steps 5", LaunchOptions(draft="dspark", draft_len=5)),
        ("--draft-length 3 --speculative-num-steps 3", LaunchOptions(draft_len=3)),
        ("--draft-length 0 --no-speculation", LaunchOptions(draft="none", draft_len=0)),
        ("--dsa-decode-backend portable --nsa-decode portable", LaunchOptions(decode_backend="portable")),
        ("--nsa-decode flashmla_prefill", LaunchOptions(decode_backend="flashmla_sparse")),
        ("--kv-cache-dtype auto", LaunchOptions()),
        ("--kv-cache-dtype bf16", LaunchOptions(kv_cache_dtype="bfloat16")),
        ("--tp 1", LaunchOptions(tensor_parallel=1)),
        ("--speculative-eagle-topk 1", LaunchOptions()),
        ("--disable-radix-cache", LaunchOptions()),
    ],
)
def test_each_spelling_chooses_what_it_means(line: str, expected: LaunchOptions) -> None:
    assert choices(options(line)) == expected


def test_auto_leaves_the_draft_method_open() -> None:
    assert options("--draft auto --speculative-algorithm EAGLE", "build").draft == "mtp"
    assert options("--draft auto", "build").draft is None
    assert options("--draft mtp --speculative-algorithm NEXTN", "build").draft == "mtp"


@pytest.mark.parametrize(
    ("command", "line", "sentence"),
    [
        (
            "build",
            "--draft none --speculative-algorithm EAGLE",
            "--speculative-algorithm EAGLE (mtp) contradicts --draft none: both say the draft method",
        ),
        (
            "build",
            "--speculative-algorithm EAGLE --draft dspark",
            "--draft dspark contradicts --speculative-algorithm EAGLE (mtp): both say the draft method",
        ),
        (
            "build",
            "--max-draft-len 2 --speculative-num-steps 3",
            "--speculative-num-steps 3 contradicts --max-draft-len 2: both say how many tokens are drafted",
        ),
        (
            "build",
            "--max-draft-len 4 --speculative-num-draft-tokens 4",
            "--speculative-num-draft-tokens 4 (3) contradicts --max-draft-len 4: both say how many tokens are drafted",
        ),
        (
            "build",
            "--max-batch-size 8 --cuda-graph-max-bs 16",
            "--cuda-graph-max-bs 16 contradicts --max-batch-size 8: both say how many requests run at once",
        ),
        (
            "generate",
            "--max-running-requests 48 --cuda-graph-max-bs-decode 32",
            "--cuda-graph-max-bs-decode 32 contradicts --max-running-requests 48: both say how many requests",
        ),
        ("generate", "--max-batch-size 2 --max-batch-size 3", "--max-batch-size 3 contradicts --max-batch-size 2"),
        (
            "generate",
            "--nsa-prefill flashmla_prefill --dsa-prefill-backend fa3",
            "--dsa-prefill-backend fa3 contradicts --nsa-prefill flashmla_prefill (flashmla_sparse): both say the "
            "implementation of attention in prefill",
        ),
        (
            "generate",
            "--nsa-decode-backend fa3 --nsa-decode aiter",
            "--nsa-decode aiter contradicts --nsa-decode-backend",
        ),
        ("generate", "--tp 1 --tp-size 2", "--tp-size 2 contradicts --tp 1: both say how many devices share a model"),
        (
            "generate",
            "--speculative-num-steps 3 --speculative-num-draft-tokens 5",
            "--speculative-num-draft-tokens 5 contradicts --speculative-num-steps 3: with --speculative-eagle-topk 1 "
            "the draft is a chain and num_draft_tokens = num_steps + 1 (the drafts and the token they follow), here 4",
        ),
        (
            "generate",
            "--speculative-algorithm EAGLE --speculative-dspark-block-size 5",
            "--speculative-dspark-block-size 5 (dspark) contradicts --speculative-algorithm EAGLE (mtp)",
        ),
        (
            "generate",
            "--speculative-algorithm DSPARK --speculative-num-steps 1 --speculative-dspark-block-size 5",
            "--speculative-dspark-block-size 5 contradicts --speculative-num-steps 1",
        ),
        (
            "generate",
            "--no-speculation --draft-length 2",
            "--draft-length 2 contradicts --no-speculation, which switches",
        ),
        ("generate", "--no-speculation --speculative-algorithm EAGLE", "contradicts --no-speculation"),
        ("generate", "--no-speculation --speculative-eagle-topk 1", "--speculative-eagle-topk 1 contradicts --no-spec"),
        ("generate", "--draft-length 0 --speculative-algorithm EAGLE", "contradicts --draft-length 0, which switches"),
        (
            "build",
            "--draft none --speculative-num-steps 3",
            "--speculative-num-steps 3 contradicts --draft none, which",
        ),
    ],
)
def test_options_that_contradict_each_other_are_both_named(command: str, line: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(line, command)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--speculative-algorithm EAGLE3", "accepted are EAGLE and NEXTN (draft method mtp), and DSPARK"),
        ("--speculative-algorithm NONE", "--speculative-algorithm NONE: accepted are EAGLE"),
        ("--speculative-eagle-topk 4", "--speculative-eagle-topk 4: accepted is 1; more candidates make a tree"),
        ("--speculative-eagle-topk 0", "--speculative-eagle-topk 0: accepted is 1"),
        ("--speculative-num-steps 0", "--speculative-num-steps 0: expected at least 1"),
        ("--speculative-num-draft-tokens 1", "--speculative-num-draft-tokens 1: expected at least 2"),
        ("--speculative-dspark-block-size 0", "expected at least 1"),
        ("--attention-backend fa3", "the networks built here have sparse attention, accepted is dsa"),
        ("--max-running-requests 0", "--max-running-requests 0: expected at least 1"),
        ("--cuda-graph-max-bs -1", "--cuda-graph-max-bs -1: expected at least 1"),
        ("--tp 0", "--tp 0: expected at least 1"),
        (
            "--speculative-algorithm DSPARK --speculative-num-steps 1",
            "--speculative-num-steps 1 with --speculative-algorithm DSPARK: SGLang drafts a whole block in that",
        ),
    ],
)
def test_a_value_that_means_nothing_here_is_refused_with_what_does(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(line)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("method", "draft_len", "line"),
    [
        ("dspark", 5, "--speculative-algorithm DSPARK --speculative-dspark-block-size 5"),
        ("dspark", 5, "--speculative-num-steps 2"),
        ("mtp", 3, "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4 --tp 1"),
        ("mtp", 3, "--no-speculation"),
        ("none", 0, "--no-speculation"),
        ("mtp", 3, "--dsa-prefill-backend portable --nsa-decode portable --kv-cache-dtype float32"),
    ],
)
def test_a_line_that_fits_what_was_built_passes(method: str, draft_len: int, line: str) -> None:
    options(line).check_built(built(method, draft_len), "DIR")


@pytest.mark.parametrize(
    ("method", "draft_len", "line", "sentence"),
    [
        (
            "dspark",
            5,
            "--speculative-algorithm EAGLE",
            "--speculative-algorithm EAGLE asks for draft method mtp, but DIR was built with dspark, 5 tokens an "
            "iteration",
        ),
        (
            "mtp",
            3,
            "--speculative-dspark-block-size 2",
            "--speculative-dspark-block-size 2 asks for draft method dspark, but DIR was built with mtp, 3 tokens an "
            "iteration",
        ),
        (
            "none",
            0,
            "--speculative-algorithm NEXTN",
            "--speculative-algorithm NEXTN asks for draft method mtp, but DIR was built without a draft",
        ),
        (
            "mtp",
            3,
            "--speculative-num-draft-tokens 6",
            "--speculative-num-draft-tokens 6 asks for 5 drafted tokens, but DIR was built with mtp, 3 tokens an "
            "iteration: ask for 3 or fewer, or rebuild with more",
        ),
        (
            "none",
            0,
            "--speculative-num-steps 5",
            "--speculative-num-steps 5 asks for 5 drafted tokens, but DIR was built without a draft: rebuild with a "
            "draft",
        ),
    ],
)
def test_what_was_not_built_is_refused_with_both_findings(
    method: str, draft_len: int, line: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        options(line).check_built(built(method, draft_len), "DIR")
    assert str(caught.value) == sentence


def test_depth_five_is_refused_by_engines_for_none_and_three_and_depth_three_runs_on_the_second() -> None:
    for draft_len in (0, 3):
        with pytest.raises(ConfigError, match=r"asks for 5 drafted tokens, but DIR was built with"):
            options("--draft-length 5").check_built(built("mtp" if draft_len else "none", draft_len), "DIR")
    options("--draft-length 3").check_built(built("mtp", 3), "DIR")


def test_an_implementation_the_engine_has_and_the_build_did_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = EngineChoices((AttentionBackend("portable"), AttentionBackend("fa3")), ("float32", "bfloat16"))
    monkeypatch.setitem(attention_backends.ENGINES, "onnxruntime", both)  # type: ignore[arg-type]
    options("--dsa-prefill-backend portable").check_built(built(), "DIR")
    options("--dsa-prefill-backend fa3").check_engine("onnxruntime")
    with pytest.raises(ConfigError) as caught:
        options("--nsa-prefill fa3 --kv-cache-dtype bf16").check_built(built(), "DIR")
    assert str(caught.value) == (
        "--nsa-prefill fa3, but DIR was built with portable: leave it out, or rebuild with it; "
        "--kv-cache-dtype bf16, but DIR was built with float32: leave it out, or rebuild with it"
    )
