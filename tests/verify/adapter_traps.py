"""Adapters, checkpointing and sharding in the packages themselves: what the lint rules LR801, LR802 and FS409 say."""

from __future__ import annotations

from typing import Any

import torch
import upstream


def _adapted(dtype: torch.dtype = torch.float32) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(upstream._llama().to(dtype), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def _checkpointed(model: Any, reentrant: bool) -> None:
    model.train()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def adapters_with_a_gradient(reentrant: bool, inputs_require_grads: bool) -> int:
    """How many adapter tensors get a gradient through checkpoints of a frozen base."""
    model = _adapted()
    _checkpointed(model, reentrant)
    if not inputs_require_grads:
        model.base_model.model.disable_input_require_grads()
    tokens = upstream._tokens()
    loss = model(input_ids=tokens, labels=tokens).loss
    if loss.requires_grad:
        loss.backward()
    return sum(p.grad is not None for p in model.parameters() if p.requires_grad)


def zero3_backward(reentrant: bool) -> str:
    """What a backward of an adapter through checkpoints under ZeRO-3 ends with."""
    upstream._connect("deepspeed")
    model = _adapted()
    _checkpointed(model, reentrant)
    trained = [p for p in model.parameters() if p.requires_grad]
    # Weights of less than 1e5 elements would never be split.
    split = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = upstream._deepspeed(model, torch.optim.AdamW(trained), 3, zero_optimization=split)
    tokens = upstream._tokens()
    try:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    except Exception as error:
        return type(error).__name__
    return "done"


def fsdp_takes_16_bit_base(version: int) -> str:
    """What accelerate's FSDP says to a bf16 base with PEFT's fp32 adapters."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    upstream._connect("fsdp")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        use_orig_params=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    model = _adapted(torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    try:
        Accelerator(fsdp_plugin=plugin).prepare(model, optimizer)
    except ValueError as error:
        return str(error)
    return "done"


def all_linear_takes_the_head_of_a_token_classifier() -> str:
    """peft 0.21.2 leaves the head out for SEQ_CLS only, and then trains it whole beside its own adapter: the error."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForTokenClassification

    narrow = BertConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    try:
        get_peft_model(
            BertForTokenClassification(narrow), LoraConfig(task_type="TOKEN_CLS", target_modules="all-linear")
        )
    except TypeError as error:
        return str(error)
    return ""


def vera_multiplies_16_bits_by_32() -> str:
    """peft 0.21.2 keeps VeRA's frozen projections in float32 where a strategy casts the weights to 16 bits: the
    error."""
    from peft import VeraConfig, get_peft_model

    model = get_peft_model(upstream._llama(), VeraConfig(r=4, target_modules=["q_proj"]))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    try:
        model(input_ids=upstream._tokens())
    except RuntimeError as error:
        return str(error)
    return ""


def merging_takes_the_weight_of_a_head_of_layers() -> str:
    """What merging an adapter beside a trained classifier of several layers ends with (every method but LoRA's)."""
    from peft import HRAConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "electra", hidden_size=16, embedding_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32,
    )  # fmt: skip
    model: Any = AutoModelForSequenceClassification.from_config(config)
    adapter = HRAConfig(r=2, task_type="SEQ_CLS", target_modules=["query", "value"])
    try:
        get_peft_model(model, adapter).merge_and_unload()
    except AttributeError as error:
        return str(error)
    return "merged"


def prefix_of_falcon(**sizes: int) -> str:
    """What the first forward of prefix tuning ends with on a Falcon whose heads share one key; «done» otherwise.
    ``sizes``: of the keys and values in PEFT's config."""
    from peft import PrefixTuningConfig, get_peft_model
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    options: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    model = get_peft_model(FalconForCausalLM(config), PrefixTuningConfig(**options, **sizes))
    try:
        model(input_ids=torch.arange(3, 9)[None])
    except RuntimeError as error:
        return str(error)
    return "done"


def loading_renames_an_adapter(kind: str, folder: str) -> list[str]:
    """Names of adapter weights that PEFT does not find in the file that it has written: of Laguna's shared experts, of
    Inkling 2's short convolutions."""
    import warnings

    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    import model_types

    config = AutoConfig.for_model(**model_types.small_config(kind, "AutoModelForCausalLM")[0])

    def made() -> Any:
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    model = get_peft_model(made(), LoraConfig(target_modules="all-linear"))
    model.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(made(), folder)
    own, found = model.state_dict(), loaded.state_dict()
    return [name for name in own if "lora_A" in name and not own[name].equal(found[name])]


def loading_empties_the_padding_row(kind: str, folder: str) -> bool:
    """Whether ``from_pretrained`` makes the padding token's row of the embedding zero, which the file has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import model_types

    config = AutoConfig.for_model(**model_types.small_config(kind, "AutoModelForCausalLM")[0] | {"pad_token_id": 3})
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    return not loaded[3].any() and bool(loaded[4].all())
