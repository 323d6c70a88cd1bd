"""What happened, in numbers: per request how many drafts were kept, per engine which shapes ran."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass
class Acceptance:
    """Speculation of one request, or of all of them. Prefill's first token is not part of it.

    `accepted` never counts a draft behind the end of the text; `emitted` counts bonus tokens too.
    `drafted_at[k]` / `accepted_at[k]`: iterations that verified / kept draft k+1.
    """

    iterations: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int, emitted: int) -> None:
        """One iteration: `drafted` tokens verified, `accepted` of them kept, `emitted` tokens delivered."""
        accepted = min(accepted, emitted)
        self.iterations += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for k in range(drafted):
            self.drafted_at[k] += 1
        for k in range(accepted):
            self.accepted_at[k] += 1

    def cut(self, count: int, kept: int) -> None:
        """Only `kept` of the `count` tokens of the last iteration were delivered: the text ended between them."""
        if kept == count:
            return
        # Every iteration before brought one token beyond its drafts; the last one did too unless it ended on a draft.
        undrafted = self.emitted - self.accepted - (self.iterations - 1)
        places = range(kept, count - undrafted)
        for place in places:
            self.accepted_at[place] -= 1
        self.accepted -= len(places)
        self.emitted -= count - kept

    def copy(self) -> Acceptance:
        """What it says now."""
        return replace(self, drafted_at=self.drafted_at.copy(), accepted_at=self.accepted_at.copy())

    def correct(self, counted: Acceptance, delivered: Acceptance) -> None:
        """These are totals in which a request stands as `counted`; make it stand as `delivered`, which is no more."""
        self.iterations -= counted.iterations - delivered.iterations
        self.drafted -= counted.drafted - delivered.drafted
        self.accepted -= counted.accepted - delivered.accepted
        self.emitted -= counted.emitted - delivered.emitted
        for totals, more, less in (
            (self.drafted_at, counted.drafted_at, delivered.drafted_at),
            (self.accepted_at, counted.accepted_at, delivered.accepted_at),
        ):
            for k, surplus in enumerate(more):
                totals[k] -= surplus - (less[k] if k < len(less) else 0)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per iteration, bonus included; 0 before the first iteration."""
        return self.emitted / self.iterations if self.iterations else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of verified drafts that were kept; 0 where none was verified."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass
class EngineCounters:
    """Totals since start. `replays` counts iterations by shape, "4x6" being a bucket of four requests with six rows
    each; `bound` counts the shapes that had to be prepared first; `stale_results` those dropped because their slot had
    changed hands; `finished` requests by reason."""

    steps: int = 0
    replays: dict[str, int] = field(default_factory=dict)
    draft_rounds: int = 0
    padding_rows: int = 0
    tier_changes: int = 0
    bound: int = 0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_padding_rows: int = 0
    stale_results: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    acceptance: Acceptance = field(default_factory=Acceptance)

    def count_replay(self, shape: str) -> None:
        """One more iteration of `shape`."""
        self.replays[shape] = self.replays.get(shape, 0) + 1

    def count_finish(self, reason: str) -> None:
        """One more request that ended for `reason`."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def uncount_finish(self, reason: str) -> None:
        """One that was counted ended for another reason."""
        self.finished[reason] -= 1
