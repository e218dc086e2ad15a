"""The matrix that predictions of memory are held against: real training here, on the CPU, every storage counted.

``BUILT`` cells were looked at while the planner was written; ``HELD_OUT`` ones were first run when it was done. What
their first run corrected is in docs/measurements/plan.md.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from media import IMAGE_CLASSIFIERS, SEEING, WHISPER

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2000, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True, "num_hidden_layers": 6},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 5, "vocab_size": 1000},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1500, "n_positions": 512},
    "gemma3": LLAMA | {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 8, "sliding_window": 64,
                       "vocab_size": 1200},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                        "num_hidden_layers": 3, "intermediate_size": 256},
    "qwen3-moe": LLAMA | {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
                          "moe_intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 1000},
    # Its logits are several of the fused loss's chunks.
    "llama-wide": LLAMA | {"vocab_size": 20000, "num_hidden_layers": 2},
    "t5": {"model_type": "t5", "d_model": 128, "d_kv": 16, "d_ff": 256, "num_layers": 4, "num_decoder_layers": 3,
           "num_heads": 8, "vocab_size": 1000, "decoder_start_token_id": 0, "pad_token_id": 0},
    "bart": {"model_type": "bart", "d_model": 128, "encoder_layers": 2, "decoder_layers": 4, "encoder_ffn_dim": 256,
             "decoder_ffn_dim": 256, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 1100,
             "max_position_embeddings": 256, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
             "decoder_start_token_id": 2, "forced_eos_token_id": 2},
    "bert": {"model_type": "modernbert-decoder", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
             "num_attention_heads": 4, "vocab_size": 1000, "global_attn_every_n_layers": 2, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}  # fmt: skip


def _wide(config: dict[str, Any]) -> dict[str, Any]:
    """A tiny model that sees, wide and deep enough that its activations count."""
    config = copy.deepcopy(config)
    text, vision = config["text_config"], config["vision_config"]
    text |= {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 5, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 16}  # fmt: skip
    text.pop("layer_types", None)  # of two layers
    if "rope_parameters" in text:
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [4, 2, 2]}
    vision["depth" if "depth" in vision else "num_hidden_layers"] = 5
    wider = {"out_hidden_size": 128, "deepstack_visual_indexes": [1, 3], "fullatt_block_indexes": [2, 4]}
    vision |= {key: value for key, value in wider.items() if key in vision}
    return config


_EYES = {"image_size": 64, "patch_size": 8, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
_EARS = {"d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
TASKS = {
    **dict.fromkeys(SEEING, ("image-text-to-text", "messages")),
    "whisper": ("speech-seq2seq", "audio"),
    "vit": ("image-classification", "image"),
    **dict.fromkeys(("t5", "bart"), ("seq2seq-lm", "prompt-completion")),
}
"""Task and format of models that are not for text alone."""
MODELS |= {name if name != "gemma3" else "gemma3-vl": _wide(config) for name, config in SEEING.items()}
TASKS["gemma3-vl"] = TASKS.pop("gemma3")
MODELS |= {"whisper": WHISPER | _EARS, "vit": IMAGE_CLASSIFIERS["vit"] | _EYES}
LORA: dict[str, Any] = {"method": "lora", "r": 8, "alpha": 16.0, "dropout": 0.1, "target_modules": "all-linear"}
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
ON_EXPERTS = ATTENTION | {
    "dropout": 0.0,  # PEFT has none on experts
    "options": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}
BUCKET = 30_000
"""Elements of a ZeRO bucket in these cells: DeepSpeed's of 50 million would be ten times the model."""


