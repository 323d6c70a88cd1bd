"""Which drafter is built, and what is said when config, files and request do not agree."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from twostroke.builder.config import parse_config
from twostroke.builder.draft_detection import detect_draft
from twostroke.builder.inventory import inventory, target_inventory
from twostroke.engines.errors import CheckpointError, ConfigError, TwostrokeError
from twostroke.tests.checkpoints import F4, F4_PLAIN, F4_PREVIEW, with_overrides

DSPARK = parse_config(F4, "config.json")
PLAIN = parse_config(F4_PLAIN, "config.json")
PREVIEW = parse_config(F4_PREVIEW, "config.json")
PREVIEW_OF_TWO = parse_config(with_overrides(F4_PREVIEW, num_nextn_predict_layers=2), "config.json")

TARGET_NAMES = [spec.name for spec in target_inventory(DSPARK)]
DSPARK_NAMES = [spec.name for spec in inventory(DSPARK)]
NEXTN_NAMES = [spec.name for spec in inventory(PREVIEW)]


def refusal(*arguments: Any) -> str:
    with pytest.raises(TwostrokeError) as caught:
        detect_draft(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("requested", ["auto", "dspark"])
def test_dspark_fields_and_stages_mean_dspark(requested: str) -> None:
    assert detect_draft(DSPARK, DSPARK_NAMES, requested) == "dspark"


def test_target_alone_has_no_drafter() -> None:
    assert detect_draft(PLAIN, TARGET_NAMES) == "none"


@pytest.mark.parametrize("config", [DSPARK, PLAIN, PREVIEW])
@pytest.mark.parametrize("names", [TARGET_NAMES, DSPARK_NAMES, NEXTN_NAMES])
def test_none_is_always_granted_silently(config: Any, names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert detect_draft(config, names, "none") == "none"
    assert not caplog.records


def test_mtp_on_dspark_tensors_says_what_they_are_and_which_method_fits() -> None:  # C-01
    message = refusal(DSPARK, DSPARK_NAMES, "mtp")
    assert "3 DSpark stages" in message
    assert "mtp.0.main_proj.weight" in message
    assert "mtp.0.enorm.weight" in message, "what is missing"
    assert "use 'dspark'" in message


def test_mtp_without_tensors_lists_the_missing_names() -> None:  # C-05
    message = refusal(PREVIEW, TARGET_NAMES, "mtp")
    assert "mtp.0.enorm.weight, mtp.0.hnorm.weight, mtp.0.e_proj.weight, mtp.0.h_proj.weight" in message
    assert "use 'none'" in message


def test_promised_nextn_without_tensors_warns_and_decodes_plainly(caplog: pytest.LogCaptureFixture) -> None:  # C-05
    with caplog.at_level(logging.WARNING):
        assert detect_draft(PREVIEW, TARGET_NAMES) == "none"
    assert "num_nextn_predict_layers = 1" in caplog.text
    assert "no mtp.* tensors" in caplog.text


@pytest.mark.parametrize("requested", ["auto", "mtp"])
def test_a_nextn_block_that_the_config_promises_means_mtp(requested: str) -> None:
    assert detect_draft(PREVIEW, NEXTN_NAMES, requested) == "mtp"


def test_dspark_on_a_nextn_block_says_which_method_fits() -> None:
    message = refusal(PREVIEW, NEXTN_NAMES, "dspark")
    assert "NextN block in mtp.{0}" in message
    assert "use 'mtp'" in message


@pytest.mark.parametrize("requested", ["auto", "mtp"])
def test_several_nextn_blocks_are_refused(requested: str) -> None:
    names = [*NEXTN_NAMES, *(name.replace("mtp.0.", "mtp.1.") for name in NEXTN_NAMES if name.startswith("mtp."))]
    assert "one block is implemented" in refusal(PREVIEW_OF_TWO, names, requested)


@pytest.mark.parametrize("requested", ["auto", "mtp"])
@pytest.mark.parametrize(
    ("config", "names", "promise", "found"),
    [
        (PLAIN, NEXTN_NAMES, "promises no drafter", "NextN block in mtp.{0}"),
        (DSPARK, NEXTN_NAMES, "promise 3 DSpark stages", "NextN block in mtp.{0}"),
        (PREVIEW_OF_TWO, NEXTN_NAMES, "num_nextn_predict_layers = 2", "NextN block in mtp.{0}"),
        (PREVIEW, [*NEXTN_NAMES, "mtp.1.enorm.weight"], "num_nextn_predict_layers = 1", "mtp.{0,1}"),
        (PREVIEW, [*NEXTN_NAMES, "mtp.0.main_proj.weight"], "promises NextN", "marks of DSpark and of NextN"),
    ],
)
def test_a_nextn_block_that_contradicts_the_config_is_refused_with_both_findings(
    config: Any, names: list[str], promise: str, found: str, requested: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        detect_draft(config, names, requested)
    assert promise in str(caught.value)
    assert found in str(caught.value)


@pytest.mark.parametrize("requested", ["auto", "dspark"])
@pytest.mark.parametrize(
    ("config", "names", "promise", "found"),
    [
        (DSPARK, TARGET_NAMES, "promise 3 DSpark stages", "no mtp.* tensors"),
        (DSPARK, NEXTN_NAMES, "promise 3 DSpark stages", "NextN block in mtp.{0}"),
        (PLAIN, DSPARK_NAMES, "promises no drafter", "3 DSpark stages in mtp.{0,1,2}"),
        (PREVIEW, DSPARK_NAMES, "promises NextN", "3 DSpark stages"),
        (DSPARK, DSPARK_NAMES + NEXTN_NAMES, "promise 3 DSpark stages", "marks of DSpark and of NextN"),
        (PLAIN, [*TARGET_NAMES, "mtp.0.norm.weight"], "promises no drafter", "neither DSpark nor NextN"),
        (DSPARK, [n for n in DSPARK_NAMES if not n.startswith("mtp.2.")], "promise 3", "2 DSpark stages in mtp.{0,1}"),
        (DSPARK, [*DSPARK_NAMES, "mtp.3.main_proj.weight"], "promise 3", "4 DSpark stages"),
        (DSPARK, [n for n in DSPARK_NAMES if not n.startswith("mtp.1.")], "promise 3", "mtp.{0,2}"),
    ],
)
def test_contradiction_is_refused_with_both_findings(
    config: Any, names: list[str], promise: str, found: str, requested: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        detect_draft(config, names, requested)
    assert promise in str(caught.value)
    assert found in str(caught.value)


def test_dspark_on_a_plain_target_is_refused() -> None:
    assert "no mtp.* tensors" in refusal(PLAIN, TARGET_NAMES, "dspark")


def test_unknown_method_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="auto, none, dspark, mtp"):
        detect_draft(DSPARK, DSPARK_NAMES, "eagle")


def test_odd_names_under_mtp_do_not_crash() -> None:
    for name in ("mtp.", "mtp.x.y", "mtp.99999999999.a", "mtp.0", "mtp.0.\n"):
        assert "neither DSpark nor NextN" in refusal(PLAIN, [name])
