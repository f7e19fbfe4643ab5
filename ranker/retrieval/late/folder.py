"""The files of a compressed index.

A folder has `index.json` (its `Settings`) and

- `codec/`: `centroids.bin` float16 [centroids, dim], `groups.bin` float16 [groups, dim], `starts.bin` int64
  [groups + 1] (`Centroids`), `cuts.bin` and `weights.bin` float32 (`Buckets`);
- `shard-00000/` ...: a subfolder for each shard of the stored vectors, with `codes.bin` uint16 or int32 [vectors],
  `residuals.bin` uint8 [vectors, bytes], `scales.bin` float16 [vectors], `counts.bin` int32 [docs], `ids.bin` UTF-8
  [docs] and `meta.json`;
- `added-00000/` ...: the same files for docs that were added later, and `vectors.bin` float32 [vectors, dim];
- `deleted.json`: rows of deleted docs. A row is the number of a doc over all shards, then all added docs.

Each subfolder has checksums. It is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ranker.data.token_writer import map_array
from ranker.errors import CheckpointError, DataError
from ranker.files.checksums import REBUILD, verify_folder
from ranker.files.folders import write_folder
from ranker.files.writing import write_whole
from ranker.retrieval.late.centroids import Centroids
from ranker.retrieval.late.residuals import Buckets

FORMAT = 2  # raise it when the files change


@dataclass(frozen=True)
class Settings:
    """What an index is computed from, and how.

    Args:
        vectors: Hash of the vectors' description: weights, tokenizer, docs, dim (`vector_folder.Description.digest`).
        dim: Size of a vector.
        num_shards: Shards of the vectors.
        num_vectors: Number of vectors.
        bits: Bits per dimension of a residual.
        centroids: Requested number of centroids.
        format: Version of the files.
    """

    vectors: str
    dim: int
    num_shards: int
    num_vectors: int
    bits: int
    centroids: int
    format: int = FORMAT

    @property
    def code_type(self) -> str:
        """Type of the numbers in `codes.bin`, as numpy names it."""
        return "<u2" if self.centroids <= 65536 else "<i4"


@dataclass
class Shard:
    """Compressed vectors of consecutive docs.

    Args:
        codes: Number of the centroid of each vector, integers [vectors].
        residuals: Packed residuals, uint8 [vectors, bytes].
        scales: Factor of each decompressed vector, float16 [vectors].
        counts: Number of vectors of each doc, int64 [docs].
        ids: The id of each doc, UTF-8 [docs].
        vectors: The vectors themselves, float32 [vectors, dim]; only of added docs.
    """

    codes: np.ndarray
    residuals: np.ndarray
    scales: np.ndarray
    counts: np.ndarray
    ids: np.ndarray
    vectors: np.ndarray | None = None


def claim(folder: Path, settings: Settings) -> None:
    """Write the settings into a new folder, or compare them with those of an existing one.

    Raises:
        CheckpointError: The folder has an index of other vectors or with other settings.
    """
    path = folder / "index.json"
    if not path.is_file():
        with write_whole(path) as file:
            file.write(json.dumps(asdict(settings), indent=1) + "\n")
    stored = read_settings(folder)
    other = {key: value for key, value in asdict(stored).items() if value != getattr(settings, key)}
    if other:
        expected = {key: getattr(settings, key) for key in other}
        raise CheckpointError(
            f"{folder}: expected an index of {expected}, got one of {other}; delete it, it is built anew"
        )


def read_settings(folder: Path) -> Settings:
    """Read the settings of an index.

    Raises:
        DataError: index.json is missing or can't be read.
    """
    try:
        return Settings(**json.loads((folder / "index.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder}: expected an index with a readable index.json, got {error}; delete it") from error


def write_codec(folder: Path, centroids: Centroids, buckets: Buckets) -> None:
    """Write centroids and buckets to `codec/`."""
    with write_folder(folder / "codec") as part:
        for name, values, dtype in (
            ("centroids", centroids.values, "<f2"),
            ("groups", centroids.groups, "<f2"),
            ("starts", centroids.starts, "<i8"),
            ("cuts", buckets.cuts, "<f4"),
            ("weights", buckets.weights, "<f4"),
        ):
            (part / f"{name}.bin").write_bytes(values.cpu().numpy().astype(dtype).tobytes())


def read_codec(folder: Path, settings: Settings) -> tuple[Centroids, Buckets]:
    """Read centroids and buckets.

    Raises:
        DataError: The files are missing or damaged.
    """
    part = folder / "codec"
    if not part.is_dir():
        raise DataError(f"{folder}: expected the folder codec, got none; search again, the index is built anew")
    verify_folder(part, fix=REBUILD)

    def read(name: str, dtype: str) -> torch.Tensor:
        return torch.from_numpy(np.fromfile(part / f"{name}.bin", dtype=dtype))

    centroids, groups = (read(name, "<f2").float().view(-1, settings.dim) for name in ("centroids", "groups"))
    return Centroids(centroids, groups, read("starts", "<i8")), Buckets(read("cuts", "<f4"), read("weights", "<f4"))


def write_shard(folder: Path, shard: Shard, settings: Settings) -> None:
    """Write a shard's files into an existing, empty folder."""
    files = {
        "codes": shard.codes.astype(settings.code_type),
        "residuals": shard.residuals,
        "scales": shard.scales.astype("<f2"),
        "counts": shard.counts.astype("<i4"),
        "ids": shard.ids,
    }
    if shard.vectors is not None:
        files["vectors"] = shard.vectors.astype("<f4")
    for name, values in files.items():
        (folder / f"{name}.bin").write_bytes(values.tobytes())
    meta = {"docs": len(shard.ids), "vectors": len(shard.codes), "id_bytes": shard.ids.dtype.itemsize}
    (folder / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")


def read_shard(folder: Path, settings: Settings, num_bytes: int) -> Shard:
    """Open a shard; large arrays are memory-mapped.

    Args:
        folder: The folder of the shard.
        settings: Settings of the index.
        num_bytes: Bytes of a packed residual.

    Raises:
        DataError: The shard is missing or damaged.
    """
    if not (folder / "meta.json").is_file():
        raise DataError(f"{folder}: expected a shard of the index, got none; search again, missing shards are built")
    verify_folder(folder, fix=REBUILD)
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        shard = Shard(
            map_array(folder / "codes.bin", settings.code_type),
            map_array(folder / "residuals.bin", "u1").reshape(-1, num_bytes),
            map_array(folder / "scales.bin", "<f2"),
            np.fromfile(folder / "counts.bin", dtype="<i4").astype(np.int64),
            np.fromfile(folder / "ids.bin", dtype=f"S{meta['id_bytes']}"),
        )
        if (folder / "vectors.bin").is_file():
            shard.vectors = map_array(folder / "vectors.bin", "<f4").reshape(-1, settings.dim)
        sizes = (len(shard.ids), len(shard.counts), len(shard.codes), len(shard.residuals), len(shard.scales))
        if sizes != (meta["docs"],) * 2 + (shard.counts.sum(),) * 3:
            raise ValueError("{} ids, {} counts, {} codes, {} residuals and {} scales".format(*sizes))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: expected a whole shard, got {error}; {REBUILD.format(folder=folder)}") from error
    return shard


def parts_of(folder: Path, settings: Settings) -> list[Path]:
    """Return the folders of all shards, then those of added docs."""
    return [
        *(folder / f"shard-{number:05d}" for number in range(settings.num_shards)),
        *sorted(path for path in folder.glob("added-*") if path.is_dir()),
    ]


def read_deleted(folder: Path) -> np.ndarray:
    """Return the rows of deleted docs, int64 [rows].

    Raises:
        DataError: The file can't be read.
    """
    path = folder / "deleted.json"
    try:
        return np.array(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else [], dtype=np.int64)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected a list of rows, got {error}") from error
