"""Weights that no output of a model of text depends on: those that nothing ties to the tables in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import model_types
from families import EVERY_FAMILY, HYBRIDS
from nights import nightly_but
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.model import unreached as unreached_module
from toolkit.model.adapters import add_adapter
from toolkit.model.load import load_base
from toolkit.model.unreached import Hidden, _without_values, reach, unreached
from toolkit.planning.skeleton import build
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of
from toolkit.verification.run import verify

BART = EVERY_FAMILY["bart"]["config"] | {"num_labels": 3}


def bart(tie: bool, task: str = "seq2seq-lm") -> dict[str, Any]:
    """``recipe``'s sections; encoder and decoder have tables of their own unless ``tie``."""
    labels = {"num_labels": 3} if task == "sequence-classification" else {}
    form = "text" if labels else "prompt-completion"
    return {
        "model": {"task": task, "config": BART | {"tie_word_embeddings": tie}} | labels,
        "data": {"format": form, "max_length": 48},
    }


@pytest.mark.parametrize("task", ["seq2seq-lm", "sequence-classification"])
def test_a_table_that_nothing_shares_is_not_reached(task: str, recipe: Callable[..., Resolved]) -> None:
    for tie in (False, True):
        resolved = recipe("ddp", **bart(tie, task))
        found = unreached(load_base(resolved), resolved)
        assert found == ([] if tie else ["model.shared.weight"]), tie


@pytest.mark.parametrize("strategy", nightly_but(["fsdp1", "ddp", "zero2", "zero3", "fsdp2"], "fsdp1"))
def test_it_trains_as_the_plain_loop(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    """DDP ended in «did not receive gradient», and fsdp2 had no state where the plain loop had one."""
    resolved = recipe(strategy, precision="fp32", **bart(tie=False))
    outcome = verify(resolved, group=group, round_trip=False, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "fsdp2"], "ddp"))
