"""Plans for other training loops than the toolkit's: each test fails where the loop's own term is left out."""

from __future__ import annotations

import json
from dataclasses import replace
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
from toolkit.planning.hardware import devices
from toolkit.planning.loops import LOOPS, check_loop
from toolkit.planning.predict import Planner
from toolkit.recipe.resolve import Resolved
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


@every_case(("loop", "held"), [("bare", True), ("bare held_outputs=false", False)])
def test_the_memory_of_a_loop_of_ones_own_is_what_it_takes(loop: str, held: bool) -> None:
    """Two steps of it on the CPU, every storage counted; outputs are a variable of the loop, or are not."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.planning.live import LiveBytes

    made = planner(loop, "cpu", "bf16-pure")
    own = dict(WIDE)
    config = AutoConfig.for_model(own.pop("model_type"), **own)
    with LiveBytes() as tracker:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):
            batch = torch.ones(made.resolved.micro_size, 64, dtype=torch.int64)
            tracker.reset_peak()
            outputs = model(input_ids=batch, labels=batch, use_cache=False)
            loss = outputs.loss
            if not held:
                del outputs
            loss.backward()
            peak = tracker.reset_peak()
            optimizer.step()
            optimizer.zero_grad()
    predicted = made.memory(made.resolved).phases
    assert max(predicted["loss"], predicted["backward"], predicted["forward"]) == pytest.approx(peak, rel=0.01)


def test_float32_in_tf32_is_as_much_faster_as_the_data_sheet_says(tmp_path: Path) -> None:
    """On an A100 156 in place of 19.5 TFLOP/s, for products alone; bf16 is as before."""
    file = tmp_path / "config.json"
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    file.write_text(json.dumps(WIDE | wide | {"max_position_embeddings": 1024}))

    def seconds(*habits: str, precision: str = "fp32") -> float:
        overrides = (f"precision={precision}", "activation_checkpointing=none")
        request = Request(str(file), overrides, gpu="a100-80gb", length=1024, loop="bare", loop_set=habits)
        made = make_plan(request).candidates[0].seconds
        assert made is not None
        return made.compute

    assert seconds("tf32=true") < 0.5 * seconds()
    assert seconds("tf32=true", precision="bf16-pure") == seconds(precision="bf16-pure")
    assert devices()["a100-80gb"].in_tf32().rate("float32") == 156
    assert devices()["t4"].in_tf32() == devices()["t4"], "Turing has no TF32"


def test_each_habit_of_a_loop_takes_its_own_bytes() -> None:
    tokens, words = 2 * 64, WIDE["vocab_size"]

    def phases(loop: str, precision: str = "bf16-pure", **sections: Any) -> dict[str, int]:
        made = planner(loop, precision=precision, **sections)
        memory = made.memory(made.resolved)
        return memory.phases | {"stays": memory.stays}

    bare, free = phases("bare"), phases("bare held_outputs=false")
    assert bare["backward"] - free["backward"] == 2 * tokens * words, "logits in 16 bits"
    accelerate, trainer = phases("accelerate", "bf16"), phases("trainer", "bf16")
    assert accelerate["backward"] - trainer["backward"] == 4 * tokens * words, "accelerate's copy of them in 32"
    assert phases("trainer held_outputs=true", "bf16") == accelerate
    assert phases("trainer@4.48") == phases("trainer-4.48")
    fused = phases("bare kernel=fused")
    assert bare["step"] > fused["step"]
    qlora = {"adapter": {"method": "qlora", "r": 4, "alpha": 8.0}}
    plain, kbit = phases("bare", "bf16", **qlora), phases("bare prepare_for_kbit=true", "bf16", **qlora)
    own = planner("bare", "cuda", "bf16", **qlora).holdings
    in_16 = own.elements(whole=True) - own.elements(True, whole=True)
    packed = sum(w.numel * count for unit, count in own.units() for w in unit if w.packed is not None)
    assert kbit["stays"] - plain["stays"] == 2 * (in_16 - packed), "embedding, head and norms in float32"
    double = phases("bare double_quant=false", "bf16", **qlora)
    # A float32 for each block of 64, in place of a byte for each and for 256 of those, and a table for each layer.
    blocks, layers = packed / 64, sum(count for unit, count in own.units() for w in unit if w.packed is not None)
    nested = blocks + 4 * blocks / 256 + (4 * 256 + 4) * layers
    assert double["stays"] - plain["stays"] == pytest.approx(4 * blocks - nested, rel=0.02)
    lora = {"adapter": {"method": "lora", "r": 4, "alpha": 8.0}}
    frozen = planner("bare", "cuda", "bf16", **lora).holdings
    base = frozen.elements(whole=True) - frozen.elements(True, whole=True)
    whole = phases("bare float32_base=true", "bf16", **lora)
    assert whole["stays"] - phases("bare", "bf16", **lora)["stays"] == 2 * base


def test_a_search_leaves_out_what_a_loop_cannot_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(resolved: Resolved) -> str:
        return "" if resolved.recipe.strategy.offload == "none" else "it offloads nothing"

    monkeypatch.setitem(LOOPS, "trl", replace(LOOPS["trl"], strategies=("fsdp1",), refuses=refuses))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(WIDE))
    own = ("precision=bf16-pure", "strategy.name=fsdp1", "batch.accumulation=4")
    plan = make_plan(Request(str(file), own, gpu="a100-40gb", gpus=2, length=64, loop="trl", every=True, scale=True))
    assert {row["strategy"] for row in plan.scaled or []} == {"fsdp1", "fsdp1 hybrid"}
    strategies = [candidate.resolved.recipe.strategy for candidate in plan.candidates]
    assert {(one.name, one.offload) for one in strategies} == {("fsdp1", "none")}


@every_case(
    ("loop", "sections", "message"),
    [
        (
            "trainr",
            {},
            "--loop trainr: not one of toolkit, bare, accelerate, trainer, trainer-4.48, trl; did you mean trainer",
        ),
        ("trainer@4.1", {}, "does not know trainer of version 4.1; known: 5.23, 4.48"),
        ("bare@1.0", {}, "does not know bare of version 1.0; versions are known of trainer, accelerate, trl alone"),
        ("bare held=true", {}, "--loop-set held=true: not one of held_outputs=…"),
        ("bare held_outputs=yes", {}, "--loop-set held_outputs=yes: true or false"),
        ("bare kernel=fast", {}, "--loop-set kernel=fast: fused or foreach"),
        ("toolkit reentrant=true", {}, "--loop-set: for a loop of --loop; the toolkit's own"),
        ("trainer", {"loss": "fused"}, "--loop trainer: transformers' Trainer has no loss: fused"),
        ("trainer", {"label_smoothing": 0.1}, "memory transformers' Trainer takes for label_smoo"),
        ("trl", {"activation_offload": True, "activation_checkpointing": "full"}, "TRL's SFTTrainer takes for act"),
        ("trl", {"model": {"config": WIDE, "task": "sequence-classification"}}, "SFTTrainer has no task sequence-clas"),
        ("trainer", {"optimizer": {"name": "muon"}}, "Trainer has no optimizer that is the recipe's muon"),
        (
            "trainer",
            {"optimizer": {"name": "adafactor"}},
            "Trainer's adafactor is another one, whose memory plan does not",
        ),
    ],
)
def test_what_a_loop_cannot_train_is_an_error(loop: str, sections: dict[str, Any], message: str) -> None:
    values = Cell("llama", False, "single", "none", 64).recipe() | sections
    with pytest.raises(InputError, match=message):
        check_loop(loop, resolve(Recipe.model_validate(values), device="cuda"))
