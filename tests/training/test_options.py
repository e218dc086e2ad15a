"""Options of training: frozen parameters, label smoothing, z-loss, noise on embeddings."""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from families import FAMILIES
from jobs import resolved_from
from media import WHISPER
from tiny import LLAMA, make_llama, recipe_dict
from toolkit.data.collate import MicroBatch
from toolkit.errors import InputError
from toolkit.model.freezing import Frozen, freeze_matching
from toolkit.model.head_loss import linear_cross_entropy, multiplied_by
from toolkit.model.loss_terms import CHUNK_BYTES, LossTerms
from toolkit.options.neftune.apply import calls, noise_scale
from toolkit.options.neftune.reference import PlainNoise
from toolkit.planning.skeleton import build
from toolkit.recipe.shared_weights import why_not_in_units
from toolkit.reference.extras import Extras
from toolkit.reference.loop import PlainLoop
from toolkit.reference.model import plain_decayed, plain_model
from toolkit.strategies.engines.fsdp1 import _trained_twice
from toolkit.training import checkpoint, session
from toolkit.training.export import export
from toolkit.training.loop import Progress, evaluate
from toolkit.training.loss import loss_sum
from toolkit.training.preparation import prepare_model
from toolkit.training.session import open_session, seed_micro_batch

TERMS = [LossTerms(), LossTerms(0.1), LossTerms(0.0, 1e-2), LossTerms(0.2, 1e-2)]


def single(root: Path, **sections: Any) -> dict[str, Any]:
    return recipe_dict(root, strategy={"name": "single"}, machine={"processes": 1}, **sections)


# ---------------------------------------------------------------------------------------------------- model.freeze


def test_patterns_freeze_what_they_match_and_are_counted() -> None:
    model, _ = make_llama()
    found = freeze_matching(model, ["embed_tokens", r"layers\.0\.", "layers.0.mlp"], "recipe.yaml")
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if "embed_tokens" in n or n.startswith("model.layers.0.")}
    assert found[0] == Frozen("embed_tokens", 1, 300 * 32)
    assert found[1].tensors == 9
    assert found[2] == Frozen("layers.0.mlp", 0, 0)  # they are the second pattern's already


@every_case(
    ("patterns", "message"),
    [
        (["embed", "nonsense"], r"model\.freeze\[1\]: 'nonsense' matches no parameter \(the names are like 'model"),
        (["."], r"model\.freeze: the patterns match all 21 trainable parameters"),
    ],
)
def test_patterns_without_a_use_are_errors(patterns: list[str], message: str) -> None:
    model, _ = make_llama()
    with pytest.raises(InputError, match=message):
        freeze_matching(model, patterns, "recipe.yaml")
    assert all(p.requires_grad for p in model.parameters()), "nothing is half done"


def test_a_tied_weight_is_frozen_by_its_first_name_alone(tiny_root: Path) -> None:
    resolved = resolved_from(single(tiny_root, model={"config": LLAMA | {"tie_word_embeddings": True},
                                                      "freeze": ["lm_head"]}))  # fmt: skip
    with pytest.raises(InputError, match=r"freeze\[0\]: 'lm_head' matches lm_head.weight, which is the same weight as"):
        prepare_model(resolved)


def test_what_an_adapter_leaves_frozen_is_not_frozen_again(tiny_root: Path) -> None:
    adapter = {"r": 2, "modules_to_save": ["lm_head"]}
    with pytest.raises(InputError, match=r"freeze\[0\]: 'embed_tokens' matches only parameters that are not trained"):
        prepare_model(resolved_from(single(tiny_root, adapter=adapter, model={"freeze": ["embed_tokens"]})))
    prepared = prepare_model(resolved_from(single(tiny_root, adapter=adapter, model={"freeze": ["lora_A", "lm_head"]})))
    assert [frozen.tensors for frozen in prepared.frozen] == [14, 1]
    assert all("lora_B" in name for name in prepared.trainable())


