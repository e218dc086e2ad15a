"""Block classes are those of the model that a task's auto class makes of a config: no list of models says which."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

import model_types
from toolkit.recipe.model_blocks import block_classes
from toolkit.recipe.model_facts import ModelFacts
from toolkit.tasks import task_of
from toolkit.verification.cases.twin import twin_config

KINDS = {
    # A text model of a composite: `_no_split_modules` names its vision tower's block, which is not there.
    "causal-lm": ["qwen3_5_text", "qwen3_5_moe", "qwen3_5", "gemma4_text", "mistral", "data2vec-text", "internlm3",
                  "ctrl", "mllama", "jamba"],
    "sequence-classification": ["llama", "qwen3_5", "gpt2", "bert"],
    "image-text-to-text": ["blip-2", "paddleocr_vl", "shieldgemma2", "llava", "idefics"],
    "seq2seq-lm": ["t5", "bart", "t5gemma2"],
    "speech-seq2seq": ["whisper", "speech_to_text"],
    "image-classification": ["vit", "resnet", "swin"],
}  # fmt: skip
ONE_KIND = {"jamba": "JambaAttentionDecoderLayer", "mllama": "MllamaCrossAttentionDecoderLayer"}
"""Two layers are of one kind in these."""
NOT_FOLLOWED = {"idefics": {"IdeficsVisionEncoderLayer"}, "t5gemma2": {"SiglipEncoderLayer"}, "swin": {"SwinLayer"},
                "shieldgemma2": {"SiglipEncoderLayer", "Gemma3DecoderLayer"}}  # fmt: skip
"""Made by a class of another file, or inside of a block (Swin's stages)."""
NO_BLOCKS = {*NOT_FOLLOWED, "xlm", "flaubert", "pvt", "textnet", "perceiver"}
"""Attentions, norms and products in a list each, or lists that are filled beforehand: `strategy.wrap` names them."""
BY_CONFIG = "blip: BlipTextLayer|speech-encoder-decoder: Wav2Vec2|speecht5: SpeechT5LayerNormConvLayer"
"""Of a class in another file, or one of two that a switch of the config decides."""


def problems(kind: str, auto_class: str) -> list[str]:
    """What is wrong with the block classes of a model type; none where no small model can be made."""
    config, why = model_types.small_config(kind, auto_class)
    if why is not None:
        return []
    with torch.device("meta"):
        made = transformers.CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k != "model_type"})
        model = getattr(transformers, auto_class).from_config(made)
    names = set(block_classes(ModelFacts(config, None), auto_class))
    there = {type(module).__name__ for module in model.modules()}
    recomputed = {
        type(m).__name__ for m in model.modules() if type(m).__base__.__name__ == "GradientCheckpointingLayer"
    }
    lost = recomputed - names - NOT_FOLLOWED.get(kind, set())
    absent = names - there - {ONE_KIND.get(kind, "")}
    found = [f"{kind}: {', '.join(absent)} not in the model"] * bool(absent)
    found += [f"{kind}: {', '.join(lost)} not among {', '.join(names)}"] * bool(lost)
    repeated = any(isinstance(m, torch.nn.ModuleList) and len(m) > 1 for m in model.modules())
    return found + [f"{kind}: no blocks"] * (repeated and not names and kind not in NO_BLOCKS)


def test_blocks_are_classes_of_the_model_that_the_task_makes() -> None:
    found = [
        line for task, kinds in KINDS.items() for kind in kinds for line in problems(kind, task_of(task).auto_class)
    ]
    assert not found


def test_of_a_composite_the_task_decides_which_parts_there_are() -> None:
    config, _ = model_types.small_config("qwen3_5", "AutoModelForImageTextToText")
    facts = ModelFacts(config, None)
    assert block_classes(facts, "AutoModelForCausalLM") == ("Qwen3_5DecoderLayer",)
    assert set(block_classes(facts, "AutoModelForImageTextToText")) == {"Qwen3_5DecoderLayer", "Qwen3_5VisionBlock"}


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")  # some types' code looks for a compiler
@pytest.mark.parametrize("task", [*sorted(KINDS), "masked-lm", "token-classification"])
def test_blocks_of_every_model_type_of_transformers(task: str) -> None:
    auto_class = task_of(task).auto_class
    kinds = model_types.types_of(auto_class)
    assert len(kinds) > 10
    assert not [line for kind in kinds for line in problems(kind, auto_class) if not re.match(BY_CONFIG, line)]


NO_TWIN = {"dots3_note", "dots3_note_text", "zamba", "blt"}
"""Sizes that depend on one another in ways of their own, or tables by hashes of bytes."""


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
def test_a_small_twin_of_every_model_type_can_be_built() -> None:
    """GLM-DSA, DeepSeek V3.2, Gemma 4 and thirty others have lists by layer, or sizes that make one another, which the
    twin of their published config did not fit: `verify` ended in the config's own message."""
    found = []
    for kind in model_types.types_of("AutoModelForCausalLM"):
        try:
            config = transformers.CONFIG_MAPPING[kind]()
            with torch.device("meta"):
                transformers.AutoModelForCausalLM.from_config(config)
        except Exception:  # its defaults make no model, or need a package that is not here
            continue
        try:
            twin = transformers.CONFIG_MAPPING[kind].from_dict(twin_config(config.to_dict()))
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(twin)
            weights = sum(p.numel() for p in model.parameters())
            found += [f"{kind}: {weights} weights"] * (weights > 14e6)
        except Exception as error:
            found.append(f"{kind}: {error}")
    assert not [line for line in found if line.split(":")[0] not in NO_TWIN]


def test_a_twin_has_every_kind_of_layer_and_lists_as_long() -> None:
    config = {"model_type": "glm_moe_dsa", "hidden_size": 4096, "num_hidden_layers": 78, "num_attention_heads": 64,
              "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "vocab_size": 150000}  # fmt: skip
    twin = twin_config(config)
    assert (twin["num_hidden_layers"], twin["mlp_layer_types"]) == (4, ["dense"] * 3 + ["sparse"])
    shared = {"model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 10, "num_kv_shared_layers": 4,
              "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2, "vocab_size": 9000,
              "intermediate_size": [16384] * 10}  # fmt: skip
    twin = twin_config(shared)
    assert (twin["num_hidden_layers"], twin["num_kv_shared_layers"], len(twin["intermediate_size"])) == (10, 5, 10)
    state_space = {"model_type": "mamba2", "hidden_size": 4096, "expand": 2, "num_heads": 128, "head_dim": 64,
                   "num_hidden_layers": 64, "vocab_size": 9000}  # fmt: skip
    twin = twin_config(state_space)
    assert twin["num_heads"] * twin["head_dim"] == 2 * twin["hidden_size"]
