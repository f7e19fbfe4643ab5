"""Compute the checksums of folders again, after a user has edited their files.

`python -m ranker.files FOLDER` writes `checksums.json` of the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ranker.errors import DataError, RankerError
from ranker.files.checksums import SUMS, read_sums, write_sums


def main(arguments: list[str]) -> int:
    """Compute the checksums of the listed files of each folder again; return the exit code."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 1
    try:
        for folder in map(Path, arguments):
            if not (folder / SUMS).is_file():
                raise DataError(f"{folder}: expected a folder with {SUMS}, got none; nothing is compared there")
            names = [name for name in read_sums(folder) if (folder / name).is_file()]
            (folder / SUMS).unlink()
            write_sums(folder, names)
            print(f"{folder}: accepted {len(names)} files as they are")  # noqa: T201
    except RankerError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
