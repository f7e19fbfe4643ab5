"""Run a script (the first argument) as if the CPU had bfloat16 instructions and gained from them at any model size.

If the CPU has no such instructions, torch emulates them with the same roundings.
"""

import runpy
import sys
from pathlib import Path

from ranker.assembly import precision

if __name__ == "__main__":  # pytest imports every file for its doctests
    precision.cpu_has_bf16 = lambda: True
    precision.SMALLEST, precision.GAIN = 0, 0.0
    del sys.argv[0]
    runpy.run_path(str(Path(__file__).resolve().parents[2] / sys.argv[0]), run_name="__main__")
