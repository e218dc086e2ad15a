"""What the rules say is true of the installed packages.

Where a rule says «refused», they refuse its failing example and take the passing one. Where it says «in
silence», they accept the failing example and use another value.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from cases import every_case
from tests.lint import real_packages as real
from tests.lint.folder import put
from tests.lint.test_traps import accept
from toolkit.linting.examples import fsdp1, fsdp2, multi_gpu, zero
from toolkit.linting.model import Files
from toolkit.linting.registry import all_rules

pytestmark = pytest.mark.upstream
RULES = all_rules()
REFUSED = [
    "AC101", "AC103", "AC108", "AC109", "AC111", "AC114", "AC115", "AC116", "AU302", "DS102", "DS104", "DS105",
    "DS107", "DS108", "DS201", "DS202", "DS203", "DS204", "DS205", "DS206", "DS207", "DS208", "DS217", "FA104",
    "FA107", "FS407", "FS411", "FS415", "FS416", "KY102", "LT507", "LT514", "TA102", "TA105", "TA106", "TA107",
    "TA108", "TA109", "TA110", "TA111", "XL204", "XL213", "XL214", "XL217",
]  # fmt: skip


@every_case("code", REFUSED)
def test_the_failing_example_is_refused_and_the_passing_one_taken(code: str) -> None:
    put(RULES[code].fails)
    with pytest.raises((ValueError, TypeError, AssertionError, KeyError, AttributeError, RuntimeError)) as caught:
        accept(RULES[code].fails)
    assert not isinstance(caught.value, FileNotFoundError)
    put(RULES[code].passes)
    accept(RULES[code].passes)


def env(files: Files) -> dict[str, str]:
    return real.launch_environment(put(files)[0])


def arguments(**values: Any) -> Any:
    return real.training_arguments({}, **values)


def alone(**config: Any) -> Any:
    return real.deepspeed_alone({"train_batch_size": 4, **config})


def shards_as_it_loads(variables: dict[str, str]) -> bool:
    """Whether a process with these variables makes transformers divide weights as they are loaded."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    with patch.dict(os.environ, variables):
        plugin = DeepSpeedPlugin()
        plugin.set_deepspeed_weakref()
    assert plugin.zero3_init_flag is False
    return is_deepspeed_zero3_enabled()


