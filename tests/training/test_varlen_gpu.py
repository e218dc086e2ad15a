"""``model.attention: varlen`` on a GPU, without one: torch's kernel is a stand-in that computes each sample by sdpa."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from cases import every_case
from jobs import resolved_from
from tiny import recipe_dict
from toolkit.data.collate import Bounds, MicroBatch, Slot, bounds_of, collate
from toolkit.data.formats import Example
from toolkit.errors import InputError, RunFailed
from toolkit.launch.job import check_machine
from toolkit.model.bounds import bounds_arguments
from toolkit.model.checkpointing import checkpoint_blocks, recomputed_calls
from toolkit.options.varlen import kernel as gpu_kernel
from toolkit.options.varlen import spec
from toolkit.options.varlen.kernel import VARLEN_ON_GPU
from toolkit.planning.predict import masks_rows
from toolkit.recipe.schema import Recipe
from toolkit.reference.model import plain_model
from toolkit.strategies import resolve
from toolkit.training.loss import loss_sum
from toolkit.training.preparation import prepare_model
from toolkit.verification.cases.prepare import make_case, twin_recipe
from training.test_varlen import MODELS

LENGTHS = [[7, 12, 1, 6], [3, 9, 5]]
"""Of the samples of two rows; the second row has nine tokens of padding."""
STARTS = [0, 7, 19, 20, 26, 29, 38, 43, 52]


class Kernel:
    """torch's ``varlen_attn``, as its documentation defines it; keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, q: Any, k: Any, v: Any, starts: Any, starts_k: Any, longest: int, longest_k: int, **options: Any
    ) -> torch.Tensor:
        self.calls.append({"shapes": [tuple(one.shape) for one in (q, k, v)], "dtype": q.dtype, "starts": starts,
                           "starts_k": starts_k, "longest": (longest, longest_k), **options})  # fmt: skip
        assert options["enable_gqa"] or q.shape[1] == k.shape[1]
        left, right = options["window_size"]
        assert right == 0
        found = []
        for begin, end in itertools.pairwise(starts.tolist()):
            assert end - begin <= longest
            apart = torch.arange(end - begin)[:, None] - torch.arange(end - begin)[None]
            seen = (apart >= 0) & (apart <= (left if left >= 0 else longest))
            one = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
            output = functional.scaled_dot_product_attention(
                *one, attn_mask=seen, scale=options["scale"], enable_gqa=options["enable_gqa"]
            )
            found.append(output[0].transpose(0, 1))
        return torch.cat(found)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    import torch.nn.attention.varlen

    made = Kernel()
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", made)
    # Compared in float64, which the kernel does not take.
    monkeypatch.setattr(gpu_kernel, "_DTYPES", (torch.float64, torch.bfloat16))
    return made


def packed() -> MicroBatch:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 90, (n,), generator=draw).tolist() for row in LENGTHS for n in row]
    return collate([Example(one, one) for one in ids], Slot(list(range(7)), 0, 0, 0, 1, (4, 3)), "causal-lm", 0)