def test_a_broken_pattern_is_an_error_of_its_key(tiny_root: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.freeze\.0\n.*is not a regular expression"):
        resolved_from(single(tiny_root, model={"freeze": ["layers.(0"]}))


def test_plan_counts_frozen_blocks_as_frozen(tiny_root: Path) -> None:
    """Patterns name layers of the whole model: before blocks are left out."""
    config = LLAMA | {"num_hidden_layers": 6}
    resolved = resolved_from(single(tiny_root, model={"config": config, "freeze": [r"layers\.[0-3]\.", "embed"]}))
    holdings = build(resolved).holdings
    model = prepare_model(resolved).model
    assert holdings.elements(True) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert holdings.elements(False) == sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert holdings.order == [0, 1, 1, 1, 2, 3]  # the first, frozen ones, the first that trains, one behind it


def test_an_export_has_one_dtype(tiny_root: Path, tmp_path: Path) -> None:
    resolved = resolved_from(single(tiny_root, precision="bf16", model={"freeze": ["layers.0"]}))
    session = open_session(resolved)
    kept = {p.dtype for p in session.engine.model.parameters() if not p.requires_grad}
    assert kept == {torch.bfloat16}
    checkpoint.save(session, tmp_path / "run/checkpoints", Progress(1, 1))
    export(tmp_path / "run", tmp_path / "out")
    assert "| trained | full; frozen: names that match 'layers.0' |" in (tmp_path / "out/README.md").read_text()
    from safetensors.torch import load_file

    assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {torch.float32}


# ------------------------------------------------------------------------------------- label_smoothing and z_loss


def exact(logits: torch.Tensor, targets: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """The definition in float64: cross-entropy with smoothed labels, and squared logarithms of the denominators."""
    kept = targets != -100
    logits, targets = logits.double()[kept], targets[kept]
    classes = logits.shape[-1]
    labels = torch.full_like(logits, terms.smoothing / classes)
    labels[range(len(targets)), targets] += 1 - terms.smoothing
    return -(labels * logits.log_softmax(-1)).sum() + terms.z_loss * logits.exp().sum(-1).log().pow(2).sum()


def drawn(seed: int = 0) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(shape, generator=draw) for shape in ((33, 16), (50, 16), (50,)))
    targets = torch.randint(0, 50, (33,), generator=draw)
    targets[::5] = -100
    return hidden, weight, bias, targets


# Sums of 50 and 33 float32 numbers round a few times, each by 1.2e-7.
ROUNDING = 1e-6


@every_case("terms", TERMS)
def test_the_fused_loss_is_its_definition(terms: LossTerms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 50 * 7)  # several chunks
    hidden, weight, bias, targets = drawn()
    ours = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    right = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    factor = torch.tensor(0.3)
    with multiplied_by(factor):
        loss = linear_cross_entropy(*ours, targets, terms)
    (loss * factor).backward()
    expected = exact(right[0] @ right[1].T + right[2], targets, terms)
    (expected * 0.3).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=ROUNDING)
    for one, other in zip(ours, right, strict=True):
        assert one.grad is not None
        assert (one.grad - other.grad).norm() < ROUNDING * other.grad.norm()  # type: ignore[union-attr,operator]


@every_case("terms", TERMS)
def test_training_and_the_plain_loop_have_the_definition_each(terms: LossTerms, tiny_root: Path) -> None:
    resolved = resolved_from(single(tiny_root, label_smoothing=terms.smoothing, z_loss=terms.z_loss))
    assert LossTerms.of(resolved.recipe) == terms
    model = prepare_model(resolved).model.eval()
    tensors = {
        "input_ids": torch.tensor([[5, 9, 7, 3], [4, 8, 0, 0]]),
        "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]]),
        "labels": torch.tensor([[-100, 9, 7, 3], [4, 8, -100, -100]]),
    }
    logits = model(**{k: v for k, v in tensors.items() if k != "labels"}).logits
    right = exact(logits[:, :-1].flatten(0, 1), tensors["labels"][:, 1:].flatten(), terms).item()
    ours = loss_sum(model, model.config, tensors, "causal-lm", terms).item()
    assert ours == pytest.approx(right, rel=ROUNDING)
    loop = PlainLoop(model, resolved, plain_decayed(model, resolved), lambda *place: None)
    micro = MicroBatch(tensors, [0, 1], 4, 0, 0, 0, 1)
    assert loop.loss_sum(micro).item() == pytest.approx(right, rel=ROUNDING)
    if terms == TERMS[-1]:
        assert right > exact(logits[:, :-1].flatten(0, 1), tensors["labels"][:, 1:].flatten(), TERMS[0]).item() + 0.1