def test_an_adapter_that_the_model_passes_by_is_not_trained(
    strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jamba multiplies by the weight of ``dt_proj`` itself. DDP ended in «did not receive gradient»."""
    monkeypatch.setattr("toolkit.model.unreached._LONG", 12)  # its scan takes a token at a time
    adapter = {"r": 2, "target_modules": "all-linear"}
    resolved = recipe(strategy, model=HYBRIDS["jamba"], adapter=adapter, precision="fp32")
    outcome = verify(resolved, group=group, round_trip=False, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


def test_an_adapter_that_is_passed_by_in_training_alone_is_not_trained(recipe: Callable[..., Resolved]) -> None:
    """Gemma 3n clamps the weight of ``correction_coefs`` in training, past the layer, and calls the layer in
    evaluation: ddp ended in «did not receive gradient»."""
    resolved = recipe("single", model=_indexed("gemma3n_text"), adapter={"r": 2, "target_modules": "all-linear"})
    missed = unreached(add_adapter(load_base(resolved), resolved), resolved)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in missed} == {"correction_coefs"}


def _indexed(kind: str) -> dict[str, Any]:
    """A model whose layers choose what they attend to by an indexer that no gradient reaches."""
    return {"config": model_types.small_config(kind, "AutoModelForCausalLM")[0]}


@pytest.mark.parametrize("strategy", nightly_but(["fsdp2", "ddp", "zero2"], "fsdp2"))
def test_an_indexer_that_no_gradient_reaches_is_not_trained(
    strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """fsdp2 had no state where the plain loop had one, and ddp ended in «did not receive gradient»."""
    resolved = recipe(strategy, model=_indexed("glm_moe_dsa"))
    names = unreached(load_base(resolved), resolved)
    assert {name.split(".indexer.")[-1] for name in names} >= {"wk.weight", "wq_b.weight"}
    outcome = verify(resolved, group=group, round_trip=False, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


def test_what_a_short_row_does_not_reach_is_trained(recipe: Callable[..., Resolved]) -> None:
    """DeepSeek V4's compressors read nothing of a row of three tokens."""
    resolved = recipe("single", model=_indexed("deepseek_v4"))
    model: Any = load_base(resolved)
    missed = set(_without_values(model, resolved, 3)) - set(unreached(model, resolved))
    assert missed
    ids = torch.randint(5, 90, (1, 512))
    model(input_ids=ids).logits.pow(2).mean().backward()
    names = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert names == set(unreached(model, resolved))
    assert set(reach(model, resolved).by_row) == missed


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["deepseek_v4", "longcat_flash"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2"])
def test_ranks_may_reach_different_weights(
    strategy: str, kind: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """ddp ended in «did not receive gradient», and under fsdp2 ranks exchanged unequal lengths: SIGABRT."""
    resolved = recipe(strategy, model=_indexed(kind))
    outcome = verify(resolved, group=group, round_trip=False, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.parametrize("kind", nightly_but(["deepseek_v4", "longcat_flash"], "deepseek_v4"))
@pytest.mark.parametrize("strategy", nightly_but(["zero2", "zero3"], "zero2"))
def test_zero_refuses_what_it_would_mix_up(
    strategy: str, kind: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """DeepSpeed added the gradient of one weight to another's, or died. LongCat's code decides by values: a run ends
    when ranks have reached different weights."""
    resolved = recipe(strategy, model=_indexed(kind))
    if kind == "deepseek_v4":
        with pytest.raises(InputError, match="get a gradient from some rows alone"):
            build(resolved)  # a plan does not choose it
    with pytest.raises(InputError, match="get a gradient from some rows alone"):
        verify(resolved, group=group, round_trip=False, time_limit=200)


def test_a_model_like_one_before_is_not_searched_again(
    recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict builds the same model for each of its passes. Another in what trains, in what is tied or in how a
    module computes is searched."""
    graphs: list[nn.Module] = []
    right = unreached_module._by_graph
    monkeypatch.setattr(unreached_module, "_KNOWN", {})
    monkeypatch.setattr(unreached_module, "_by_graph", lambda model, *rest: graphs.append(model) or right(model, *rest))

    def searched(tie: bool, change: Callable[[Any], Any] = lambda model: None) -> list[str]:
        resolved = recipe("ddp", **bart(tie))
        model = load_base(resolved)
        change(model)
        return unreached(model, resolved)

    assert searched(False) == searched(False) == ["model.shared.weight"]
    assert len(graphs) == 1
    assert searched(True) == []
    assert searched(False, lambda model: model.model.shared.requires_grad_(False)) == []
    searched(False, lambda model: setattr(model.lm_head, "forward", model.lm_head.forward))
    assert len(graphs) == 4


def test_the_search_leaves_nothing_in_the_model(recipe: Callable[..., Resolved]) -> None:
    """A forward without values left tensors without values in tables that a model keeps."""
    resolved = recipe("single", model=_indexed("phi3"))
    model = load_base(resolved)
    before = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert unreached(model, resolved) == []
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    held = [v for module in model.modules() for v in vars(module).values() if isinstance(v, torch.Tensor)]
    assert not [tensor for tensor in held if isinstance(tensor, FakeTensor)]


def test_a_graph_that_hides_weights_freezes_none(recipe: Callable[..., Resolved]) -> None:
    """Reformer's reversible layers are one function in Python: their weights are no inputs of it."""
    resolved = recipe("single", model=_indexed("reformer"))
    model: Any = load_base(resolved)
    assert unreached(model, resolved) == []
    with pytest.raises(Hidden):
        _without_values(model, resolved, 3)
    adapted = recipe("single", model=_indexed("reformer"), adapter={"r": 2})
    assert unreached(add_adapter(load_base(adapted), adapted), adapted) == []


@pytest.mark.parametrize(
    ("kind", "module"),
    [("longcat_flash", ".mlp.experts.act_fn"), ("qwen4_exp_text", ".indexer.k_layernorm")],
)
def test_modules_that_run_as_values_say_are_refused_under_zero3(
    kind: str, module: str, recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongCat-Flash calls an activation once for each expert with tokens: DeepSpeed's ranks hung in the fifth step.
    Qwen4's indexer normalises the blocks of keys that a query sees, as many as the row is long: ranks exchanged unequal
    lengths, SIGABRT."""
    for name in ("_LONGER", "_LONG"):  # its code takes a token at a time
        monkeypatch.setattr(f"toolkit.model.unreached.{name}", 12)
    resolved = recipe("zero3", model=_indexed(kind))
    found = reach(load_base(resolved), resolved)
    assert found.by_values[0].endswith(module)
    with pytest.raises(InputError, match="runs as often as the values or the length of a row say"):
        strategy_of(resolved).check_reach(found.by_row, resolved, by_values=found.by_values)
    strategy_of(recipe("zero2")).check_reach((), resolved, by_values=found.by_values)


@pytest.mark.parametrize("kind", ["jetmoe", "blt"])
def test_a_model_that_decides_by_values_and_calls_every_module_once_is_not(
    kind: str, recipe: Callable[..., Resolved]
) -> None:
    resolved = recipe("zero3", model=_indexed(kind))
    found = reach(load_base(resolved), resolved, sampled=True)
    assert found.unsure
    assert not found.by_values