def model_of(config: dict[str, Any], attention: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    gpu_kernel.register_varlen_on_gpu("r")
    torch.manual_seed(0)
    own = {key: value for key, value in config.items() if key != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **own, attn_pdrop=0.0)
    model = AutoModelForCausalLM.from_config(made, attn_implementation=attention).double()
    model.config.use_cache = False
    return model.eval()


def computed(model: Any, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    loss = loss_sum(model, model.config, micro.tensors, "causal-lm", bounds=micro.bounds)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# ---------------------------------------------------------------------- where samples begin


def test_bounds_of_several_rows_and_padding() -> None:
    bounds = packed().bounds
    assert bounds is not None
    assert (bounds.starts.dtype, bounds.starts.tolist(), bounds.longest) == (torch.int32, STARTS, 12)


def test_bounds_of_one_row_and_of_a_dummy() -> None:
    examples = [Example([4, 5, 6], [4, 5, 6]), Example([7], [7])]
    one = collate(examples, Slot([0, 1], 0, 0, 0, 1, (2,)), "causal-lm", 0).bounds
    assert one is not None
    assert (one.starts.tolist(), one.longest) == ([0, 3, 4], 3)
    none = collate([], Slot([], 0, 0, 0, 1, ()), "causal-lm", 0, pad_to_multiple_of=8).bounds
    assert none is not None
    assert (none.starts.tolist(), none.longest) == ([0, 2, 8], 6)
    assert collate(examples, Slot([0, 1], 0, 0, 0, 1), "causal-lm", 0).bounds is None


def test_bounds_of_positions_alone() -> None:
    micro = packed()
    found = bounds_of(micro.tensors)
    assert found is not None
    assert found.starts.tolist() == [*STARTS[:-1], *range(44, 53)]
    assert bounds_of({"input_ids": micro.tensors["input_ids"]}) is None


def test_they_are_copied_with_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    micro = packed()
    there = micro.to("meta")
    assert there.bounds is not None
    assert there.bounds.starts.device.type == "meta"
    assert there.bounds.longest == 12
    assert any(one is there.bounds.starts for one in there.every_tensor())
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    micro.pin_memory()
    assert len(pinned) == 4


# ---------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_masks(name: str, kernel: Kernel) -> None:
    micro = packed()
    loss, gradients = computed(model_of(MODELS[name], VARLEN_ON_GPU), micro)
    right, right_gradients = computed(model_of(MODELS[name], "sdpa"), micro)
    # float64, but for norms and rotations, which some models compute in float32.
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, right_gradients, rtol=1e-4, atol=1e-5)
    layers = model_of(MODELS[name], "sdpa").config.num_hidden_layers
    assert len(kernel.calls) == layers
    heads = {(call["shapes"][0][0], call["longest"]) for call in kernel.calls}
    assert heads == {(52, (12, 12))}
    assert all(call["starts"] is call["starts_k"] is micro.bounds.starts for call in kernel.calls)


def test_a_window_counts_the_token_itself(kernel: Kernel) -> None:
    computed(model_of(MODELS["mistral"], VARLEN_ON_GPU), packed())
    assert {call["window_size"] for call in kernel.calls} == {(4, 0)}
    kernel.calls.clear()
    computed(model_of(MODELS["llama"], VARLEN_ON_GPU), packed())
    assert {call["window_size"] for call in kernel.calls} == {(-1, 0)}


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_blocks_get_the_same(kind: Any, kernel: Kernel) -> None:
    micro = packed()
    right = computed(model_of(MODELS["llama"], "sdpa"), micro)[1]
    model = model_of(MODELS["llama"], VARLEN_ON_GPU).train()
    blocks = [(name, module) for name, module in model.named_modules() if type(module).__name__ == "LlamaDecoderLayer"]
    checkpoint_blocks(blocks, kind)
    torch.testing.assert_close(computed(model, micro)[1], right, rtol=1e-4, atol=1e-5)
    assert recomputed_calls(blocks) == [2, 2]
    assert len(kernel.calls) == 4
    assert all(call["starts"] is micro.bounds.starts and call["longest"] == (12, 12) for call in kernel.calls)


def test_padded_rows_are_one_sample_each(kernel: Kernel) -> None:
    """As in an evaluation."""
    examples = [Example([4, 5, 6, 7], [4, 5, 6, 7]), Example([7, 8], [7, 8])]
    micro = collate(examples, Slot([0, 1], 0, 0, 0, 1), "causal-lm", 0)
    found, right = (computed(model_of(MODELS["llama"], name), micro)[0] for name in (VARLEN_ON_GPU, "sdpa"))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)
    assert kernel.calls[0]["starts"].tolist() == [0, 4, 8]
    assert (kernel.calls[0]["starts"].dtype, kernel.calls[0]["longest"]) == (torch.int32, (4, 4))


def test_packed_rows_without_bounds_are_no_samples(kernel: Kernel) -> None:
    with pytest.raises(RunFailed, match="not known where the samples of packed rows begin"):
        computed(model_of(MODELS["llama"], VARLEN_ON_GPU), replace(packed(), bounds=None))


def test_under_autocast_all_three_have_its_dtype(kernel: Kernel) -> None:
    """Rotary tables are float32 there, the products are not."""
    model = model_of(MODELS["llama"], VARLEN_ON_GPU).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed(model, packed())
    assert {call["dtype"] for call in kernel.calls} == {torch.bfloat16}


