"""`twostroke build` with a launch line: what it records, and what it refuses before anything is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from twostroke.__main__ import main
from twostroke.engines.manifest import read_manifest
from twostroke.tests.checkpoints import F4, F4_PLAIN, with_overrides, write_checkpoint
from twostroke.tests.launch_lines import LAUNCH_LINES

# One layer, one draft stage: a few seconds to export.
SMALL = {"num_hidden_layers": 1, "num_hash_layers": 1, "hc_sinkhorn_iters": 1}
DRAFTED = with_overrides(F4, **SMALL, compress_ratios=[0, 0], dspark_target_layer_ids=[0])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("drafted") / "checkpoint", DRAFTED)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "checkpoint", F4_PLAIN, **SMALL, compress_ratios=[0])


def test_what_the_line_chose_is_in_the_manifest_and_a_forced_block_is_said_to_be_forced(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    line = (
        "--speculative-algorithm DSPARK --speculative-dspark-block-size 3 --speculative-num-draft-tokens 4 --tp 1 "
        "--attention-backend nsa --nsa-prefill portable --nsa-decode-backend portable --kv-cache-dtype auto "
        "--cuda-graph-max-bs 20 --max-running-requests 20 --force-draft-len"
    )
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "engine"), *shlex.split(line)]) == 0
    manifest = read_manifest(tmp_path / "engine")
    build, speculative = manifest.build_config, manifest.speculative
    assert (build.max_batch_size, build.prefill_backend, build.decode_backend) == (20, "portable", "portable")
    assert (build.max_draft_len, build.kv_cache_dtype) == (3, "float32")
    assert (speculative.method, speculative.draft_len, speculative.trained_len) == ("dspark", 3, 5)
    tokens = next(b for b in manifest.steps["propose"].bindings if b.name == "tokens")
    assert tokens.shape == ("R", 3)
    assert "draft blocks of 3 tokens were forced, the draft was trained for 5" in caplog.text
    said = capsys.readouterr().err
    assert "draft dspark, 3 tokens a block; maximum length 128, batches of 20" in said
    assert [line for line in said.splitlines() if "outdated" in line] == [
        "twostroke: outdated spellings, accepted: nsa is now dsa; --nsa-prefill is now --dsa-prefill-backend; "
        "--nsa-decode-backend is now --dsa-decode-backend; --cuda-graph-max-bs is now --cuda-graph-max-bs-decode"
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--speculative-algorithm EAGLE", "draft method 'mtp' needs a NextN block"),
        ("--speculative-num-steps 7", "dspark_block_size = 5; leave the option out"),
        ("--speculative-num-steps 7", "or give --force-draft-len"),
        ("--speculative-num-steps 3", "verify less of a block with the runtime's draft length"),
        ("--force-draft-len", "--force-draft-len needs --max-draft-len, which is missing"),
        ("--draft none --force-draft-len --max-draft-len 0", "the draft method is none"),
        ("--draft none --speculative-algorithm EAGLE", "--speculative-algorithm EAGLE (mtp) contradicts --draft none"),
        ("--max-draft-len 2 --speculative-num-steps 3", "--speculative-num-steps 3 contradicts --max-draft-len 2"),
        ("--max-batch-size 8 --cuda-graph-max-bs 16", "--cuda-graph-max-bs 16 contradicts --max-batch-size 8"),
        ("--max-batch-size 0", "--max-batch-size 0: expected at least 1"),
        ("--tp 8", "--tp 8: there is no tensor parallelism yet, accepted is 1"),
        ("--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8_e4m3: engine onnxruntime keeps its memory in float32"),
        ("--dsa-decode-backend flashmla_kv", "engine onnxruntime has portable for decode, not flashmla_kv"),
        ("--dsa-decode-backend flashmla-kv", "no implementation has that name (did you mean flashmla_kv?)"),
        ("--speculative-eagle-topk 8", "drafts are chains"),
        ("--speculative-num-steps three", "--speculative-num-steps: invalid int value: 'three'"),
        ("--dsa-prefill flashmla_kv", "unknown option --dsa-prefill (did you mean --nsa-prefill?)"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_nothing_is_written(
    checkpoint: Path, tmp_path: Path, line: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "engine"), *shlex.split(line)]) == 2
    said = [each for each in capsys.readouterr().err.splitlines() if "outdated" not in each]
    assert len(said) == 1
    assert expected in said[0]
    assert not list(tmp_path.iterdir())


def test_a_depth_without_a_draft_is_refused(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(plain), "-o", str(tmp_path / "engine"), "--speculative-num-steps", "3"]) == 2
    assert "but this build has no draft method" in capsys.readouterr().err


@pytest.mark.parametrize("generation", LAUNCH_LINES)
def test_the_v32_launch_line_is_refused_with_all_that_this_engine_lacks_of_it(
    checkpoint: Path, tmp_path: Path, generation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = LAUNCH_LINES[generation].split()
    assert main(["build", str(checkpoint), "-o", str(tmp_path / "engine"), *line]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (1 if generation == "0.5.23" else 2)
    for words in ("no tensor parallelism yet", "not flashmla_sparse", "not flashmla_kv"):
        assert words in said[-1]


def test_inspect_of_a_checkpoint_says_the_block_it_was_trained_for(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(checkpoint)]) == 0
    assert "draft_block_size: 5" in capsys.readouterr().out
