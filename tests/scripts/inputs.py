"""Tiny random models and made data, under the names that other projects' scripts ask the hub for."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tiny import WORDS, make_tokenizer

CHAT = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
METRIC = '''
import datasets
import evaluate


class Made(evaluate.Metric):
    """Stands in for a metric of the hub; it is loaded and never shown."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": 0.0}
'''


def make_inputs(folder: Path) -> None:
    """Models and data sets, once."""
    if (folder / "made").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    _models(folder)
    _data(folder, random.Random(0))
    for name in ("glue", "accuracy", "rouge", "sacrebleu", "seqeval"):
        home = folder / "modules" / "evaluate_modules" / "metrics" / f"evaluate-metric--{name}" / ("0" * 64)
        home.mkdir(parents=True)
        (home / f"{name}.py").write_text(METRIC, encoding="utf-8")
        for parent in list(home.parents)[:4]:
            (parent / "__init__.py").touch()
        (home / "__init__.py").touch()
    (folder / "nltk" / "tokenizers" / "punkt").mkdir(parents=True)
    (folder / "nltk" / "tokenizers" / "punkt_tab").mkdir()
    _configs(folder)
    _tools(folder)
    (folder / "made").touch()


def _models(folder: Path) -> None:
    import torch
    import transformers as t

    make_tokenizer(folder / "tokenizer")
    tokenizer = t.AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.chat_template, tokenizer.model_max_length, tokenizer.mask_token = CHAT, 128, "<s>"
    narrow = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 300, "pad_token_id": 0, "eos_token_id": 2}
    made = {
        "llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**narrow, **ids, bos_token_id=1, num_key_value_heads=2, max_position_embeddings=512,
                          attention_dropout=0.1)
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, **ids)
        ),
        "bert-base-cased": lambda: t.BertForMaskedLM(t.BertConfig(**narrow, **ids, max_position_embeddings=512)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, decoder_start_token_id=0, **ids)
        ),
    }  # fmt: skip
    for name, make in made.items():
        torch.manual_seed(0)
        make().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _data(folder: Path, draw: random.Random) -> None:
    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    def rows(name: str, made: list[dict[str, object]], file: str = "train.jsonl") -> None:
        (folder / name).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in made)
        (folder / name / file).write_text(text, encoding="utf-8")

    count = range(96)
    (folder / "text.txt").write_text("\n".join(words(3, 24) for _ in range(400)), encoding="utf-8")
    pairs = [{"sentence1": words(3, 12), "sentence2": words(3, 12), "label": at % 2, "idx": at} for at in count]
    lines = ["sentence1,sentence2,label", *(f"{p['sentence1']},{p['sentence2']},{p['label']}" for p in pairs)]
    (folder / "pairs.csv").write_text("\n".join(lines), encoding="utf-8")
    glue = "nyu-mll/glue"
    rows(glue, pairs)
    rows(glue, pairs[:16], "validation.jsonl")
    (folder / glue / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - {split: train, path: train.jsonl}\n"
        "  - {split: validation, path: validation.jsonl}\n"
        "dataset_info:\n- config_name: mrpc\n  features:\n  - {name: sentence1, dtype: string}\n"
        "  - {name: sentence2, dtype: string}\n  - {name: label, dtype: {class_label: {names: {'0': a, '1': b}}}}\n"
        "  - {name: idx, dtype: int64}\n---\n",
        encoding="utf-8",
    )
    rows("summaries", [{"text": words(10, 30), "summary": words(3, 9)} for _ in count], "train.json")
    rows("translations", [{"translation": {"en": words(5, 20), "de": words(5, 20)}} for _ in count], "train.json")
    preferred = [
        {"prompt": said("user", words(3, 9)), "chosen": said("assistant", words(2, 12)),
         "rejected": said("assistant", words(2, 12))}
        for _ in count
    ]  # fmt: skip
    rows("preferences", preferred)
    rows("labelled", [{"prompt": words(3, 9), "completion": " " + words(2, 12), "label": at % 2 == 0} for at in count])
    rows("prompts", [{"prompt": words(3, 9), "completion": " " + words(2, 12)} for _ in count])
    rows("prompts_sft", [{"text": words(5, 20)} for _ in count])
    rows("prompts_sft", [{"text": words(5, 20)} for _ in range(8)], "test.jsonl")
    chats = [{"messages": said("user", words(3, 9)) + said("assistant", words(2, 14))} for _ in count]
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats), encoding="utf-8")
    alpaca = [{"instruction": words(3, 9), "input": "", "output": words(2, 30)} for _ in count]
    (folder / "alpaca.json").write_text(json.dumps(alpaca), encoding="utf-8")
    (folder / "data").mkdir(exist_ok=True)
    lines = [" ".join(draw.choices(WORDS, k=30)) for _ in range(6000)]
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines), encoding="utf-8")
    rows("tatsu-lab/alpaca", [{"instruction": words(3, 9), "input": "", "output": words(2, 30)} for _ in count])


def _configs(folder: Path) -> None:
    """What `accelerate config` and DeepSpeed's users write."""
    head = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, "machine_rank": 0,
            "main_training_function": "main", "use_cpu": False}  # fmt: skip
    shared = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
              "fsdp_cpu_ram_efficient_loading": False, "fsdp_activation_checkpointing": False}  # fmt: skip
    kinds: dict[str, dict[str, object]] = {
        "fsdp2": {"distributed_type": "FSDP",
                  "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, **shared}},
        "fsdp1": {"distributed_type": "FSDP",
                  "fsdp_config": {"fsdp_version": 1, "fsdp_reshard_after_forward": "FULL_SHARD",
                                  "fsdp_use_orig_params": True, "fsdp_sync_module_states": False, **shared}},
    }  # fmt: skip
    for stage in (2, 3):
        kinds[f"zero{stage}"] = {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": stage, "zero3_init_flag": False, "gradient_accumulation_steps": 2,
                                 "gradient_clipping": 1.0, "offload_optimizer_device": "none",
                                 "offload_param_device": "none"},
        }  # fmt: skip
    for name, kind in kinds.items():
        for precision in ("no", "bf16"):
            tail = "" if precision == "no" else "-bf16"
            text = json.dumps(head | kind | {"mixed_precision": precision})
            (folder / f"{name}{tail}.yaml").write_text(text, encoding="utf-8")
    config = {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }  # fmt: skip
    (folder / "deepspeed.json").write_text(json.dumps(config), encoding="utf-8")


AXOLOTL = """base_model: ./llama
datasets: [{path: ./tatsu-lab/alpaca, type: alpaca}]
val_set_size: 0
output_dir: ./out/axolotl
adapter: lora
sequence_len: 512
lora_r: 4
lora_alpha: 8
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 2
micro_batch_size: 2
max_steps: 4
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
bf16: false
attn_implementation: sdpa
special_tokens: {pad_token: "<pad>"}
# Kernels for CUDA, on by default
lora_mlp_kernel: false
lora_qkv_kernel: false
lora_o_kernel: false
lora_embedding_kernel: false
"""


def _tools(folder: Path) -> None:
    """Axolotl's configuration, litgpt's form of a model, and a SentencePiece tokenizer for torchtune."""
    import shutil

    import torch
    import yaml
    from transformers import LlamaForCausalLM

    (folder / "axolotl.yaml").write_text(AXOLOTL, encoding="utf-8")
    home = folder / "litgpt"
    shutil.copytree(folder / "tokenizer", home)
    model = LlamaForCausalLM.from_pretrained(folder / "llama").state_dict()
    kept = {_litgpt_name(name): value for name, value in model.items()}
    for at in range(2):
        parts = [kept.pop(f"transformer.h.{at}.attn.{part}.weight") for part in ("q", "k", "v")]
        kept[f"transformer.h.{at}.attn.qkv.weight"] = torch.cat(parts)
    torch.save(kept, home / "lit_model.pth")
    config = {
        "name": "tiny", "block_size": 512, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 2,
        "vocab_size": 300, "padded_vocab_size": 300, "intermediate_size": 128, "rotary_percentage": 1.0,
        "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
        "norm_eps": 1e-6,
    }  # fmt: skip
    (home / "model_config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        import sentencepiece
    except ImportError:
        return
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "spm"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )


def _litgpt_name(name: str) -> str:
    pairs = {
        "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
        "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "self_attn": "attn", "o_proj": "proj",
        "q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": "fc_1", "up_proj": "fc_2",
        "mlp.down_proj": "mlp.proj",
    }  # fmt: skip
    for theirs, litgpts in pairs.items():
        name = name.replace(theirs, litgpts)
    return name
