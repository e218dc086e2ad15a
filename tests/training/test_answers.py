"""run.sample_prompts: what they answer is what transformers generates from the same weights, and training is the same
bit for bit with and without them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from cases import every_case
from jobs import resolved_from
from tiny import LLAMA, recipe_dict
from toolkit.data.formats import Formatter
from toolkit.data.preflight import check_data
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.model.processor import load_tokenizer
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.training.answers import encoded_prompts, shown
from toolkit.training.export_check import trained_model
from toolkit.training.finding import tensors_of
from toolkit.training.run import run
from toolkit.watching.runs import read_run

PROMPTS = ["the model", "every rank of the batch is"]
LORA = {"method": "lora", "r": 4, "alpha": 8, "target_modules": "all-linear"}
LENGTH = 9


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def job(resolved: Resolved) -> list[str]:
    """A run, with the random state of the processes as it leaves it."""
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda *_: None  # the group is the tests'
    try:
        torch.manual_seed(0)
        run(resolved, resume=False, screen=None)
    finally:
        torch.distributed.destroy_process_group = destroy
    return torch.get_rng_state().tolist()


def generated(resolved: Resolved, step: int, prompt: str) -> str:
    """What transformers generates from the weights of a checkpoint."""
    model: Any = trained_model(resolved, Path(resolved.recipe.run.output_dir) / f"checkpoints/step-{step:08d}")
    tokenizer = load_tokenizer(resolved.recipe)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        new = model.generate(
            input_ids=ids, max_new_tokens=LENGTH, do_sample=False, use_cache=False,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    start = 1 if model.config.is_encoder_decoder else ids.shape[1]
    return str(tokenizer.decode(new[0, start:], skip_special_tokens=True))


def check(recipe: dict[str, Any], folder: Path, start: Any) -> None:
    """Runs of ``recipe`` with and without prompts are the same, and the answers are transformers' own."""
    found = []
    for prompts in ([], PROMPTS):
        output = folder / f"{len(prompts)}"
        output.mkdir(parents=True)
        asked = {"sample_prompts": prompts, "sample_max_new_tokens": LENGTH} if prompts else {}
        every = 2 if prompts or "eval" in recipe["data"] else 0
        section = {"output_dir": str(output), "eval_every": every, "save_every": 2, "keep": 4} | asked
        resolved = resolved_from(recipe | {"run": recipe["run"] | section})
        state = start(resolved)
        losses = [(line["loss"], line["grad_norm"]) for line in lines(output / "metrics.jsonl")]
        weights = dict(tensors_of(output / "checkpoints/step-00000004"))
        found.append((state, losses, weights))
    assert found[0][:2] == found[1][:2]
    assert found[0][2].keys() == found[1][2].keys()
    for name, weight in found[0][2].items():
        assert torch.equal(weight, found[1][2][name]), name
    answers = lines(output / "samples.jsonl")
    assert [(line["step"], line["prompt"]) for line in answers] == [(step, one) for step in (2, 4) for one in PROMPTS]
    assert [line["answer"] for line in answers] == [
        generated(resolved, line["step"], line["prompt"]) for line in answers
    ], recipe["strategy"]
    assert len({line["answer"] for line in answers}) > 1, "nothing is told apart"
    assert [*read_run(output).samples] == [("the model", answers[2]["answer"]), (PROMPTS[1], answers[3]["answer"])]


TENSOR = {"name": "fsdp2", "mesh": {"tensor": 2}}
EXPERT = {"name": "fsdp2", "mesh": {"expert": 2}}
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
LATER = ["zero1", "zero2", "fsdp1", TENSOR, EXPERT]


