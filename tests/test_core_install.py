"""The core wheel alone: what a machine that only runs engines installs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_MB = 250

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("core")]


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, **options)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the core wheel and its dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("core")
    wheel = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    assert wheel.returncode == 0, wheel.stderr
    run(sys.executable, "-m", "venv", folder / "venv", check=True)
    python = folder / "venv" / "bin" / "python"
    built = next(folder.glob("twostroke-*.whl"))
    installed = run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "requirements.lock", built)
    assert installed.returncode == 0, installed.stderr
    return folder / "venv"


def test_core_environment_is_small_and_has_no_framework(core: Path) -> None:
    packages = next(core.glob("lib/python3.*/site-packages"))
    names = {path.name for path in packages.iterdir()}
    assert not names & {"torch", "onnx", "onnxscript", "transformers", "safetensors"}
    pip_only = {"pip", "setuptools"}
    used = sum(f.stat().st_size for f in packages.rglob("*") if f.is_file() and not pip_only & set(f.parts))
    assert used < LIMIT_MB * 1e6, f"{used / 1e6:.0f} MB"


def test_core_environment_answers_a_prompt_with_a_built_engine(core: Path, f4_engine_dir: Path, tmp_path: Path) -> None:
    command = [
        core / "bin" / "twostroke",
        "generate",
        f4_engine_dir,
        "--prompt",
        "hello",
        "--max-tokens",
        "12",
        "--json",
    ]
    answer = run(*command, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    here = run(Path(sys.executable).parent / "twostroke", *command[1:], cwd=tmp_path)
    assert '"token_ids"' in answer.stdout
    ids = [text.split('"token_ids": [')[1].split("]")[0] for text in (answer.stdout, here.stdout)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("command", [["build", "CHECKPOINT", "-o", "DIR"], ["demo"]])
def test_commands_that_need_the_build_extra_name_it(core: Path, tmp_path: Path, command: list[str]) -> None:
    answer = run(core / "bin" / "twostroke", *command, cwd=tmp_path)
    assert answer.returncode == 2
    assert "twostroke[build]" in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