@every_case(
    ("options", "error"),
    [
        ({"dropout": 0.1}, "has no dropout on a GPU, but this model has 0.1; use sdpa"),
        ({"softcap": 5.0}, "this model's attention has softcap; use eager"),
        ({"s_aux": 1.0}, "this model's attention has s_aux; use eager"),
        ({"is_causal": False}, "an attention of this model is not causal; use sdpa"),
        ({"dtype": torch.float32}, r"takes bf16 or fp16, .*torch\.float32, 8 and 8; use sdpa"),
        ({"cu_seq_lens_q": None, "device": "meta"}, "does not hand the arguments of its forward to its attention"),
    ],
)
def test_refused_where_the_model_shows_it(options: dict[str, Any], error: str) -> None:
    options = dict(options)
    dtype, device = options.pop("dtype", torch.bfloat16), options.pop("device", "cpu")
    one = torch.zeros(1, 2, 6, 8, dtype=dtype, device=device)
    given = {"cu_seq_lens_q": torch.tensor([0, 6], dtype=torch.int32), "max_length_q": 6} | options
    with pytest.raises(InputError, match=rf"model\.attention: varlen.*{error}"):
        gpu_kernel.attention_on_gpu(torch.nn.Module(), one, one, one, None, **given)


# ---------------------------------------------------------------------- what a recipe says


def recipe(root: Path, **sections: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "model": {"attention": "varlen"},
        "data": {"packing": True},
        "precision": "bf16",
        "strategy": {"name": "single"},
        "machine": {"device": "cuda", "processes": 1},
    }
    values = recipe_dict(root, **own)
    for key, value in sections.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    return values


@every_case(
    ("sections", "reason"),
    [
        ({"precision": "fp32"}, "requires 16 bits on a GPU, but precision is fp32; use precision: bf16, or fp16"),
        ({"compile": True}, "which a compiled block cannot; use sdpa"),
        ({"model": {"config": MODELS["llama"] | {"attention_dropout": 0.1}}}, "model's attention_dropout is 0.1"),
        ({"model": {"config": MODELS["llama"] | {"head_dim": 12}}}, "heads of a multiple of 8 on a GPU, .* have 12"),
        ({"model": {"config": MODELS["llama"] | {"head_dim": 264}}}, "of 256 at most; this model's have 264; use sdpa"),
        ({"model": {"config": MODELS["llama"] | {"hidden_size": 40}}}, "this model's have 10; use sdpa"),
    ],
)
def test_refused_at_once(sections: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"r: model\.attention: varlen .*{reason}"):
        resolve(Recipe.model_validate(recipe(tmp_path, **sections)), "r")


def test_gpus_that_lack_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolved_from(recipe(tmp_path))
    monkeypatch.setattr(spec, "compute_capabilities", lambda: ((9, 0), (7, 5)))
    wanted = "varlen needs GPUs of compute capability 8.0 or newer .* this one has 7.5; use sdpa"
    with pytest.raises(InputError, match=wanted):
        check_machine(asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(InputError, match=wanted):
        prepare_model(asked)


def test_the_plain_loop_has_sdpa(tmp_path: Path) -> None:
    """Of each sample by itself; and so has the candidate in the pass that runs in float32."""
    asked = resolved_from(recipe(tmp_path))
    prepared: Any = prepare_model(asked).model
    assert prepared.config._attn_implementation == VARLEN_ON_GPU
    assert not masks_rows(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "to", lambda module, device: module)
        plain: Any = plain_model(asked)
    assert plain.config._attn_implementation == "sdpa"
    values = twin_recipe(asked, full_size=False)
    for name, attention in (("logic", "sdpa"), ("precision", "varlen")):
        case = make_case(values, asked, name, tmp_path / name)  # type: ignore[arg-type]
        assert case.resolved().recipe.model.attention == attention


def test_starts_do_not_decide_for_other_attentions() -> None:
    config = type("Config", (), {"_attn_implementation": "sdpa"})()
    bounds = Bounds(torch.tensor([0, 3], dtype=torch.int32), 3)
    assert bounds_arguments(config, {"input_ids": torch.zeros(1, 3)}, bounds) == {}
