"""The model of a script: what is loaded, in which dtype, on how many bits."""

from __future__ import annotations

import ast

from toolkit.importing.draft import Written
from toolkit.importing.script.setting import Settings
from toolkit.importing.script.source import Argument, Call, first_argument
from toolkit.importing.script.trainers import trainer_call
from toolkit.importing.script.values import Unreadable, dotted
from toolkit.tasks import task_names, task_of

_HALVES = {"bfloat16": "bfloat16", "half": "float16", "float": "float32"}


def read_model(settings: Settings) -> None:
    script = settings.script
    loads = [call for call in script.called("from_pretrained") if _task(call.owner) is not None]
    if not loads:
        _named_model(settings)
        return
    paths = [first_argument(script, call, "pretrained_model_name_or_path") for call in loads]
    names = {path.value for path in paths if path is not None and not path.unread}
    call, path = loads[0], paths[0]
    if len(names) > 1:
        lines = ", ".join(str(load.line) for load in loads)
        settings.miss("model_name_or_path", call.line, f"several models are loaded, lines {lines}")
    elif path is None or (not path.unread and not isinstance(path.value, str)):
        settings.miss("model_name_or_path", call.line, f"{call.owner}.from_pretrained names no model")
    else:
        settings.take("model_name_or_path", path)
    settings.task = _task(call.owner) or settings.task
    _loading(settings, call.arguments, call)


def _task(owner: str) -> str | None:
    """The task of a model's class, by the end of its name: ``LlamaForCausalLM``."""
    if "Peft" in owner or "For" not in owner:
        return None
    head = owner[owner.index("For") :]
    return next((name for name in task_names() if task_of(name).auto_class.endswith(head)), None)


def _loading(settings: Settings, arguments: dict[str, Argument], call: Call) -> None:
    """Arguments of ``from_pretrained``, or TRL's ``model_init_kwargs``."""
    for name, key in (
        ("dtype", "dtype"),
        ("torch_dtype", "dtype"),
        ("attn_implementation", "attn_implementation"),
        ("trust_remote_code", "trust_remote_code"),
        ("load_in_4bit", "load_in_4bit"),
        ("load_in_8bit", "load_in_8bit"),
        ("num_labels", "num_labels"),
    ):
        if name in arguments and arguments[name].value != "auto":
            settings.take(key, arguments[name])
    words = {word.arg: word.value for word in call.node.keywords}
    if "quantization_config" in words:
        _quantisation(settings, words["quantization_config"])
    elif call.open and "dtype" not in settings.written:
        settings.miss("dtype", call.line, f"{call.last}(**...): {call.open}")


def _quantisation(settings: Settings, node: ast.expr) -> None:
    try:
        config = settings.script.resolved(node)
    except Unreadable as error:
        settings.miss("load_in_4bit", node.lineno, str(error))
        return
    if config is None:
        return
    if config.last != "BitsAndBytesConfig":
        settings.miss("load_in_4bit", config.line, f"plan does not know {config.last}")
        return
    for key in ("load_in_4bit", "load_in_8bit"):
        if key in config.arguments:
            settings.take(key, config.arguments[key])
    if not settings.on("load_in_4bit"):
        return
    double = config.arguments.get("bnb_4bit_use_double_quant")
    if double is None:
        settings.habits["double_quant"] = Written("false", settings.script.place(config.line))
    elif double.unread:
        settings.miss("double_quant", double.line, double.unread)
    else:
        settings.habits["double_quant"] = Written(str(bool(double.value)).lower(), settings.script.place(double.line))


def _named_model(settings: Settings) -> None:
    """The model that a trainer's call names as a text, which TRL loads by ``model_init_kwargs``."""
    script = settings.script
    if settings.loop != "trl":
        settings.miss("model_name_or_path", None, "no from_pretrained of a model")
        return
    call = trainer_call(script)
    given = None if call is None else first_argument(script, call, "model")
    if call is None or given is None or given.unread or not isinstance(given.value, str):
        line = None if call is None else call.line
        settings.miss("model_name_or_path", line, "the trainer is given a model that the script does not name")
        return
    settings.take("model_name_or_path", given)
    for config in script.called("SFTConfig"):
        node = next((word.value for word in config.node.keywords if word.arg == "model_init_kwargs"), None)
        if node is None:
            continue
        _init_arguments(settings, node)
        return
    settings.set("dtype", "float32", call.line)  # trl 1.16.0 trainer/sft_trainer.py: its own default


def _init_arguments(settings: Settings, node: ast.expr) -> None:
    script = settings.script
    if isinstance(node, ast.Name):
        values = script.names.assigned.get(script.names.scope_of(node), {}).get(node.id, [])
        node = values[0] if len(values) == 1 and values[0] is not None else node
    if isinstance(node, ast.Dict):
        words = [
            ast.keyword(str(key.value), value)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        ]
        call = Call("model_init_kwargs", ast.Call(ast.Name("dict"), [], words), node.lineno)
    elif isinstance(node, ast.Call):
        call = Call("model_init_kwargs", node, node.lineno)
    else:
        settings.miss("dtype", node.lineno, "model_init_kwargs are known only when the script runs")
        return
    arguments = {word.arg: script.argument(word.value) for word in call.node.keywords if word.arg is not None}
    _loading(settings, arguments, call)
    if "dtype" not in settings.written and not {"dtype", "torch_dtype"} & arguments.keys():
        settings.set("dtype", "float32", node.lineno)


def weights_dtype(settings: Settings) -> Written | None:
    """The dtype that the script gives the model's weights: where it loads them, or moves them to it; None where it does
    not say."""
    script, moved = settings.script, None
    for call in script.calls:
        if not _is_of_the_model(call):
            continue
        if call.last in _HALVES and not call.node.args:
            moved = Written(_HALVES[call.last], script.place(call.line))
        if call.last == "to":
            values = [*(script.argument(node) for node in call.node.args), *call.arguments.values()]
            named = next((v for v in values if v.value in ("bfloat16", "float16", "float32")), None)
            moved = moved if named is None else Written(named.value, script.place(call.line))
    return moved or settings.written.get("dtype")


def _is_of_the_model(call: Call) -> bool:
    """Whether it is a method of the model: of a name with «model», or of what ``from_pretrained`` returns."""
    loaded = isinstance(call.node.func, ast.Attribute) and isinstance(call.node.func.value, ast.Call)
    if loaded:
        return dotted(call.node.func.value.func).endswith("from_pretrained")  # type: ignore[attr-defined]
    return "model" in call.owner.lower()
