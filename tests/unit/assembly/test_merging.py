"""Merged weights: values by hand, a model with itself, models that do not fit."""

import math

import pytest
import torch

from ranker.assembly.merging import Merged, linear, merge_scorers, search_shares, slerp
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.evaluation.fusion import simplex
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT


def scorer(seed, model=MonoBERT, **options):
    torch.manual_seed(seed)
    made = model(load_encoder("tiny", **options))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def test_the_weighted_mean_by_hand():
    mean = linear([torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0]), torch.tensor([0.0, 4.0])], [0.5, 0.25, 0.25])
    assert mean.tolist() == [1.25, 1.5]


def test_a_point_on_the_arc_by_hand():
    """A right angle's third is 30 degrees; opposite lengths keep their ends; vectors in one line have no arc."""
    third = slerp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 1 / 3)
    torch.testing.assert_close(third, torch.tensor([math.cos(math.pi / 6), math.sin(math.pi / 6)]))
    angle = math.acos(0.6)
    part = [math.sin(0.75 * angle) / math.sin(angle), math.sin(0.25 * angle) / math.sin(angle)]
    point = slerp(torch.tensor([5.0, 0.0]), torch.tensor([0.6, 0.8]), 0.25)
    torch.testing.assert_close(point, torch.tensor([5 * part[0] + 0.6 * part[1], 0.8 * part[1]]))
    assert slerp(torch.tensor([1.0, 1.0]), torch.tensor([3.0, 3.0]), 0.5).tolist() == [2.0, 2.0]
    assert slerp(torch.zeros(2), torch.tensor([3.0, 1.0]), 0.5).tolist() == [1.5, 0.5]


@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_a_model_with_itself_does_not_change(method):
    before = scorer(0).state_dict()
    merged = merge_scorers({"a": scorer(0), "b": scorer(0)}, [1, 2], method).state_dict()
    assert all(torch.equal(merged[name], before[name]) for name in before)


def test_all_weights_are_merged():
    states = [scorer(seed).state_dict() for seed in (0, 1, 2)]
    merged = merge_scorers({str(seed): scorer(seed) for seed in (0, 1, 2)}, [2, 1, 1], "linear").state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, 0.5 * states[0][name] + 0.25 * states[1][name] + 0.25 * states[2][name])


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="runs: expected models of one class, got MonoBERT in a and DPR in b"):
        merge_scorers({"a": scorer(0), "b": scorer(0, DPR)}, None, "linear")
    with pytest.raises(ConfigError, match=r"architecture, got encoder\.model\.\S+ of shape [\d x]+ in a and none in b"):
        merge_scorers({"a": scorer(0), "b": scorer(0, layers=1)}, None, "linear")


def test_each_layer_has_its_own_share():
    one, other = scorer(0), scorer(1)
    states = [{name: value.clone() for name, value in part.state_dict().items()} for part in (one, other)]
    both = Merged({"one": one, "other": other}, "linear")
    assert both.groups == ["outside", "layer 1", "layer 2"]
    merged = both.at({"outside": [1.0, 0.0], "layer 1": [0.0, 1.0], "layer 2": [0.5, 0.5]}).state_dict()
    for name, value in merged.items():
        share = 1.0 if ".layer.0." in name else 0.5 if ".layer.1." in name else 0.0
        torch.testing.assert_close(value, (1 - share) * states[0][name] + share * states[1][name])
    again = both.at({key: [1.0, 0.0] for key in both.groups}).state_dict()  # what is loaded changes no input
    assert all(torch.equal(value, states[0][name]) for name, value in again.items())


@pytest.mark.parametrize("per_layer", [False, True])
def test_the_search_finds_what_a_search_over_all_shares_finds(per_layer):
    trials = simplex(2, 0.25)
    wanted = {"outside": 0.25, "layer 1": 0.75, "layer 2": 1.0}
    value = lambda shares: -sum((shares[name][0] - wanted[name]) ** 2 for name in wanted)  # noqa: E731
    found, done = search_shares(list(wanted), trials, value, per_layer)
    if per_layer:
        assert {name: parts[0] for name, parts in found.items()} == wanted
    else:
        best = max(trials, key=lambda parts: value(dict.fromkeys(wanted, parts)))
        assert all(parts == list(best) for parts in found.values())
    assert len(done) == 5 + (12 if per_layer else 0)
    assert max(trial["value"] for trial in done) == value(found)


def test_equal_values_keep_equal_shares():
    found, _ = search_shares(["a", "b"], simplex(2, 0.5), lambda shares: 1.0, per_layer=True)
    assert found == {"a": [0.5, 0.5], "b": [0.5, 0.5]}