@pytest.mark.parametrize(
    "strategy", ["ddp", "zero3", "fsdp2", *(pytest.param(one, marks=pytest.mark.nightly) for one in LATER)]
)
def test_answers_are_the_models_own_and_change_no_bit(
    strategy: str | dict[str, Any], tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    section = {"name": strategy} if isinstance(strategy, str) else strategy
    mesh = section.get("mesh", {})
    own = {"attention_dropout": 0.0 if mesh else 0.1} | (MIXTURE if "expert" in mesh else {})
    for name, adapter in (("full", None), ("lora", LORA))[: 1 if "expert" in mesh else 2]:
        recipe = recipe_dict(
            tiny_root, model={"config": LLAMA | own}, strategy=section, data={"eval": str(tiny_root / "eval.jsonl")},
            optimizer={"lr": 0.03},
        ) | {"adapter": adapter}  # fmt: skip
        check(recipe, tmp_path / name, lambda resolved: group.run(job, resolved))


def test_an_encoder_and_its_decoder_answer_without_held_out_data(tiny_root: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"the {one}", "completion": f"{one} is reduced"} for one in ("model", "shard", "rank", "loss")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
              "vocab_size": 300, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
    recipe = recipe_dict(
        tiny_root, model={"config": config, "task": "seq2seq-lm"}, optimizer={"lr": 0.05},
        data={"train": str(tmp_path / "pairs.jsonl"), "format": "prompt-completion"}, strategy={"name": "single"},
        machine={"processes": 1},
    )  # fmt: skip
    check(recipe, tmp_path / "out", job)


@every_case(
    "sections",
    [
        pytest.param({"adapter": {"method": "prompt-tuning", "options": {"num_virtual_tokens": 3}}},
                     id="virtual tokens"),
        pytest.param({"optimizer": {"name": "schedule-free", "lr": 0.3}, "precision": "fp32",
                      "schedule": {"name": "constant", "warmup_steps": 0}}, id="averaged weights"),
        pytest.param({"data": {"packing": True, "max_length": 64}, "loss": "fused"}, id="packed rows, a fused loss"),
        pytest.param({"run": {"max_steps": 4, "seed": 3, "sample_prompts": []}, "batch": {"micro_size": 1}},
                     id="a prompt at a time"),
    ],
)  # fmt: skip
def test_answers_are_of_the_weights_that_are_evaluated(
    sections: dict[str, Any], tiny_root: Path, tmp_path: Path
) -> None:
    single: dict[str, Any] = {"strategy": {"name": "single"}, "machine": {"processes": 1}}
    recipe = recipe_dict(tiny_root, **single | {"optimizer": {"lr": 0.03}} | sections)
    recipe["data"] |= {"eval": str(tiny_root / "eval.jsonl")}
    check(recipe, tmp_path / "out", job)


def test_answers_are_on_the_screen_in_trackers_and_end_with_a_resumed_run(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the first step, and once at each step; control characters steer no terminal. With averaged weights,
    and with a head that gives losses."""
    tracked: list[tuple[int, dict[str, Any]]] = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda *arguments, **options: None)
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: tracked.append((step, values)))
    (tmp_path / "run").mkdir()
    prompt = "the \x1b[2J \x9b2J" + "rank " * 20
    recipe = recipe_dict(
        tiny_root, strategy={"name": "single"}, machine={"processes": 1}, optimizer={"name": "schedule-free"},
        loss="fused", schedule={"name": "constant", "warmup_steps": 0}, data={"max_length": 512},
        run={"output_dir": str(tmp_path / "run"), "eval_every": 3, "eval_at_start": True, "save_every": 2,
             "sample_prompts": [prompt], "sample_max_new_tokens": 3, "trackers": ["tensorboard"]},
    )  # fmt: skip
    out = io.StringIO()
    run(resolved_from(recipe), resume=False, screen=out)
    answers = lines(tmp_path / "run/samples.jsonl")
    assert [line["step"] for line in answers] == [0, 3, 4]
    said = [f"  step {line['step']}: {shown(prompt, line['answer'])}" for line in answers]
    assert [line for line in out.getvalue().splitlines() if "→" in line] == said
    assert not {"\x1b", "\x9b"} & {*out.getvalue()}
    assert [(step, values["sample_0"]) for step, values in tracked if "sample_0" in values] == [
        (line["step"], shown(prompt, line["answer"])) for line in answers
    ]
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    run(resolved_from(recipe), resume=True, screen=None)
    assert lines(tmp_path / "run/samples.jsonl") == answers


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_prompts_are_encoded_as_samples_begin(tiny_root: Path, tmp_path: Path) -> None:
    """With the chat template where the data is conversations, and without what a tokenizer adds behind a text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(Recipe.model_validate(recipe_dict(tiny_root)))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    template = tmp_path / "chatml.jinja"
    template.write_text(CHATML)
    talk = [{"role": "system", "content": "the rank"}, {"role": "user", "content": "a batch"}]
    for data, prompts, right in (
        ({"format": "messages", "chat_template": str(template)}, ["a batch", talk],
         ["<|im_start|>user\na batch<|im_end|>\n<|im_start|>assistant\n",
          "<|im_start|>system\nthe rank<|im_end|>\n<|im_start|>user\na batch<|im_end|>\n<|im_start|>assistant\n"]),
        ({"format": "text"}, ["a batch"], ["<s>a batch"]),
        ({"format": "prompt-completion"}, ["a batch"], ["<s>a batch"]),
    ):  # fmt: skip
        config = LLAMA | {"vocab_size": 400}
        values = recipe_dict(
            tiny_root, data=data, run={"sample_prompts": prompts, "eval_every": 2}, model={"config": config}
        )
        recipe = Recipe.model_validate(values)
        formatter = Formatter(recipe, tokenizer)
        found = encoded_prompts(recipe, formatter)
        ends = ["</s>", "<|im_end|>"] if data["format"] == "messages" else ["</s>"]
        assert formatter.ends == {*tokenizer.convert_tokens_to_ids(ends)}
        assert [tokenizer.decode(one) for one in found] == right
        short = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": len(found[0])})})
        with pytest.raises(InputError, match=r"run\.sample_prompts\[0\]: has \d+ tokens, and data\.max_length is \d+"):
            encoded_prompts(short, Formatter(short, tokenizer))


SAY = {"role": "user", "content": "the"}


@every_case(
    ("prompts", "sections", "message"),
    [
        (["a"], {"run": {"eval_every": 0}}, "run.sample_prompts: are answered at evaluations, and run.eval_every is 0"),
        ([], {"run": {"sample_max_new_tokens": 8}}, "run.sample_max_new_tokens: there are no run.sample_prompts"),
        (["a"], {"model": {"task": "sequence-classification"}}, "requires model.task: causal-lm or seq2seq-lm (it is"),
        (["a"], {"model": {"task": "masked-lm"}}, "run.sample_prompts: requires model.task: causal-lm or seq2seq-lm"),
        (["a", [SAY]], {}, "run.sample_prompts[1]: is a list of messages, and data.format: text has no chat template"),
        (["a"], {"strategy": {"mesh": {"context": 2}}}, "run.sample_prompts: not with strategy.mesh.context: a"),
        (["a"], {"strategy": {"mesh": {"pipeline": 2}}}, "run.sample_prompts: not with strategy.mesh.pipeline: the"),
        ([[SAY, {"role": "assistant", "content": "a"}]], {"data": {"format": "messages"}},
         "run.sample_prompts[0][1]: is the assistant's, which the model is to write; remove it"),
        ([[{"role": "usr", "content": "a"}]], {"data": {"format": "messages"}}, "run.sample_prompts[0][0].role"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused_by_name(
    prompts: list[Any], sections: dict[str, Any], message: str, tiny_root: Path
) -> None:
    recipe = recipe_dict(tiny_root, **sections)
    recipe["run"] |= {"eval_every": None, "sample_prompts": prompts} | sections.get("run", {})
    with pytest.raises(InputError) as caught:
        check_data(resolved_from(recipe).recipe)
    assert message in str(caught.value)


@every_case("value", ["a", [""], [[]], [3], [["a"]]])
def test_a_prompt_is_a_text_or_a_conversation(value: Any, tiny_root: Path) -> None:
    with pytest.raises(ValueError, match="sample_prompts"):
        Recipe.model_validate(recipe_dict(tiny_root, run={"sample_prompts": value}))
