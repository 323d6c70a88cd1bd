"""Which drafter a DeepSeek-V4 checkpoint holds, from its config and its tensor names together.

`mtp.*` names two different things: the DSpark stages of the 0731 release and the NextN block of the Preview. Loading
one as the other half-succeeds, so both findings must agree before a weight is read (`spec/dspark.md` sections 11, 12).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from twostroke.builder.config import DeepseekV4Config
from twostroke.builder.strict_json import shown_list
from twostroke.engines.errors import CheckpointError, ConfigError

METHODS = ("auto", "none", "dspark", "mtp")

_STAGE = re.compile(r"mtp\.(\d{1,6})\.(.+)", re.DOTALL)
_DSPARK_PARTS = ("main_proj", "main_norm", "markov_head", "confidence_head")
_NEXTN_PARTS = ("enorm", "hnorm", "e_proj", "h_proj")
_NEXTN_NAMES = tuple(f"mtp.0.{part}.weight" for part in _NEXTN_PARTS)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Files:
    """What the `mtp.*` tensor names say."""

    kind: Literal["dspark", "nextn", "both", "unknown", "none"]
    stages: tuple[int, ...]
    evidence: tuple[str, ...]

    def __str__(self) -> str:
        where = f"mtp.{{{','.join(map(str, self.stages[:20]))}}}"
        seen = shown_list(self.evidence, limit=3)
        return {
            "dspark": f"the files hold {len(self.stages)} DSpark stages in {where} ({seen})",
            "nextn": f"the files hold a NextN block in {where} ({seen})",
            "both": f"the files hold marks of DSpark and of NextN in {where} ({seen})",
            "unknown": f"the files hold {where} tensors that are neither DSpark nor NextN ({seen})",
            "none": "the files hold no mtp.* tensors",
        }[self.kind]


def detect_draft(
    config: DeepseekV4Config, tensor_names: Iterable[str], requested: str = "auto"
) -> Literal["dspark", "mtp", "none"]:
    """The draft method to build. `requested` is one of METHODS.

    `none` is always granted; the caller leaves `mtp.*` out of the build and says so. Raises ConfigError when the
    request does not fit what is there, CheckpointError when config and files contradict each other; both name both
    findings. A config that promises NextN without tensors is common (the field is misleading): a warning, no drafter.
    """
    check_requested(requested)
    if requested == "none":
        return "none"
    files = _read_names(tensor_names)
    promise = _promise(config)
    if requested == "mtp" and (files.kind in ("dspark", "none") or (files.kind == "unknown" and config.dspark is None)):
        raise _refuse_mtp(config, files, promise)
    if files.kind == "none" and config.dspark is None:
        if requested == "dspark":
            raise ConfigError(f"draft method 'dspark' was requested, but {files} and {promise}; use 'none'")
        if config.num_nextn_predict_layers:
            _log.warning("%s, but %s: decoding without a drafter", promise, files)
        return "none"
    if files.kind == "nextn" and config.dspark is None and config.num_nextn_predict_layers:
        return _nextn(config, files, promise, requested)
    if files.kind != "dspark" or config.dspark is None:
        raise CheckpointError(
            f"config and files contradict each other: {promise}, but {files}; correct the folder, or use 'none' to"
            " decode without a drafter"
        )
    if files.stages != tuple(range(config.dspark.stages)):
        raise CheckpointError(f"config and files contradict each other: {promise}, but {files}; the counts must agree")
    return "dspark"


def check_requested(requested: str) -> None:
    """Raises ConfigError for a draft method that nobody knows."""
    if requested not in METHODS:
        raise ConfigError(f"draft method {requested!r} is not known; accepted: {', '.join(METHODS)}")


def _read_names(tensor_names: Iterable[str]) -> _Files:
    stages: set[int] = set()
    marks: dict[str, list[str]] = {"dspark": [], "nextn": [], "other": []}
    for name in tensor_names:
        match = _STAGE.fullmatch(name)
        if not name.startswith("mtp."):
            continue
        part = match[2].split(".")[0] if match else ""
        if match:
            stages.add(int(match[1]))
        marks["dspark" if part in _DSPARK_PARTS else "nextn" if part in _NEXTN_PARTS else "other"].append(name)
    order = tuple(sorted(stages))
    if marks["dspark"] and marks["nextn"]:
        return _Files("both", order, (marks["dspark"][0], marks["nextn"][0]))
    if marks["dspark"]:
        return _Files("dspark", order, tuple(marks["dspark"]))
    if marks["nextn"]:
        return _Files("nextn", order, tuple(marks["nextn"]))
    return _Files("unknown" if marks["other"] else "none", order, tuple(marks["other"]))


def _promise(config: DeepseekV4Config) -> str:
    if config.dspark is not None:
        return f"the config's dspark_* fields promise {config.dspark.stages} DSpark stages"
    if config.num_nextn_predict_layers:
        return f"the config promises NextN (num_nextn_predict_layers = {config.num_nextn_predict_layers}, no dspark_*)"
    return "the config promises no drafter (no dspark_* fields, num_nextn_predict_layers = 0)"


def _nextn(config: DeepseekV4Config, files: _Files, promise: str, requested: str) -> Literal["mtp"]:
    if files.stages != tuple(range(config.num_nextn_predict_layers)):
        raise CheckpointError(f"config and files contradict each other: {promise}, but {files}; the counts must agree")
    if files.stages != (0,):
        raise ConfigError(f"{promise} and {files}; one block is implemented, used again for every token: use 'none'")
    if requested == "dspark":
        raise ConfigError(f"draft method 'dspark' was requested, but {files} and {promise}; use 'mtp'")
    return "mtp"


def _refuse_mtp(config: DeepseekV4Config, files: _Files, promise: str) -> ConfigError:
    fits = "dspark" if files.kind == "dspark" and config.dspark is not None else "none"
    return ConfigError(
        f"draft method 'mtp' needs a NextN block ({shown_list(_NEXTN_NAMES)}), which is missing: {files} and {promise};"
        f" use {fits!r}"
    )
