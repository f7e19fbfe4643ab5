"""The contract of every loss. Losses are found through `conf/loss/*.yaml`; a new loss is tested once its yaml exists.

A check is a plain function `check_...(loss)`. All checks run on all losses, and seeded faults around each loss must
fail one of them.
"""

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
YAMLS = {path.stem: path for path in sorted((ROOT / "conf/loss").glob("*.yaml"))}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Groups = tuple[Tensor, Tensor, Tensor]
KINDS = ("binary", "graded", "teacher")
SIZES = (6, 3, 2, 5)


def load(path: Path) -> torch.nn.Module:
    return instantiate(OmegaConf.load(path), _convert_="all")


def groups(kind: str, sizes: tuple[int, ...] = SIZES, seed: int = 0, dtype: torch.dtype = torch.float32) -> Groups:
    """Groups of unequal size; each has a label above 0 and a lower one.

    A teacher's labels are any floats, also below 0.
    """
    rng = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
    scores = torch.randn(mask.shape, generator=rng, dtype=torch.float64)
    top = {"binary": 1, "graded": 3, "teacher": 6}[kind]
    labels = torch.randint(top + 1, mask.shape, generator=rng).double()
    labels[:, 0], labels[:, 1] = top, 0.0
    labels = labels * 0.75 - 2.0 if kind == "teacher" else labels
    return scores.masked_fill(~mask, 0.0).to(dtype), labels.masked_fill(~mask, 0.0).to(dtype), mask