def test_held_out_losses_are_without_the_terms(tiny_root: Path) -> None:
    tensors = {"input_ids": torch.tensor([[5, 9, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64),
               "labels": torch.tensor([[5, 9, 7]])}  # fmt: skip
    losses = []
    for options in ({}, {"label_smoothing": 0.3, "z_loss": 0.1, "model": {"neftune_alpha": 5.0}}):
        session = open_session(resolved_from(single(tiny_root, **options)))
        losses.append(evaluate(session, [MicroBatch(tensors, [0], 2, 0, 0, 0, 1)]).loss)
    assert losses[0] == losses[1]


def test_held_out_losses_are_without_the_balance_of_experts(tiny_root: Path) -> None:
    """Of two runs with other coefficients the better one is that which predicts better."""
    sizes = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}  # fmt: skip
    tensors = {"input_ids": torch.tensor([[5, 9, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64),
               "labels": torch.tensor([[5, 9, 7]])}  # fmt: skip
    micro, held_out, trained = MicroBatch(tensors, [0], 2, 0, 0, 0, 1), [], []
    for asked in ({}, {"output_router_logits": True, "router_aux_loss_coef": 0.5}):
        session = open_session(resolved_from(single(tiny_root, model={"config": sizes | asked})))
        held_out.append(evaluate(session, [micro]).loss)
        trained.append(loss_sum(session.engine.model, session.engine.config, tensors, "causal-lm").item())
    assert held_out[0] == held_out[1]
    assert trained[1] > trained[0] + 0.5  # of 4 experts, two chosen: 0.5 times 2 or more, for each of 2 predictions


def test_a_z_loss_needs_tokens(tiny_root: Path) -> None:
    with pytest.raises(InputError, match=r"recipe.yaml: z_loss: is a mean over tokens, but sequence-classification"):
        resolved_from(single(tiny_root, z_loss=1e-4, model={"task": "sequence-classification", "num_labels": 3}))
    resolved_from(single(tiny_root, label_smoothing=0.1, model={"task": "sequence-classification", "num_labels": 3}))


# --------------------------------------------------------------------------------------------- model.neftune_alpha


def test_noise_is_scaled_by_each_samples_own_length() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    four, two = 5 / math.sqrt(4 * 16), 5 / math.sqrt(2 * 16)
    right = torch.tensor([[four] * 4, [two, two, 0, 0]])
    assert torch.equal(noise_scale({"attention_mask": mask}, 5.0, 16), right)
    packed = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1]])
    right = torch.tensor([[two, two, *[four] * 4], [*[four] * 4, two, two]])
    assert torch.equal(noise_scale({"position_ids": packed}, 5.0, 16), right)