SILENT: list[tuple[str, Callable[[], Any], Any]] = [
    ("DS101", lambda: alone(gradient_cliping=0.5).gradient_clipping, 1.0),
    ("AU301", lambda: alone(bf16={"enabled": "auto"}).bfloat16_config.enabled, False),
    ("AU303", lambda: alone(gradient_clipping="auto").gradient_clipping, "auto"),
    ("AC102", lambda: real.deepspeed_plugin(env(zero("zero_stge: 3")))["zero_optimization"]["stage"], 2),
    ("AC104", lambda: "ACCELERATE_CPU_AFFINITY" in env(multi_gpu("enable_cpu_affinity: true")), False),
    ("AC105",
     lambda: real.deepspeed_plugin(env(RULES["AC105"].fails))["zero_optimization"]["offload_param"]["nvme_path"],
     "none"),
    ("AC106", lambda: env(RULES["AC106"].fails)["PARALLELISM_CONFIG_DP_SHARD_SIZE"], "1"),
    ("AC107", lambda: env(RULES["AC107"].fails)["FSDP_OFFLOAD_PARAMS"], "false"),
    ("FS401", lambda: real.fsdp_plugin(env(RULES["FS401"].fails)).auto_wrap_policy, None),
    ("FS402", lambda: real.fsdp_plugin(env(RULES["FS402"].fails)).fsdp_version, 1),
    ("FS403", lambda: real.fsdp_plugin(env(RULES["FS403"].fails)).state_dict_type.name, "SHARDED_STATE_DICT"),
    ("FS404", lambda: real.fsdp_plugin(env(RULES["FS404"].fails)).reshard_after_forward, True),
    ("FS405", lambda: real.fsdp_plugin(env(RULES["FS405"].fails)).sharding_strategy.name, "FULL_SHARD"),
    ("FS406", lambda: real.fsdp_plugin(env(fsdp2("fsdp_use_orig_params: false"))).use_orig_params, None),
    ("FS412", lambda: real.fsdp_plugin(env(RULES["FS412"].fails)).transformer_cls_names_to_wrap,
     ["LlamaDecoderLayer", " MistralDecoderLayer"]),
    ("SV701", lambda: real.deepspeed_plugin(env(zero("zero_stage: 3")))["zero_optimization"][_GATHER], False),
    ("SV704", lambda: env(zero("zero_stage: 2", "zero3_init_flag: true"))["ACCELERATE_DEEPSPEED_ZERO3_INIT"], "true"),
    ("MM607", lambda: shards_as_it_loads(env(RULES["MM607"].fails)), True),
    ("LT509", lambda: env(RULES["LT509"].fails).get("ACCELERATE_USE_FSDP"), None),
    ("FA101", lambda: real.training_arguments({}, fsdp_config={"version": 1}).fsdp_plugin_args, None),
    ("KY103", lambda: yaml.safe_load(RULES["KY103"].fails["args.yaml"])["learning_rate"], "2e-4"),
    ("TA104", lambda: bool(real.training_arguments({}, bf16="false").bf16), True),
    (
        "TA115",
        lambda: (
            real.training_arguments(
                {}, gradient_checkpointing=True, activation_checkpointing=False
            ).gradient_checkpointing
        ),
        False,
    ),
    ("FS407", lambda: real.fsdp_plugin(env(fsdp1("fsdp_sync_module_states: 'false'"))).sync_module_states, True),
]  # fmt: skip
_GATHER = "stage3_gather_16bit_weights_on_model_save"


@every_case(("code", "used", "value"), SILENT, ids=[case[0] for case in SILENT])
def test_accepted_in_silence(code: str, used: Callable[[], Any], value: Any) -> None:
    assert code in RULES
    assert used() == value


def test_auto_that_nobody_resolves() -> None:
    put(zero("deepspeed_config_file: ds.json", top=()) | RULES["AU304"].fails)
    with pytest.raises(ValueError, match="allgather_bucket_size"):
        real.deepspeed_plugin(real.launch_environment("accelerate.yaml"))


@every_case("code", ["XL203", "XL205", "XL207", "XL209"])
def test_the_trainer_refuses_what_differs(code: str) -> None:
    for files, differs in ((RULES[code].fails, True), (RULES[code].passes, False)):
        values = json.loads(files["args.json"]) | {"deepspeed": json.loads(files["ds.json"])}
        values.pop("output_dir")
        assert bool(real.trainer_deepspeed({}, **values).mismatches) == differs


def test_clipping_of_the_arguments_is_ignored() -> None:
    files = RULES["XL208"].fails
    values = json.loads(files["args.json"]) | {"deepspeed": json.loads(files["ds.json"])}
    values.pop("output_dir")
    stored = real.trainer_deepspeed({}, **values)
    assert stored.mismatches == []
    assert "gradient_clipping" not in stored.config


def test_optimizers_and_schedulers_of_deepspeed() -> None:
    import torch
    from deepspeed.runtime import config, lr_schedules

    from toolkit.linting.rules import deepspeed_optimizer as rules

    assert set(rules._OPTIMIZERS) == set(config.DEEPSPEED_OPTIMIZERS)
    torch_has = {
        n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    assert set(rules._TORCH_OPTIMIZERS) == torch_has - {"Optimizer"}
    assert set(rules._SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES)


def test_arguments_that_are_gone() -> None:
    from transformers import TrainingArguments

    from toolkit.linting.rules import arguments_keys as rules

    fields = TrainingArguments.__dataclass_fields__
    still = {key for key in rules._GONE if key in fields and fields[key].init}
    assert still <= {"fsdp_transformer_layer_cls_to_wrap"}, still
    assert all(new in fields for new, _ in rules._GONE.values() if new)