@dataclass(frozen=True)
class Cell:
    model: str
    lora: bool
    strategy: str
    checkpointing: str
    length: int
    micro: int = 2
    accumulation: int = 2
    precision: str = "bf16"
    loss: str = "plain"
    packing: bool = False
    attention: str = "sdpa"
    offload: str = "none"
    optimizer: str = "adamw"
    kernel: str | None = None
    mesh: tuple[int, int] | None = None
    """strategy.mesh: replicate and shard; beside layers and experts their sizes, too."""
    sync: str = ""
    """``strategy.sync``; «once»: last, and weights stay gathered until then."""
    context: bool = False
    """Two processes divide the tokens of each row."""
    tensor: bool = False
    """Two processes divide every layer."""
    experts: bool = False
    """Two processes divide the experts of every layer."""
    adapted: bool = False
    """The adapters are on these experts too."""
    stages: int = 0
    """How many stages the blocks are divided into; under fsdp2 two processes shard each."""
    unsharded: int | None = None
    """Blocks whose frozen weights are whole on every process."""

    @property
    def processes(self) -> int:
        if self.mesh is not None:
            return self.mesh[0] * self.mesh[1] * (2 if self.experts or self.tensor else 1)
        if self.stages:
            return self.stages * (2 if self.strategy == "fsdp2" else 1)
        if self.tensor:
            return 4  # two that shard, or divide rows
        return 1 if self.strategy == "single" else 2

    @property
    def name(self) -> str:
        kind = "lora" if self.lora else "full"
        size = f"{self.micro}x{self.length}x{self.accumulation}"
        more = [self.loss] if self.loss != "plain" else []
        more += ["packed"] if self.packing else []
        more += [self.attention] if self.attention != "sdpa" else []
        more += [f"offload-{self.offload}"] if self.offload != "none" else []
        more += [self.optimizer] if self.optimizer != "adamw" else []
        more += [self.kernel] if self.kernel else []
        more += ["mesh-{}x{}".format(*self.mesh)] if self.mesh else []
        more += [f"sync-{self.sync}"] if self.sync else []
        more += ["parts"] if self.context else []
        more += ["layers"] if self.tensor else []
        more += ["experts"] if self.experts else []
        more += ["adapted"] if self.adapted else []
        more += [f"stages-{self.stages}"] if self.stages else []
        more += [f"unsharded-{self.unsharded}"] if self.unsharded else []
        return "-".join([self.model, kind, self.strategy, self.checkpointing, size, self.precision, *more])

    @property
    def task(self) -> str:
        return TASKS.get(self.model, ("causal-lm", "text"))[0]

    @property
    def format(self) -> str:
        return TASKS.get(self.model, ("causal-lm", "text"))[1]

    def recipe(self) -> dict[str, Any]:
        return {
            "model": {"config": MODELS[self.model], "attention": self.attention, "task": self.task}
            | ({"num_labels": 5} if self.task == "image-classification" else {}),
            "tokenizer": {"path": "none"},
            "data": {"train": "none", "max_length": self.length, "packing": self.packing, "format": self.format}
            | ({"eval": "none"} if self.optimizer == "schedule-free" else {}),
            "loss": self.loss,
            "batch": {"micro_size": self.micro, "accumulation": self.accumulation},
            "adapter": LORA | self._targets() if self.lora else None,
            "precision": self.precision,
            "optimizer": {"name": self.optimizer}
            | ({"kernel": self.kernel, "weight_decay": 0.1} if self.kernel else {}),
            "activation_checkpointing": self.checkpointing,
            "strategy": {"name": self.strategy, "offload": self.offload, "unsharded_blocks": self.unsharded}
            | ({"mesh": self._sizes()} if self.mesh else {})
            | ({"mesh": {"context": 2}} if self.context else {})
            | ({"mesh": {"tensor": 2} | (self._sizes() or {"shard": 2})} if self.tensor else {})
            | ({"mesh": {"context": 2, "tensor": 2}} if self.context and self.tensor else {})
            | ({"mesh": {"expert": 2} | self._sizes()} if self.experts else {})
            | ({"mesh": {"pipeline": self.stages, "shard": self.processes // self.stages}} if self.stages else {})
            | ({"sync": "last", "reshard_after_forward": self.sync == "last"} if self.sync else {}),
            "machine": {"device": "cpu", "processes": self.processes},
            "run": {"max_steps": 2, "save_every": 0, "eval_every": int(self.optimizer == "schedule-free")},
            **({"schedule": {"name": "constant"}} if self.optimizer == "schedule-free" else {}),
        }

    def _targets(self) -> dict[str, Any]:
        return ON_EXPERTS if self.adapted else ATTENTION if self.experts else {}

    def _sizes(self) -> dict[str, int]:
        return {"replicate": self.mesh[0], "shard": self.mesh[1]} if self.mesh else {}


STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
BUILT = [
    Cell("llama", lora, strategy, checkpointing, 128)
    for lora in (False, True)
    for strategy in STRATEGIES
    for checkpointing in ("none", "full", "selective")
]
BUILT += [
    *(Cell("llama-wide", lora, s, "full", 512, loss="fused") for lora in (False, True) for s in ("single", "zero2")),
    *(Cell("llama", lora, "single", kind, 256, packing=True) for lora in (False, True) for kind in ("none", "full")),
    *(Cell("t5", False, "single", kind, 96) for kind in ("none", "full", "selective")),
    *(Cell("t5", lora, s, "full", 96) for lora in (False, True) for s in ("ddp", "zero2", "fsdp2")),
    # Other optimizers, where the step is near the peak.
    *(Cell("llama", False, s, "full", 16, micro=1, optimizer="sgd") for s in ("single", "fsdp1", "zero3")),
    *(Cell("llama", False, s, "full", 16, micro=1, optimizer="lion") for s in STRATEGIES if s != "single"),
    *(Cell("llama", False, s, "full", 16, micro=1, optimizer="muon") for s in ("single", "ddp", "fsdp2")),
    *(Cell("llama", False, s, "full", 16, micro=1, optimizer="adafactor") for s in ("single", "ddp", "fsdp2")),
    # A kernel that copies all that it updates.
    *(Cell("llama", False, s, "full", 16, micro=1, kernel="foreach") for s in STRATEGIES),
    *(Cell("llama", False, s, "full", 16, micro=1, optimizer="sgd", kernel="foreach") for s in ("single", "fsdp2")),
]
HYBRID = [
    Cell("llama", lora, strategy, checkpointing, 128, mesh=(2, 2))
    for strategy in ("zero3", "fsdp1", "fsdp2")
    for lora, checkpointing in ((False, "none"), (False, "full"), (True, "full"))
]
HYBRID.append(Cell("llama", False, "fsdp2", "full", 16, accumulation=3, mesh=(2, 2)))
"""Parts and copies, on four processes."""
SYNCED = [
    Cell("llama", lora, strategy, checkpointing, length, accumulation=3, precision=precision, sync=sync)
    for sync in ("last", "once")
    for strategy, precision in (("fsdp2", "bf16"), ("fsdp2", "fp32"), ("fsdp1", "fp32"))
    for lora, checkpointing, length in ((False, "none", 128), (False, "full", 16), (True, "full", 128))
    if (strategy, sync) != ("fsdp1", "once")
]
"""Gradients summed after the last micro-batch of a step."""
DIVIDED = [
    *(Cell("llama", lora, s, kind, 256, context=True) for s, lora, kind in (
        ("ddp", True, "none"), ("ddp", False, "full"), ("zero2", False, "none"), ("zero3", True, "full"),
        ("fsdp1", False, "none"), ("fsdp2", False, "full"), ("fsdp2", True, "none"), ("fsdp2", False, "selective"))),
    Cell("llama", False, "fsdp2", "none", 256, packing=True, context=True),
    Cell("llama-wide", False, "zero2", "full", 512, loss="fused", context=True),
    Cell("qwen3", True, "fsdp2", "full", 512, micro=1, precision="fp32", context=True),
    Cell("gemma3", False, "zero3", "none", 256, context=True),
]  # fmt: skip
"""Rows whose tokens two processes divide."""
LAYERED = [
    Cell("llama", False, "fsdp2", "none", 256, tensor=True),
    Cell("llama", True, "fsdp2", "full", 256, tensor=True),
    Cell("qwen3", True, "fsdp2", "none", 512, micro=1, precision="fp32", tensor=True),
    Cell("llama", True, "fsdp2", "none", 256, mesh=(1, 1), tensor=True),
    Cell("llama", False, "fsdp2", "full", 256, mesh=(1, 1), tensor=True),
    Cell("llama", False, "fsdp2", "selective", 256, mesh=(1, 1), tensor=True),
    Cell("llama", False, "fsdp2", "none", 256, packing=True, mesh=(1, 1), tensor=True),
    Cell("qwen3", False, "fsdp2", "full", 16, micro=1, accumulation=3, precision="fp32", mesh=(1, 1), tensor=True),
    Cell("llama", False, "fsdp2", "full", 256, context=True, tensor=True),
    Cell("llama-wide", True, "fsdp2", "none", 128, loss="fused", precision="fp32", context=True, tensor=True),
]
"""Layers whose matrices two processes divide; two such groups shard them, or divide rows, where no mesh is given."""
EXPERTS = [
    Cell("mixtral", False, "fsdp2", "none", 256, experts=True),
    Cell("mixtral", False, "fsdp2", "full", 256, mesh=(1, 2), experts=True),
    Cell("mixtral", True, "fsdp2", "full", 256, mesh=(1, 2), experts=True),
    Cell("qwen3-moe", False, "fsdp2", "full", 128, precision="fp32", experts=True),
    Cell("mixtral", False, "fsdp2", "full", 64, accumulation=3, mesh=(2, 1), experts=True),
    Cell("qwen3-moe", False, "fsdp2", "selective", 48, accumulation=3, mesh=(2, 1), experts=True),
    Cell("mixtral", True, "fsdp2", "full", 128, experts=True, adapted=True),
]
"""Experts over two ranks, each of which is chosen as often."""
EXPERTS_HELD_OUT = [
    Cell("qwen3-moe", False, "fsdp2", "none", 192, mesh=(1, 2), experts=True),
    Cell("mixtral", False, "fsdp2", "full", 96, precision="bf16-pure", mesh=(1, 2), experts=True),
    Cell("mixtral", True, "fsdp2", "selective", 320, micro=1, experts=True),
    Cell("qwen3-moe", True, "fsdp2", "none", 96, mesh=(1, 2), experts=True, adapted=True),
]
"""First run when the others were done."""
UNSHARDED = [
    Cell("llama", True, s, kind, 32, precision=precision, unsharded=blocks)
    for s in ("fsdp2", "fsdp1")
    for kind, precision, blocks in (("none", "bf16", 2), ("full", "fp32", 4))
]
"""Frozen weights of some blocks whole on every process, where weights are most of what there is."""
UNSHARDED_HELD_OUT = [
    Cell("llama-tied", True, "fsdp2", "selective", 24, precision="fp32", unsharded=3),
    Cell("qwen3", True, "fsdp2", "full", 16, accumulation=3, sync="once", unsharded=4),
    Cell("gemma3", True, "fsdp1", "full", 24, micro=1, precision="fp32", unsharded=5),
    Cell("qwen3", True, "fsdp1", "none", 24, micro=1, precision="fp32", unsharded=1),
    Cell("llama", True, "fsdp2", "none", 16, precision="fp32", mesh=(2, 2), unsharded=3),
    Cell("qwen3", True, "fsdp2", "selective", 16, unsharded=2),
]
"""First run when the others were done."""
STAGED = [
    *(Cell("llama", lora, "ddp", kind, 256, accumulation=4, stages=2) for lora, kind in (
        (False, "none"), (False, "full"), (False, "selective"), (True, "none"), (True, "full"))),
    *(Cell("qwen3", lora, "ddp", kind, 192, accumulation=accumulation, stages=4) for lora, kind, accumulation in (
        (False, "none", 6), (False, "none", 2), (True, "full", 8), (False, "full", 3))),
    *(Cell("llama", lora, "fsdp2", kind, 256, accumulation=4, stages=2) for lora, kind in (
        (False, "none"), (False, "full"), (True, "none"), (True, "selective"))),
    Cell("llama", False, "ddp", "none", 16, micro=1, accumulation=4, stages=2),
    Cell("llama", False, "fsdp2", "none", 16, micro=1, accumulation=4, stages=2),
    Cell("llama-tied", False, "ddp", "none", 128, accumulation=3, stages=2),
    Cell("llama-tied", True, "ddp", "full", 128, accumulation=1, stages=4),
    Cell("llama-tied", False, "fsdp2", "full", 64, accumulation=3, stages=2),
    Cell("llama-wide", False, "ddp", "none", 300, micro=1, accumulation=3, loss="fused", stages=2),
    Cell("qwen3", False, "ddp", "none", 256, accumulation=4, precision="fp32", stages=2),
    Cell("qwen3", False, "fsdp2", "none", 256, accumulation=4, packing=True, stages=2),
    Cell("llama", False, "ddp", "none", 128, accumulation=4, precision="bf16-pure", stages=2),
]  # fmt: skip
"""Blocks over stages, with several micro-batches on their way; under fsdp2 two processes shard each stage."""
STAGED_HELD_OUT = [
    Cell("gemma3", False, "ddp", "none", 160, accumulation=5, stages=2),
    Cell("gemma3", True, "ddp", "full", 256, micro=1, accumulation=6, stages=4),
    Cell("gemma3", False, "fsdp2", "selective", 128, micro=1, accumulation=3, stages=2),
    Cell("llama", True, "ddp", "selective", 320, micro=1, accumulation=7, stages=4),
    Cell("llama", False, "fsdp2", "none", 64, micro=4, accumulation=2, precision="fp32", stages=2),
    Cell("llama", False, "ddp", "full", 96, micro=3, accumulation=1, stages=2),
    Cell("llama-tied", False, "ddp", "selective", 192, accumulation=6, stages=4),
    Cell("llama-tied", True, "fsdp2", "none", 128, accumulation=4, stages=2),
    Cell("qwen3", True, "ddp", "none", 224, accumulation=4, packing=True, precision="fp32", stages=4),
    Cell("qwen3", False, "ddp", "full", 384, micro=1, accumulation=5, loss="fused", stages=4),
    Cell("llama-wide", True, "ddp", "none", 256, accumulation=3, loss="fused", stages=2),
    Cell("llama", False, "ddp", "none", 12, micro=1, accumulation=6, optimizer="lion", stages=4),
    Cell("mixtral", False, "ddp", "none", 192, accumulation=4, stages=2),
]
"""First run when the others were done; none of these was looked at before."""
AVERAGED = [Cell("llama", False, s, "full", 16, micro=1, accumulation=1, optimizer="schedule-free") for s in STRATEGIES]
"""Evaluations at an optimizer's average, which are the peak where a micro-batch is small."""
_SEE = ("qwen3_vl", "qwen2_5_vl", "gemma3-vl", "smolvlm", "llava", "internvl")
MEDIA = [
    *(Cell(name, lora, "single", kind, 128) for name in _SEE for lora in (False, True) for kind in ("none", "full")),
    *(Cell(name, True, s, "full", 128) for name in _SEE[:2] for s in STRATEGIES if s != "single"),
    *(Cell(name, False, s, "none", 96, micro=3) for name in _SEE[2:] for s in ("zero2", "fsdp2")),
    *(Cell("qwen3_vl", False, s, "full", 192, micro=1) for s in ("ddp", "zero3", "fsdp1")),
    *(
        Cell("whisper", lora, s, "none", 40)
        for lora in (False, True)
        for s in STRATEGIES
        if s != "fsdp1"  # refused: a frozen model with tied weights
    ),
    *(Cell("vit", lora, s, "full", 2, micro=8) for lora in (False, True) for s in STRATEGIES),
]
"""An image in each row; models of images or sound alone."""
HELD_OUT = [
    *(Cell("qwen3", False, s, "none", 256, micro=1) for s in STRATEGIES),
    *(Cell("qwen3", True, s, "full", 192, micro=3) for s in STRATEGIES),
    *(Cell("gpt2", False, s, "full", 96, micro=4, accumulation=1) for s in STRATEGIES),
    *(Cell("gpt2", True, s, "none", 256) for s in STRATEGIES),
    *(Cell("llama-tied", False, s, "selective", 64, micro=8, accumulation=1) for s in STRATEGIES),
    *(Cell("gemma3", True, s, "none", 160) for s in STRATEGIES),
    *(Cell("gemma3", False, s, "full", 512, micro=1) for s in STRATEGIES),
    *(Cell("mixtral", False, s, "none", 128) for s in ("single", "ddp", "zero2", "fsdp2")),
    *(Cell("llama", True, s, "none", 256, precision="fp32") for s in STRATEGIES),
    *(
        Cell("llama", False, s, "none", 128, precision="bf16-pure")
        for s in ("single", "ddp", "zero2", "zero3", "fsdp2")
    ),
    *(Cell("llama-wide", False, s, "none", 300, micro=3, loss="fused") for s in STRATEGIES),
    *(
        Cell("llama-tied", True, s, "selective", 256, micro=1, loss="fused")
        for s in ("single", "ddp", "zero3", "fsdp2")
    ),
    Cell("llama-wide", True, "single", "full", 512, loss="fused", precision="fp32"),
    Cell("gpt2", False, "single", "none", 128, micro=4, loss="fused"),
    *(Cell("qwen3", True, s, "none", 320, packing=True) for s in STRATEGIES),
    *(Cell("gemma3", False, s, "selective", 256, micro=1, packing=True) for s in ("single", "zero2", "fsdp2")),
    *(Cell("llama", False, s, "none", 256, packing=True, attention="eager") for s in ("single", "fsdp1")),
    *(Cell("qwen3", False, s, "full", 384, loss="fused", packing=True) for s in ("single", "zero1", "zero3", "fsdp2")),
    # First run when the two before had corrected what is in docs/measurements/plan.md.
    *(
        Cell("llama-tied", True, s, "none", 192, loss="fused", packing=True)
        for s in ("zero2", "zero3", "fsdp1", "fsdp2")
    ),
    *(Cell("gpt2", False, "zero2", kind, 160) for kind in ("none", "selective")),
    Cell("gpt2", False, "zero3", "none", 160, micro=3, loss="fused"),
    *(Cell("t5", False, s, "none", 64, micro=3) for s in STRATEGIES),
    *(Cell("t5", True, s, "selective", 128, accumulation=1) for s in STRATEGIES if not s.startswith("fsdp")),
    Cell("t5", True, "fsdp2", "full", 128, accumulation=1),
    *(Cell("bart", False, s, "full", 160, micro=1) for s in STRATEGIES),
    *(Cell("bart", True, s, "none", 96) for s in ("single", "zero2", "zero3", "fsdp1")),
    *(Cell("llama", lora, s, "full", 128, precision="fp16") for lora in (False, True) for s in ("ddp", "fsdp2")),
    # Few tokens, so that the peak is where gradients are reduced; first run when FSDP's reductions had been corrected.
    *(Cell("llama", lora, s, "none", 16, micro=1) for lora in (False, True) for s in STRATEGIES),
    *(Cell("qwen3", False, s, "full", 16, micro=1, precision="fp32") for s in STRATEGIES),
    *(Cell("gemma3", False, s, "none", 8, micro=1, accumulation=1) for s in STRATEGIES),
    # First run when what these showed had been corrected.
    *(Cell("gpt2", lora, s, "none", 12, micro=1) for lora in (False, True) for s in STRATEGIES),
    *(Cell("llama-tied", False, s, "full", 12, micro=1, precision="bf16-pure") for s in STRATEGIES if s != "zero1"),
    *(Cell("qwen3", True, s, "full", 12, micro=1, precision="fp32") for s in STRATEGIES),
    *(Cell("t5", False, s, "none", 12, micro=1) for s in STRATEGIES),
    *(Cell("mixtral", False, s, "none", 12, micro=1) for s in ("single", "ddp", "zero2", "fsdp2")),
    # On a CPU host and device are one memory: what is measured is their sum.
    *(
        Cell("qwen3", lora, s, "none", 96, offload="optimizer", precision=precision)
        for lora in (False, True)
        for s in ("zero1", "zero2", "zero3")
        for precision in ("bf16", "fp32")
    ),
    *(
        Cell("llama", lora, s, "full", 24, accumulation=1, offload="optimizer")
        for lora in (False, True)
        for s in ("zero1", "zero2", "zero3")
    ),
    *(Cell("gpt2", lora, "zero3", "none", 64, offload="all") for lora in (False, True)),
]