def test_noise_is_a_function_of_the_place_in_the_run_and_off_in_evaluation(tiny_root: Path) -> None:
    resolved = resolved_from(single(tiny_root, model={"neftune_alpha": 5.0}))
    model: Any = prepare_model(resolved).model
    inputs = {"input_ids": torch.tensor([[5, 9, 7, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    seen: list[torch.Tensor] = []
    table = model.get_input_embeddings()
    table.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for place in ((3, 1, 0, 0), (3, 1, 0, 0), (3, 1, 0, 1), (3, 2, 0, 0)):
        seed_micro_batch(*place)
        model(**inputs)
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[3])
    assert calls(model) == 4
    noise = seen[0] - table.weight[inputs["input_ids"]].detach()
    bound = 5 / math.sqrt(4 * 32)
    assert 0.9 * bound < noise.abs().max() <= bound * (1 + 1e-6)
    assert noise.mean().abs() < 0.2 * bound
    model.eval()
    model(**inputs)
    assert calls(model) == 4
    assert torch.equal(seen[-1], table.weight[inputs["input_ids"]].detach())


def test_a_seed_is_that_of_torch_and_costs_no_formatted_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> list[str]:
        raise AssertionError("a stack was formatted")

    given: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(traceback, "format_stack", refuses)
        right = session._seed_generators
        patch.setattr(session, "_seed_generators", lambda value: (given.append(value), right(value)))
        seed_micro_batch(7, 3, 1, 0)
        found = torch.rand(8)
    torch.manual_seed(given[0])
    assert torch.equal(torch.rand(8), found)


def test_the_plain_loop_draws_the_same_noise_by_its_own_code(tiny_root: Path) -> None:
    resolved = resolved_from(single(tiny_root, model={"neftune_alpha": 5.0}))
    assert PlainNoise(5.0) in Extras.of(resolved.recipe).options
    ours, plain = prepare_model(resolved).model, plain_model(resolved)
    assert calls(plain) == 0
    tensors = {
        "input_ids": torch.tensor([[5, 9, 7], [4, 8, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "labels": torch.tensor([[5, 9, 7], [4, 8, -100]]),
    }
    micro = MicroBatch(tensors, [0, 1], 3, 0, 0, 0, 1)
    loop = PlainLoop(plain, resolved, plain_decayed(plain, resolved), seed_of(3))
    seed_micro_batch(3, 0, 0, 0)
    right = loss_sum(ours, ours.config, tensors, "causal-lm").item()
    assert loop.backward(0, [(0, micro)]) == [right]
    plain.eval()
    assert loop.loss_sum(micro).item() != right


def seed_of(seed: int) -> Any:
    return lambda step, micro, rank: seed_micro_batch(seed, step, micro, rank)


def test_noise_needs_one_sequence_of_tokens(tiny_root: Path) -> None:
    model = {"config": {"model_type": "t5"}, "task": "seq2seq-lm", "neftune_alpha": 5.0}
    with pytest.raises(InputError, match=r"model\.neftune_alpha: .* seq2seq-lm has other inputs; remove it"):
        resolved_from(single(tiny_root, model=model, data={"format": "prompt-completion"}))


# -------------------------------------------------- a weight that two layers share, beside frozen ones

TIED = LLAMA | {"tie_word_embeddings": True}
AUDIO = {"task": "speech-seq2seq"}


@every_case(
    ("model", "sections", "refused"),
    [
        pytest.param({"config": WHISPER} | AUDIO, {"data": {"format": "audio"}}, True, id="frozen by its own code"),
        pytest.param({"config": WHISPER | {"tie_word_embeddings": False}} | AUDIO, {"data": {"format": "audio"}}, False,
                     id="... and not shared"),
        pytest.param({"config": TIED, "freeze": [r"layers\.0\."]}, {}, True, id="frozen by the recipe"),
        pytest.param(FAMILIES["gpt2"] | {"freeze": [r"h\.0\."]}, {}, True, id="... in another family"),
        pytest.param({"config": TIED, "freeze": ["embed_tokens"]}, {}, False, id="frozen itself"),
        pytest.param({"config": LLAMA, "freeze": [r"layers\.0\."]}, {}, False, id="two weights"),
        pytest.param({"config": TIED}, {}, False, id="all trained"),
        pytest.param({"config": TIED}, {"adapter": {"method": "lora"}}, False, id="an adapter's base"),
    ],
)  # fmt: skip
def test_a_shared_weight_beside_frozen_ones_is_refused_before_it_is_loaded(
    model: dict[str, Any], sections: dict[str, Any], refused: bool, tiny_root: Path
) -> None:
    """fsdp1's engine says the same of the model, for whatever the files do not show."""
    recipe = recipe_dict(tiny_root, model=model, tokenizer={"path": str(tiny_root / "tokenizer")}, **sections)
    prepared = prepare_model(resolved_from(recipe | {"strategy": {"name": "ddp"}}))
    apart = any(not parameter.requires_grad for parameter in prepared.model.parameters())
    shared = _trained_twice(prepared.model) if apart else []
    assert bool(shared) == refused
    try:
        resolved_from(recipe | {"strategy": {"name": "fsdp1"}})
        told = None
    except InputError as error:
        told = str(error)
    assert told == (f"recipe.yaml: strategy.name: {why_not_in_units(shared)}" if refused else None)
    resolved_from(recipe | {"strategy": {"name": "fsdp2"}})