def value_and_gradient(loss: Loss, scores: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    value = loss(leaf, labels, mask)
    assert value.shape == (), "the loss is one number"
    assert value.requires_grad, "the loss depends on the scores"
    (gradient,) = torch.autograd.grad(value, leaf)
    assert value.isfinite(), f"finite loss, got {value}"
    assert gradient.isfinite().all(), f"finite gradient, got {gradient}"
    return value.detach(), gradient


def stack(*parts: Groups) -> Groups:
    """Put groups below each other, padded to the widest."""
    docs = max(mask.shape[1] for _, _, mask in parts)
    padded = [[torch.nn.functional.pad(tensor, (0, docs - tensor.shape[1])) for tensor in part] for part in parts]
    scores, labels, mask = (torch.cat(tensors) for tensors in zip(*padded, strict=True))
    return scores, labels, mask


def check_gradient_reaches_the_scores_of_real_docs_only(loss: Loss) -> None:
    for kind in KINDS:
        scores, labels, mask = groups(kind)
        _, gradient = value_and_gradient(loss, scores, labels, mask)
        assert (gradient[mask].abs() > 0).any()
        assert (gradient[~mask] == 0).all()


def check_right_order_is_cheaper(loss: Loss) -> None:
    for kind in KINDS:
        _, labels, mask = groups(kind)
        assert loss(labels, labels, mask) < loss(-labels, labels, mask)


def check_padding_changes_nothing(loss: Loss) -> None:
    for kind in KINDS:
        real = groups(kind)
        value, gradient = value_and_gradient(loss, *real)
        for junk in (7.0, 1e30, torch.nan, -torch.inf):
            scores, labels, mask = (torch.nn.functional.pad(tensor, (0, 3)) for tensor in real)
            padded = (scores.masked_fill(~mask, junk), labels.masked_fill(~mask, junk), mask)
            padded_value, padded_gradient = value_and_gradient(loss, *padded)
            assert_close(padded_value, value)
            assert_close(padded_gradient[:, :-3], gradient)
            assert (padded_gradient[~mask] == 0).all()


def check_doc_order_changes_nothing(loss: Loss) -> None:
    for kind in KINDS:
        scores, labels, mask = groups(kind, dtype=torch.float64)
        order = torch.randperm(mask.shape[1], generator=torch.Generator().manual_seed(1))
        value, gradient = value_and_gradient(loss, scores, labels, mask)
        other_value, other_gradient = value_and_gradient(loss, scores[:, order], labels[:, order], mask[:, order])
        assert_close(other_value, value)
        assert_close(other_gradient, gradient[:, order])
        tied = (scores > 0).double()  # equal scores must not be ordered by place
        assert_close(loss(tied[:, order], labels[:, order], mask[:, order]), loss(tied, labels, mask))


def check_groups_without_docs_count_zero(loss: Loss) -> None:
    """PC-53 (a): a softmax over nothing but masked cells is NaN."""
    for junk in (0.0, torch.nan, torch.inf):
        filled = torch.full((2, 3), junk)
        with torch.autograd.set_detect_anomaly(True):  # no intermediate value is NaN either
            value, gradient = value_and_gradient(loss, filled, filled, torch.zeros(2, 3, dtype=torch.bool))
        assert value == 0
        assert (gradient == 0).all()


def check_groups_without_contrast_are_finite(loss: Loss) -> None:
    real = torch.ones(1, 4, dtype=torch.bool)
    spread = torch.tensor([[2.0, -1.0, 0.5, 0.0]])
    for label in (0.0, 1.0, 3.0, -2.5):
        same = torch.full((1, 4), label)
        value_and_gradient(loss, same, same, real)
        value_and_gradient(loss, spread, same, torch.tensor([[True, False, False, False]]))
        with torch.autograd.set_detect_anomaly(True):
            value_and_gradient(loss, spread, same, real)
    value, _ = value_and_gradient(loss, torch.zeros(1, 4), torch.tensor([[1.0, 0.0, 0.0, 0.0]]), real)
    assert value > 0, "a scorer without an opinion has something to learn"


def check_huge_numbers_are_finite(loss: Loss) -> None:
    for kind in KINDS:
        scores, labels, mask = groups(kind)
        for scale in (1e4, -1e4):
            value_and_gradient(loss, scores * scale, labels, mask)
            value_and_gradient(loss, scale * labels, labels, mask)
            value_and_gradient(loss, torch.full_like(scores, scale), labels, mask)
        value_and_gradient(loss, scores, labels * 1e3, mask)


def check_precision_is_float32_or_that_of_the_scores(loss: Loss) -> None:
    for kind in KINDS:
        scores, labels, mask = groups(kind, dtype=torch.float64)
        assert loss(scores, labels.float(), mask).dtype == torch.float64
        for half in (torch.bfloat16, torch.float16):
            rounded = scores.to(half)
            value, gradient = value_and_gradient(loss, rounded, labels.float(), mask)
            assert_close(value, loss(rounded.float(), labels.float(), mask))  # also: float32 comes back
            assert gradient.dtype == half
            value_and_gradient(loss, torch.full_like(rounded, 6e4), labels.float(), mask)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(loss(scores.float(), labels.float(), mask), loss(scores, labels, mask).float())


def check_integer_labels_work(loss: Loss) -> None:
    for kind in ("binary", "graded"):
        scores, labels, mask = groups(kind)
        value, gradient = value_and_gradient(loss, scores, labels, mask)
        int_value, int_gradient = value_and_gradient(loss, scores, labels.long(), mask)
        assert_close(int_value, value)
        assert_close(int_gradient, gradient)


def check_groups_count_the_same_however_large(loss: Loss) -> None:
    """loss(cat(a, b)) == (n_a loss(a) + n_b loss(b)) / (n_a + n_b): what lets a step be cut into micro-batches."""
    for kind in KINDS:
        small = groups(kind, (2, 3), seed=1, dtype=torch.float64)
        large = groups(kind, (9, 4, 7), seed=2, dtype=torch.float64)
        no_order = (torch.randn(2, 4).double(), torch.zeros(2, 4).double(), torch.ones(2, 4, dtype=torch.bool))
        no_docs = (torch.zeros(1, 2).double(), torch.zeros(1, 2).double(), torch.zeros(1, 2, dtype=torch.bool))
        for parts in ((small, large), (small, no_order), (no_docs, large), (large, small, no_docs, no_order)):
            num_groups = [mask.shape[0] for _, _, mask in parts]
            apart = sum(n * loss(*part) for n, part in zip(num_groups, parts, strict=True)) / sum(num_groups)
            assert_close(loss(*stack(*parts)), apart, rtol=1e-12, atol=1e-12)


def check_device_is_never_waited_for(loss: Loss) -> None:
    """Meta tensors have no values: `.item()`, `if` on a tensor and boolean indexing fail on them, and stall a GPU."""
    try:
        value = loss(*(tensor.to("meta") for tensor in groups("graded")))
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(f"the loss needs a tensor's value on the host: {error}") from error
    assert value.shape == ()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


def check_a_loss_that_compares_pairs_says_so(loss: Loss) -> None:
    scores, labels, mask = groups("graded", (40, 40))
    with Largest() as largest:
        loss(scores, labels, mask)
    assert largest.numbers <= 2 * 40 or getattr(loss, "pairwise", True), "pairwise = False, yet [batch, docs, docs]"


def told_apart(loss: Loss, high: float, low: float) -> bool:
    """Whether the loss distinguishes two labels; LCE, for example, does not distinguish grades 1 and 2."""
    scores, mask = torch.tensor([[0.3, -0.2]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    one_way, other_way = (
        loss(scores, torch.tensor([pair], dtype=torch.float64), mask) for pair in ((high, low), (low, high))
    )
    return not torch.allclose(one_way, other_way)


def check_descent_sorts_by_label(loss: Loss) -> None:
    assert told_apart(loss, 1.0, 0.0)
    for kind in KINDS:
        start, labels, mask = groups(kind, dtype=torch.float64)
        scores = (start * 0.1).requires_grad_()
        optimizer = torch.optim.Adam([scores], lr=0.1)
        for step in range(100):
            of_step = partial(loss, seed=step) if getattr(loss, "draws", False) else loss
            _, scores.grad = value_and_gradient(of_step, scores.detach(), labels, mask)
            optimizer.step()
        grades = labels[mask].unique().tolist()
        highs = grades if getattr(loss, "sorts_all", True) else grades[-1:]
        for low, high in [
            (low, high) for low in grades for high in highs if low < high and told_apart(loss, high, low)
        ]:
            worst_high = scores.masked_fill((labels != high) | ~mask, torch.inf).amin(1)
            best_low = scores.masked_fill((labels != low) | ~mask, -torch.inf).amax(1)
            assert (worst_high > best_low).all(), f"{kind}: label {high} above label {low}"


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize("name", YAMLS)
def test_contract(name: str, check: Callable[[Loss], None]) -> None:
    check(load(YAMLS[name]))


def assert_yaml_fits_class(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    config = OmegaConf.to_container(OmegaConf.create(text))
    target = config.pop("_target_")
    assert re.fullmatch(rf"ranker\.losses\.{path.stem}\.[A-Z]\w*", target)
    parameters = inspect.signature(get_class(target)).parameters
    assert config == {name: parameter.default for name, parameter in parameters.items()}
    assert all(re.search(rf"^{key}: .+  # \S", text, re.MULTILINE) for key in config), "every key has a comment"


@pytest.mark.parametrize("name", YAMLS)
def test_yaml_lists_the_constructor_with_its_defaults(name: str) -> None:
    assert_yaml_fits_class(YAMLS[name])


def test_every_loss_file_has_its_yaml() -> None:
    files = {path.stem for path in (ROOT / "ranker/losses").glob("*.py") if not path.stem.startswith("_")}
    assert files == set(YAMLS)


def each_group(loss: Loss, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([loss(scores[i : i + 1], labels[i : i + 1], mask[i : i + 1]) for i in range(len(mask))])


def has_order(labels: Tensor, mask: Tensor) -> Tensor:
    pairs = (labels.unsqueeze(2) > labels.unsqueeze(1)) & mask.unsqueeze(2) & mask.unsqueeze(1)
    return pairs.flatten(1).any(1)


# Each takes a right loss and its inputs, and gives what the loss would give with the fault in it.
FAULTS: dict[str, Callable[[Loss, Tensor, Tensor, Tensor], Tensor]] = {
    "mask_forgotten": lambda loss, scores, labels, mask: loss(scores, labels, torch.ones_like(mask)),
    "masked_after_the_formula": lambda loss, scores, labels, mask: (
        loss(scores, labels, mask) + torch.where(mask, 0 * scores.square(), 0.0).sum()
    ),
    "mask_of_the_first_group": lambda loss, scores, labels, mask: loss(scores, labels, mask[:1].expand_as(mask)),
    "sign_flipped": lambda loss, scores, labels, mask: loss(-scores, labels, mask),
    "labels_and_scores_swapped": lambda loss, scores, labels, mask: loss(labels, scores, mask),
    "mean_over_all_docs_of_the_batch": lambda loss, scores, labels, mask: (
        (each_group(loss, scores, labels, mask) * mask.sum(1)).sum() / mask.sum().clamp(min=1)
    ),
    "groups_without_order_left_out_of_the_denominator": lambda loss, scores, labels, mask: (
        each_group(loss, scores, labels, mask).sum() / has_order(labels, mask).sum().clamp(min=1)
    ),
    "sum_over_groups": lambda loss, scores, labels, mask: each_group(loss, scores, labels, mask).sum(),
    "computed_in_half_precision": lambda loss, scores, labels, mask: loss(scores.bfloat16(), labels, mask).to(
        scores.dtype
    ),
    "scores_detached": lambda loss, scores, labels, mask: loss(scores.detach(), labels, mask),
    "asks_for_a_value": lambda loss, scores, labels, mask: (
        loss(scores, labels, mask) if mask.any() else 0.0 * scores.sum()
    ),
    "depends_on_the_first_place": lambda loss, scores, labels, mask: loss(
        scores + torch.eye(1, mask.shape[1]), labels, mask
    ),
}


def is_symmetric(loss: Loss) -> bool:
    """Whether a loss stays the same if scores and labels are exchanged, as a squared difference does."""
    return all(
        torch.equal(loss(scores, labels, mask), loss(labels, scores, mask))
        for scores, labels, mask in map(groups, KINDS)
    )


def failed_checks(loss: Loss) -> Iterator[str]:
    for name, check in CHECKS.items():
        try:
            check(loss)
        except AssertionError:
            yield name


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", YAMLS)
def test_seeded_fault_fails_the_contract(name: str, fault: str) -> None:
    right = load(YAMLS[name])
    if fault == "labels_and_scores_swapped" and is_symmetric(right):
        pytest.skip("scores and labels have the same role in this loss, so that exchanging them is no fault")
    assert next(failed_checks(lambda *inputs: FAULTS[fault](right, *inputs)), None), f"no check sees {fault} in {name}"


@pytest.mark.parametrize("name", YAMLS)
def test_needs_negatives_says_whether_one_relevant_doc_teaches_anything(name: str) -> None:
    loss = load(YAMLS[name])
    scores = torch.tensor([[0.3]], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(scores, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)), scores)
    assert bool(gradient.any()) is not getattr(loss, "needs_negatives", True)


def test_documented_example_is_a_loss(follow_guide) -> None:
    """Follow docs/add_a_loss.md: write its three files, run the value test, the doctest and the contract."""
    module, yaml_path = follow_guide("add_a_loss.md", "ranker.losses")
    assert doctest.testmod(module) == (0, 3)
    assert_yaml_fits_class(yaml_path)
    assert list(failed_checks(load(yaml_path))) == []
