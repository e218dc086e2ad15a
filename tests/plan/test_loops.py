"""Plans for other training loops than the toolkit's: each test fails where the loop's own term is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from nights import nightly_but
from plan.cells import LLAMA, Cell
from plan.trainer import trainer_peak
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.command import Request, make_plan
from toolkit.planning.loops import check_loop
from toolkit.planning.predict import Planner
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

WIDE = LLAMA | {"vocab_size": 8000, "num_hidden_layers": 2}
"""Its logits are the peak."""


def planner(loop: str, device: str = "cuda", precision: str = "bf16", **sections: Any) -> Planner:
    values = Cell("llama", False, "single", "none", 64, accumulation=1, precision=precision).recipe() | sections
    values["model"] = {"config": WIDE}
    return Planner.of(resolve(Recipe.model_validate(values), device=device), 64, loop)


@pytest.mark.parametrize("precision", nightly_but(["bf16", "fp32"], "fp32"))
@pytest.mark.usefixtures("launches")
def test_the_trainers_memory_is_what_it_takes(precision: str) -> None:
    """The Trainer itself, of the installed transformers, on the CPU."""
    made = planner("trainer", "cpu", precision)
    with WorkerGroup(1) as lone:
        [real] = lone.run(trainer_peak, WIDE, made.resolved.micro_size, 64, precision == "bf16")
    assert made.memory(made.resolved).peak == pytest.approx(real, rel=0.05)


def test_the_trainer_of_transformers_4_48_copies_the_logits_once_more() -> None:
    peaks = {}
    for loop in ("trainer", "trainer-4.48"):
        made = planner(loop)
        peaks[loop] = made.memory(made.resolved).phases["loss"]
    micro, length, words = 2, 64, 8000
    # A float32 copy of all but the last position. What else is computed of the logits is without that position then:
    # two rows of 128 less, in up to three tensors.
    assert peaks["trainer-4.48"] - peaks["trainer"] == pytest.approx(4 * micro * (length - 1) * words, rel=3 * 2 / 126)


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_the_sft_trainers_memory_is_what_it_takes() -> None:
    """The SFTTrainer itself, of the installed TRL, on the CPU: the same products of tiles, to a part in a thousand."""
    pytest.importorskip("trl")
    with WorkerGroup(1) as lone:
        for precision, dtype in (("bf16", "float32"), ("bf16-pure", "bfloat16")):
            made = planner("trl", "cpu", precision)
            micro = made.resolved.micro_size
            [real] = lone.run(trainer_peak, WIDE, micro, 64, precision == "bf16", True, dtype)
            assert made.memory(made.resolved).peak == pytest.approx(real, rel=1e-3)


def test_trl_keeps_a_tile_of_the_logits_and_adds_the_heads_gradient_up_in_float32() -> None:
    """On a GPU the tile is written over."""
    made = planner("trl", precision="bf16-pure")
    plain = planner("toolkit", precision="bf16-pure")
    words, width, tokens = 8000, WIDE["hidden_size"], 2 * 63
    memory, other = made.memory(made.resolved), plain.memory(plain.resolved)
    head = 4 * words * width + 2 * words * width  # summed in float32, then in 16 bits
    tile, hidden = 2 * tokens * 32768, (4 + 2 + 2) * tokens * width
    assert memory.phases["loss"] == pytest.approx(other.phases["forward"] + tile, rel=0.05)
    assert memory.breakdown["loss"] == pytest.approx(head + tile + hidden, rel=0.05)


def test_trl_trains_adapters_on_4_bit_weights_in_bfloat16() -> None:
    adapter = {"method": "qlora", "r": 64, "target_modules": "all-linear"}
    steps = {}
    for loop in ("trainer", "trl"):
        made = planner(loop, adapter=adapter)
        steps[loop] = made.memory(made.resolved).phases["step"]
        trains = made.skeleton.holdings.elements(True)
    # Weights, gradients and two moments of two bytes less each.
    assert steps["trainer"] - steps["trl"] == 4 * 2 * trains


# Peaks of litgpt 0.5.12 with lightning 2.4.0 on a CPU, every storage counted: three steps of GPT(4 layers, 8 heads, 128
# wide, 8,000 words), two rows of 200 tokens, foreach AdamW; LoRA r 16 with dropout. "llama": RMSNorm, LLaMAMLP 352
# wide, 4 groups, q and v adapted; "neox": LayerNorm, GptNeoxMLP, parallel residual, a quarter of a head turned, all
# adapted.
NEOX = {
    "model_type": "gpt_neox", "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "vocab_size": 8000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "mlp", "lm_head"]


@every_case(
    ("config", "targets", "precision", "measured"),
    [
        pytest.param(WIDE | {"num_hidden_layers": 4}, None, "bf16-pure", 66318532, id="llama, full, bf16-true"),
        pytest.param(WIDE | {"num_hidden_layers": 4}, None, "bf16", 86964676, id="llama, full, bf16-mixed"),
        pytest.param(NEOX, None, "fp32", 87680344, id="neox, full, 32-true"),
        pytest.param(WIDE | {"num_hidden_layers": 4}, ["q_proj", "v_proj"], "bf16-pure", 55860776, id="llama, lora"),
        pytest.param(NEOX, ALL, "bf16-pure", 59903056, id="neox, lora, bf16-true"),
        pytest.param(NEOX, ALL, "bf16", 74626576, id="neox, lora, bf16-mixed"),
    ],
)
def test_litgpts_memory_is_what_it_took(config: Any, targets: list[str] | None, precision: str, measured: int) -> None:
    values = Cell("llama", False, "single", "none", 200, accumulation=1, precision=precision).recipe()
    adapter = {"method": "lora", "r": 16, "alpha": 16.0, "dropout": 0.05, "target_modules": targets}
    values |= {"model": {"config": config}, "adapter": adapter if targets else None, "optimizer": {"decay": "all"}}
    resolved = resolve(Recipe.model_validate(values), device="cpu")
    found = Planner.of(resolved, 200, "litgpt").memory(resolved)
    assert found.peak == pytest.approx(measured, rel=0.003)


def test_litgpt_quantises_the_head_and_unties_it() -> None:
    adapter = {"method": "qlora", "r": 8, "target_modules": ["q_proj"]}
    made = planner("litgpt", precision="bf16-pure", adapter=adapter)
    by_name = made.skeleton.holdings.by_name
    assert by_name["lm_head.weight"].packed == 8000 * WIDE["hidden_size"] // 2
    assert by_name["wte.weight"].packed is None


# Peaks of torchtune 0.6.1 with torchao 0.9.0 on a CPU, every storage counted: three steps of llama3_1 of the same sizes
# (4 groups, MLP 352 wide), two rows of 200 tokens, CEWithChunkedOutputLoss, fused AdamW; LoRA r 16 with dropout.
SOME = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


@every_case(
    ("targets", "precision", "checkpointing", "measured"),
    [
        pytest.param(None, "bf16-pure", "none", 48378816, id="full, bf16"),
        pytest.param(None, "bf16-pure", "full", 38484416, id="full, bf16, recomputed"),
        pytest.param(None, "fp32", "full", 60515008, id="full, fp32, recomputed"),
        pytest.param(SOME, "bf16-pure", "none", 39441284, id="lora, bf16"),
        pytest.param(SOME, "fp32", "full", 39263940, id="lora, fp32, recomputed"),
    ],
)
def test_torchtunes_memory_is_what_it_took(
    targets: list[str] | None, precision: str, checkpointing: str, measured: int
) -> None:
    values = Cell("llama", False, "single", checkpointing, 200, accumulation=1, precision=precision).recipe()
    adapter = {"method": "lora", "r": 16, "alpha": 16.0, "dropout": 0.05, "target_modules": targets}
    config = WIDE | {"num_hidden_layers": 4}
    values |= {"model": {"config": config}, "adapter": adapter if targets else None, "optimizer": {"decay": "all"}}
    resolved = resolve(Recipe.model_validate(values), device="cpu")
    found = Planner.of(resolved, 200, "torchtune").memory(resolved)
    assert found.peak == pytest.approx(measured, rel=0.006)


@every_case(
    ("loop", "by_word"),
    [
        # Logits in 16 bits, their logarithms in float32, and the float32 copy of an eighth of them.
        pytest.param("torchtune", 2 + 4 + 4 / 8, id="torchtune"),
        # Of an eighth alone: logits, logarithms, and in the backward two gradients in float32.
        pytest.param("torchtitan", (2 + 4 + 4 + 4) / 8, id="torchtitan"),
    ],
)
def test_eight_chunks_of_logits(loop: str, by_word: float) -> None:
    losses = []
    for length in (512, 1024):
        values = Cell("llama", False, "single", "none", length, accumulation=1, precision="bf16-pure").recipe()
        values |= {"model": {"config": WIDE}, "strategy": {"name": "fsdp2"}}
        values["machine"] = {"device": "cuda", "processes": 2}
        resolved = resolve(Recipe.model_validate(values), device="cuda")
        line = Planner.of(resolved, length, loop).memory(resolved).line
        losses.append(max(place.terms["loss"] for place in line))
    by_token = (losses[1] - losses[0]) / (resolved.micro_size * 512)
    # The rest are the hidden states: at most their gradient in float32 and five copies in 16 bits.
    assert by_word * 8000 <= by_token <= by_word * 8000 + 14 * WIDE["hidden_size"] * 1.1


def test_a_loops_own_kernel_is_used_unless_the_recipe_names_one() -> None:
    for section, copies in (({}, True), ({"kernel": "fused"}, False)):
        made = planner("litgpt", precision="bf16-pure", optimizer=section)
        memory = made.memory(made.resolved)
        parameters = 2 * made.skeleton.holdings.elements()
        assert memory.phases["step"] == pytest.approx((5 if copies else 4) * parameters, rel=0.02)


def test_a_search_leaves_out_what_a_loop_cannot_train(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(WIDE))
    own = ("precision=bf16-pure", "strategy.name=fsdp1", "activation_checkpointing=full", "batch.accumulation=4")
    found = make_plan(
        Request(str(file), own, gpu="a100-40gb", gpus=2, length=64, loop="litgpt", every=True, scale=True)
    )
    assert {row["strategy"] for row in found.scaled or []} == {"fsdp1", "fsdp1 hybrid"}
    recipes = [candidate.resolved.recipe for candidate in found.candidates]
    assert {one.strategy.name for one in recipes} == {"fsdp1"}
    assert {(one.strategy.offload, one.activation_checkpointing) for one in recipes} == {("none", "full")}
    # Gradients are summed after the last micro-batch alone, so that they are whole until then.
    parameters = 2 * found.search.planner.skeleton.holdings.elements()
    backward = [place.terms["gradients"] for place in found.candidates[0].memory.line if place.phase == "forward"]
    assert max(backward) == parameters


@every_case(
    ("loop", "sections", "message"),
    [
        ("trainr", {}, "--loop trainr: not one of toolkit, trainer, trainer-4.48, trl, litgpt, torchtune, torchtitan"),
        ("trainer", {"loss": "fused"}, "--loop trainer: transformers' Trainer has no loss: fused"),
        ("trainer", {"label_smoothing": 0.1}, "memory transformers' Trainer takes for label_smoo"),
        ("trl", {"activation_offload": True, "activation_checkpointing": "full"}, "TRL's SFTTrainer takes for act"),
        ("trl", {"model": {"config": WIDE, "task": "sequence-classification"}}, "SFTTrainer has no task sequence-clas"),
        (
            "litgpt",
            {"strategy": {"name": "ddp"}},
            "not know litgpt under ddp; plan it with strategy.name=single or fsdp1",
        ),
        ("litgpt", {"activation_checkpointing": "full"}, "litgpt recomputes activations under FSDP alone"),
        (
            "torchtune",
            {"precision": "bf16"},
            "torchtune has no mixed precision; plan it with precision=bf16-pure or fp32",
        ),
        ("torchtitan", {}, "plan does not know torchtitan under single; plan it with strategy.name=fsdp2"),
        (
            "litgpt",
            {"strategy": {"name": "fsdp1", "offload": "all"}, "machine": {"device": "cuda", "processes": 2}},
            "litgpt's scripts offload nothing",
        ),
        ("litgpt", {"optimizer": {"name": "lion"}}, "litgpt's fine-tuning has no optimizer lion"),
        ("litgpt", {"model": {"config": WIDE, "task": "sequence-classification"}}, "litgpt has no task sequence-clas"),
        ("trainer", {"optimizer": {"name": "muon"}}, "--loop trainer: transformers' Trainer has no optimizer muon"),
    ],
)
def test_what_a_loop_cannot_train_is_an_error(loop: str, sections: dict[str, Any], message: str) -> None:
    values = Cell("llama", False, "single", "none", 64).recipe() | sections
    with pytest.raises(InputError, match=message):
        check_loop(loop, resolve(Recipe.model_validate(values), device="cuda"))
