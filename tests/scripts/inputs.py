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
