from __future__ import annotations

import subprocess
import sys

FORBIDDEN = ("torch", "onnx", "transformers", "twostroke.builder")
SCRIPT = """
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start)
print(*sys.modules)
"""


def import_alone(module: str) -> tuple[float, set[str]]:
    """Seconds an import takes in a fresh interpreter (the best of three), and all modules loaded then."""
    runs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(module=module)], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    return min(float(run[0]) for run in runs), set(runs[0][1:])


def test_the_runtime_is_there_in_half_a_second_without_the_builder_or_torch() -> None:
    seconds, modules = import_alone("twostroke.runtime, twostroke.runtime.llm, twostroke.runtime.cli")
    assert not modules & set(FORBIDDEN)
    assert seconds < 0.5


def test_the_package_itself_loads_nothing() -> None:
    seconds, modules = import_alone("twostroke")
    assert not modules & {*FORBIDDEN, "numpy", "onnxruntime", "tokenizers"}
    assert seconds < 0.1
