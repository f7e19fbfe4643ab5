"""Run train.py on a CPU that claims to have bfloat16 and to gain from it at any size; torch imitates what it has not."""

import runpy
from pathlib import Path

from ranker.assembly import precision

if __name__ == "__main__":  # pytest imports every file for its doctests
    precision.cpu_has_bf16 = lambda: True
    precision.SMALLEST, precision.GAIN = 0, 0.0
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "train.py"), run_name="__main__")
