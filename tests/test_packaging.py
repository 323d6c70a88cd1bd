"""What a wheel holds is what the folders hold."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_of_the_tree_is_in_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = ("builder", "engines", "plugins", "runtime")
    found = {"twostroke"} | {
        ".".join(("twostroke", *path.parent.relative_to(ROOT).parts))
        for folder in folders
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == found
