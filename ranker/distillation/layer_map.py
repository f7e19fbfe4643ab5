"""Choose the teacher's layer from which each layer of a student learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranker.errors import ConfigError


def layer_map(
    kind: int | str | Sequence[int],
    student: int,
    teacher: int,
    profile: Mapping[str, Mapping[int, float]] | None = None,
) -> list[int]:
    """Return for each layer of the student the teacher's layer from which it learns, counted from 1.

    Args:
        kind: `uniform`: evenly spaced layers that include the last one; `last`: the last layers; `auto`: layers chosen
            from the probing report, see `by_change`. A list gives the layers itself.
        student: Number of layers of the student.
        teacher: Number of layers of the teacher.
        profile: Task -> layer -> compression, from the probing report; only for `auto`.

    Raises:
        ConfigError: The student has more layers than the teacher, or the given layers are not possible.

    >>> layer_map("uniform", 3, 6), layer_map("last", 2, 6), layer_map("uniform", 4, 6)
    ([2, 4, 6], [5, 6], [2, 3, 5, 6])
    """
    if not isinstance(kind, str):
        layers = [kind] if isinstance(kind, int) else list(kind)
        if len(layers) != student or layers != sorted(layers) or layers[-1] > teacher:
            raise ConfigError(
                f"distill.layers: expected {student} ascending layers of the teacher, from 1 to {teacher}, got {layers}"
            )
        return layers
    if student > teacher:
        raise ConfigError(
            f"distill.layers: expected a student of at most {teacher} layers, because the teacher has as many, got "
            f"{student}; set encoder.layers"
        )
    if kind == "uniform":
        return [-(-number * teacher // student) for number in range(1, student + 1)]
    if kind == "last":
        return list(range(teacher - student + 1, teacher + 1))
    assert profile is not None
    return by_change(profile, student, teacher)


def by_change(profile: Mapping[str, Mapping[int, float]], student: int, teacher: int) -> list[int]:
    """Return layers of the teacher such that probing results change equally much between neighbouring chosen layers.

    The change of a task at a layer is the absolute difference between its compressions at this layer and at the layer
    below, divided by the range of its compressions over all layers. Changes are summed over tasks. If J layers are
    chosen, the j-th is the lowest layer at which the changes since layer 1 sum to at least j / J of their total. The
    last chosen layer is the teacher's last layer.

    Args:
        profile: Task -> layer -> compression; layer 0 is the embeddings.
        student: Number of layers to return.
        teacher: Number of layers of the teacher.

    Raises:
        ConfigError: The profile has no value for a layer of the teacher.

    >>> by_change({"bm25": {0: 1.0, 1: 1.1, 2: 1.2, 3: 3.0, 4: 5.0}}, 2, 4)  # layers 1 and 2 change little
    [3, 4]
    """
    changes = [0.0] * teacher
    for task, layers in profile.items():
        lacking = [layer for layer in range(teacher + 1) if layer not in layers]
        if lacking:
            raise ConfigError(
                f"distill.report: expected a probing run of all {teacher + 1} layers of the teacher, embeddings "
                f"included, got none of layer {lacking[0]} for {task}; run probe.py with layers=null"
            )
        spread = max(layers.values()) - min(layers.values())
        for layer in range(1, teacher + 1):
            changes[layer - 1] += abs(layers[layer] - layers[layer - 1]) / spread if spread else 0.0
    chosen: list[int] = []
    total, so_far = sum(changes), 0.0
    for layer, change in enumerate(changes, 1):
        so_far += change
        wanted, left = student - len(chosen), teacher - layer + 1
        reached = so_far >= (len(chosen) + 1) / student * total * (1 - 1e-12)
        if wanted and (left == wanted or (reached and (wanted > 1 or layer == teacher))):
            chosen.append(layer)
    return chosen
