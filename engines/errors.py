"""Errors a person can mend: one sentence that says what, found, expected, where and what to do."""

from __future__ import annotations


class TwostrokeError(Exception):
    """Base of every error that is the caller's to mend. The command line prints it as one line and exits 2."""


class ConfigError(TwostrokeError):
    """A model or build configuration that cannot be honoured."""


class CheckpointError(TwostrokeError):
    """A checkpoint folder that is not what it claims to be. `problems` lists every finding of the pass."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class BuildError(TwostrokeError):
    """The build could not be carried out; nothing that loads was left behind."""


class EngineError(TwostrokeError):
    """An engine directory that must not be loaded, or a buffer that does not fit its binding."""


class RequestError(TwostrokeError):
    """One request that cannot be served. Other requests are not affected. `field` names the offending parameter."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
