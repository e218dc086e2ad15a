"""Names in a recipe's ``adapter``: those of layers that a model keeps in one tensor train what PEFT trains, and those
that match nothing are refused before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from families import EVERY_FAMILY
from jobs import resolved_from, train_job
from nights import nightly_but
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.strategies.engines.prepared import Prepared
from toolkit.training import preparation
from toolkit.training.preparation import prepare_model

PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = "experts.down_proj, experts.gate_up_proj"


def recipe(root: Path, family: str, targets: Any, **adapter: Any) -> dict[str, Any]:
    model = EVERY_FAMILY.get(family, {"config": LLAMA})
    adapter = {"method": "lora", "r": 4, "target_modules": targets} | adapter
    return recipe_dict(root, model=model, adapter=adapter, strategy={"name": "single"}, machine={"processes": 1})


def prepared(root: Path, family: str, targets: Any, **adapter: Any) -> Prepared:
    return prepare_model(resolved_from(recipe(root, family, targets, **adapter)))


def trained_shapes(made: Prepared) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, tuple(p.shape)) for name, p in made.model.named_parameters() if p.requires_grad}


@every_case(
    ("family", "targets"),
    [("qwen3_moe", ["q_proj", *PROJECTIONS]), ("deepseek_v3", PROJECTIONS), ("mixtral", ["w1", "w2", "w3", "o_proj"]),
     ("olmoe", PROJECTIONS), ("qwen3_moe", "all-linear"), ("qwen3_moe", r".*experts.*_proj")],
)  # fmt: skip
def test_projections_of_fused_experts_train_what_peft_trains(family: str, targets: Any, tiny_root: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from toolkit.model.load import load_base

    made = prepared(tiny_root, family, targets)
    base: Any = load_base(resolved_from(recipe(tiny_root, family, targets)))
    ours, theirs = trained_shapes(made), get_peft_model(base, LoraConfig(r=4, target_modules=targets))
    assert ours == {(name, tuple(p.shape)) for name, p in theirs.named_parameters() if p.requires_grad}
    assert any(".experts." in name for name, _ in ours)
    [note] = made.notes
    assert EXPERTS in note
    frozen = "linear layers stay frozen (mlp.down_proj, mlp.gate_proj, mlp.up_proj, shared_experts.down_proj"
    assert (frozen in note) == (family == "deepseek_v3"), "PEFT leaves the shared expert's own layers out"


@every_case("family", ["gpt_oss", "granitemoe"])
def test_all_linear_says_that_experts_stay_frozen(family: str, tiny_root: Path) -> None:
    [note] = prepared(tiny_root, family, "all-linear").notes
    assert "they stay frozen" in note
    assert EXPERTS in note
    share = note.partition("% of the parameters")[0].rpartition(" ")[2]
    model = prepared(tiny_root, family, "all-linear").model
    experts = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj")))
    assert int(share) == round(100 * experts / sum(p.numel() for p in model.parameters()))
    assert not prepared(tiny_root, family, ["q_proj"]).notes, "the recipe says it itself"


def test_no_word_of_experts_where_there_are_none(tiny_root: Path) -> None:
    assert not prepared(tiny_root, "llama", "all-linear").notes
    assert not prepared(tiny_root, "llama", PROJECTIONS).notes


LAYERS = "linear layers of this model: down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"


@every_case(
    ("family", "adapter", "said"),
    [
        ("llama", {"targets": ["q_prj"]},
         f"adapter.target_modules: 'q_prj' matches no module; did you mean q_proj?; {LAYERS}"),
        ("llama", {"targets": ["q_proj", "query", "c_attn"]}, f"'query', 'c_attn' match no module; {LAYERS}"),
        ("llama", {"targets": "q_proj"},
         "'q_proj' is a pattern for whole names, and matches no module; a list, [q_proj],"),
        ("llama", {"targets": r".*\.(query|value)"}, f"matches no module; {LAYERS}"),
        ("llama", {"targets": "(q_proj"}, "adapter.target_modules: '(q_proj' is no regular expression: "),
        ("gpt_oss", {"targets": PROJECTIONS},
         "match no module; linear layers of this model: k_proj, lm_head, o_proj, q_proj, v_proj; "
         f"its experts are one tensor: adapter.options.target_parameters: [{EXPERTS}]"),
        ("mixtral", {"targets": PROJECTIONS}, "'gate_proj', 'up_proj', 'down_proj' match no module; linear layers"),
        ("mixtral", {"targets": r".*experts.*_proj"},
         "'.*experts.*_proj' is a pattern for whole names, and matches no module"),
        ("qwen3_moe", {"targets": ["gate_proj"]},
         "Cannot convert PEFT target(s) gate_proj without also targeting up_proj"),
        ("llama", {"targets": ["q_proj"], "modules_to_save": ["lmhead"]},
         "no module is named 'lmhead'; did you mean lm_head?"),
        ("llama", {"targets": ["q_proj"], "options": {"rank_pattern": {"q_prj": 8}}},
         "adapter.options.rank_pattern: 'q_prj' matches no module; did you mean q_proj?"),
        ("llama", {"targets": ["q_proj"], "options": {"alpha_pattern": {"layers.9.self_attn.q_proj": 8}}},
         "adapter.options.alpha_pattern: 'layers.9.self_attn.q_proj' matches no module"),
        ("llama", {"targets": "all-linear", "options": {"exclude_modules": ["v_prj"]}},
         "adapter.options.exclude_modules: 'v_prj' matches no module; did you mean v_proj?"),
        ("llama", {"method": "ia3", "targets": ["query"]},
         f"adapter.target_modules: 'query' matches no module; {LAYERS}"),
    ],
)  # fmt: skip
def test_a_name_that_matches_nothing_is_refused_before_weights_are_read(
    family: str, adapter: dict[str, Any], said: str, tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if adapter.get("method") == "ia3":
        adapter = adapter | {"r": None}
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "load_base", lambda *arguments, **options: pytest.fail("the model was loaded"))
        with pytest.raises(InputError) as refused:
            prepared(tiny_root, family, **adapter)
    assert said in str(refused.value), str(refused.value)
    assert "\n" not in str(refused.value)


@every_case(
    "adapter",
    [{"targets": ["layers.0.self_attn.q_proj"]}, {"targets": r".*\.[qv]_proj"},
     {"targets": ["q_proj"], "options": {"rank_pattern": {"layers.0.self_attn.q_proj": 8}}},
     {"targets": "all-linear", "options": {"exclude_modules": r".*\.mlp\..*"}}, {"targets": "all-linear"}],
)  # fmt: skip
def test_other_ways_to_name_layers_are_not(adapter: dict[str, Any], tiny_root: Path) -> None:
    assert trained_shapes(prepared(tiny_root, "llama", **adapter))


@pytest.mark.parametrize("family", nightly_but(["qwen3_moe", "deepseek_v3", "olmoe"], "qwen3_moe"))
def test_they_train(family: str, tiny_root: Path) -> None:
    right = recipe(tiny_root, family, PROJECTIONS)
    right["model"] = right["model"] | {"config": right["model"]["config"] | {"vocab_size": 300}}
    run = train_job(resolved_from(right), 2)
    assert any(".experts." in name for name in run.weights)
    moments = {name for name, moment in run.moments.items() if moment.abs().sum() > 0}
    assert any(".experts." in name for name in moments)
