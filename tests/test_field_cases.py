"""The table of field cases names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_in_the_table_of_field_cases_exists() -> None:
    defined = {
        name for path in HERE.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    named = re.findall(r"`(test_\w+)`", (HERE / "FIELD_CASES.md").read_text("utf-8"))
    assert len(named) > 40
    assert not [name for name in named if name not in defined]
