"""Two checkpoints compared: what is a difference, what causes it, and what cannot be used. No group is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_writers as writers
import pytest
import torch
from checkpoint_writers import Plan
from safetensors.torch import save_file
from typer.testing import CliRunner

import toolkit
from cases import every_case
from toolkit.cli import app
from toolkit.errors import InputError
from toolkit.verification.checkpoints import compare as comparing
from toolkit.verification.checkpoints import screen
from toolkit.verification.checkpoints.command import CheckpointComparison, compare_two
from toolkit.verification.checkpoints.find import places, read
from toolkit.verification.checkpoints.names import canonical

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
Document = dict[str, Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The file of a plain loop by its plan, trained once."""
    root = tmp_path_factory.mktemp("plain")
    made: dict[Plan, Path] = {}

    def make(**options: Any) -> Path:
        plan = Plan(**options)
        if plan not in made:
            made[plan] = root / f"{len(made)}.pt"
            writers.plain(made[plan], plan)
        return made[plan]

    return make


def edited(file: Path, target: Path, change: Callable[[Document], Any]) -> Path:
    """A copy of a plain loop's file, changed."""
    document = torch.load(file, weights_only=True)
    change(document)
    torch.save(document, target)
    return target


def moments_of(document: Document) -> list[Document]:
    return [values for _, values in sorted(document["optimizer"]["state"].items())]


def cause(found: CheckpointComparison) -> str:
    assert (found.verdict, found.exit_code) == ("different", 1)
    assert found.diagnosis is not None, "\n".join(screen.lines(found))
    return found.diagnosis.id


def test_the_same_run_is_bit_for_bit_equal(plain: Callable[..., Path], tmp_path: Path) -> None:
    found = compare_two(plain(), shutil.copy(plain(), tmp_path / "copy.pt"))
    assert (found.verdict, found.exit_code, found.different, found.diagnosis) == ("equivalent", 0, None, None)
    assert found.to_json()["bit_equal"] is True
    assert "equivalent · bit for bit equal" in "\n".join(screen.lines(found))
    assert [len(stage.measures) for stage in found.steps[0].stages] == [1, 21, 21, 42, 1]


def test_a_wrong_scale_of_the_loss(plain: Callable[..., Path]) -> None:
    """AdamW hides it: the weights are within what rounding decides, the moments are not."""
    found = compare_two(plain(), plain(scale=2.0))
    assert cause(found) == "moments-scaled"
    assert found.diagnosis is not None
    assert found.diagnosis.facts["factor"] == pytest.approx(2.0, rel=1e-3)
    first = found.to_json()["first_difference"]
    assert first["stage"] in ("weights", "optimizer-state")
    moments = found.steps[0].stage("optimizer-state")
    assert len(moments.wrong) == 42
    assert max(one.difference / one.b for one in found.steps[0].weights.values()) < 1e-3
    wide = compare_two(plain(), plain(scale=2.0), tolerance=10.0)
    assert wide.verdict == "equivalent"
    assert (wide.to_json()["passes"][0]["tolerance"], found.to_json()["passes"][0]["tolerance"]) == (
        "given",
        "measured",
    )


def test_a_tensor_without_a_gradient(plain: Callable[..., Path]) -> None:
    found = compare_two(plain(), plain(zeroed=QUERY))
    assert cause(found) == "tensor-never-trained"
    assert found.diagnosis is not None
    assert found.diagnosis.facts == {"count": 1, "which": "B", "first": QUERY, "how": "all zero"}
    turned = compare_two(plain(zeroed=QUERY), plain())
    assert turned.diagnosis is not None
    assert turned.diagnosis.facts["which"] == "A"


def test_one_more_step(plain: Callable[..., Path]) -> None:
    found = compare_two(plain(), plain(steps=4))
    assert cause(found) == "other-step-count"
    assert found.to_json()["first_difference"]["stage"] == "step"
    assert found.to_json()["first_difference"]["said"] == "3 in A, 4 in B"


def test_weights_of_a_later_step_than_the_moments(plain: Callable[..., Path], tmp_path: Path) -> None:
    later = torch.load(plain(steps=4), weights_only=True)
    file = edited(plain(), tmp_path / "a.pt", lambda document: document.update(model=later["model"]))
    found = compare_two(plain(), file)
    assert cause(found) == "weights-of-later-step"
    assert found.diagnosis is not None
    assert found.diagnosis.facts["which"] == "B"


@every_case("known", [True, False])
def test_weight_decay(known: bool, plain: Callable[..., Path], tmp_path: Path) -> None:
    """From what the groups say, and from the weights where they do not."""

    def forget(document: Document) -> None:
        for group in document["optimizer"]["param_groups"]:
            del group["weight_decay"]

    files = [plain(), plain(decay=0.0)]
    if not known:
        files = [edited(file, tmp_path / f"{at}.pt", forget) for at, file in enumerate(files)]
    found = compare_two(*files)
    assert cause(found) == "weight-decay-differs"
    assert found.diagnosis is not None
    assert ("0.1 in A, 0 in B" in found.diagnosis.evidence) == known


def test_moments_in_16_bits(plain: Callable[..., Path], tmp_path: Path) -> None:
    def cast(document: Document) -> None:
        for values in moments_of(document):
            values |= {key: values[key].bfloat16().float() for key in ("exp_avg", "exp_avg_sq")}

    found = compare_two(plain(), edited(plain(), tmp_path / "a.pt", cast))
    assert cause(found) == "stored-moments-in-16-bits"
    assert found.diagnosis is not None
    assert found.diagnosis.facts == {"which": "B", "dtype": "bfloat16"}
    # In bf16 the values are within tolerance: the precision itself is compared.
    half = edited(plain(bf16=True), tmp_path / "b.pt", cast)
    assert cause(compare_two(plain(bf16=True), half)) == "stored-moments-in-16-bits"


def test_equal_weights_with_other_moments(plain: Callable[..., Path], tmp_path: Path) -> None:
    def noise(document: Document) -> None:
        torch.manual_seed(1)
        for values in moments_of(document):
            values["exp_avg"] += 0.1 * values["exp_avg"].abs().mean() * torch.randn_like(values["exp_avg"])

    found = compare_two(plain(), edited(plain(), tmp_path / "a.pt", noise))
    assert cause(found) == "moments-differ-alone"
    assert found.diagnosis is not None
    assert found.diagnosis.facts["how"] == "bit for bit equal"


def test_one_changed_weight_is_named(plain: Callable[..., Path], tmp_path: Path) -> None:
    def nudge(document: Document) -> None:
        document["model"][QUERY][0, 0] += 1e-3

    found = compare_two(plain(), edited(plain(), tmp_path / "a.pt", nudge))
    assert cause(found) == "weights-differ-alone"
    assert found.different is not None
    assert found.different[2].name == QUERY
    assert len(found.different[1].wrong) == 1


def test_a_value_that_is_not_a_number(plain: Callable[..., Path], tmp_path: Path) -> None:
    def break_both(document: Document) -> None:
        document["model"][NORM][0] = float("nan")

    files = [edited(plain(), tmp_path / f"{at}.pt", break_both) for at in (0, 1)]
    found = compare_two(*files)
    assert found.exit_code == 1
    json.dumps(found.to_json(), allow_nan=False)


def test_the_learning_rate(plain: Callable[..., Path], tmp_path: Path) -> None:
    def change(document: Document) -> None:
        for group in document["optimizer"]["param_groups"]:
            group["lr"] = 5e-4

    found = compare_two(plain(), edited(plain(), tmp_path / "a.pt", change))
    assert cause(found) == "stored-rate-differs"
    assert found.to_json()["first_difference"]["stage"] == "schedule"


def test_names(plain: Callable[..., Path], tmp_path: Path) -> None:
    """Tensors in one alone, shapes, padded and untied embeddings."""

    def with_adapters(document: Document) -> None:
        document["model"][f"base_model.model.{QUERY.removesuffix('.weight')}.lora_A.default.weight"] = torch.ones(4, 32)

    def pad(document: Document) -> None:
        for name in (EMBEDDING, HEAD):
            document["model"][name] = torch.cat([document["model"][name], torch.zeros(3, 32)])

    def drop(name: str) -> Callable[[Document], Any]:
        return lambda document: document["model"].pop(name)

    for change, expected in (
        (with_adapters, "adapters-missing"),
        (pad, "embeddings-padded"),
        (drop(HEAD), "embeddings-untied"),
        (drop(QUERY), "tensors-missing"),
    ):
        found = compare_two(plain(), edited(plain(), tmp_path / "a.pt", change))
        assert cause(found) == expected
        assert found.to_json()["first_difference"]["stage"] == "names"


def test_tied_weights_are_compared_once(plain: Callable[..., Path], tmp_path: Path) -> None:
    def drop(document: Document) -> None:
        del document["model"][HEAD]

    def apart(document: Document) -> None:
        document["model"][HEAD] = document["model"][EMBEDDING].clone()

    files = [edited(plain(tied=True), tmp_path / f"{at}.pt", change) for at, change in enumerate((drop, apart))]
    found = compare_two(*files)
    assert found.verdict == "equivalent"
    assert len(found.steps[0].moments["exp_avg"]) == 20
    assert "tied" in " ".join(found.to_json()["notes"])


def test_16_bit_weights_are_compared_at_that_precision(plain: Callable[..., Path], tmp_path: Path) -> None:
    weights = torch.load(plain(), weights_only=True)["model"]
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    found = compare_two(plain(), tmp_path / "model.safetensors")
    assert found.verdict == "equivalent"
    assert found.steps[0].weights[QUERY].difference == 0.0
    assert "bfloat16 weights only" in " ".join(found.to_json()["notes"])
    weights[QUERY][:] *= 1.05
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    assert compare_two(plain(), tmp_path / "model.safetensors").verdict == "different"


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_tables_fit_the_terminal(
    columns: int, plain: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By relative names, so that no line's length depends on where the tests run."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(plain(), "a.pt")
    edited(plain(), Path("b.pt"), lambda document: document["model"][QUERY].mul_(1.01))
    torch.save(torch.load("a.pt", weights_only=True)["model"], "weights.bin")
    for other, verdict in (("b.pt", "different  at "), ("weights.bin", "equivalent · ")):
        found = compare_two("a.pt", other)
        lines = screen.lines(found, columns)
        assert max(map(len, lines)) <= columns
        head = lines.index("stage             verdict: error of its tolerance")
        table = lines[head + 1 : lines.index("", head)]
        assert [line[:18].strip() for line in table if line[0] != " "] == [one.name for one in found.steps[-1].stages]
        assert all(line[18:22] in ("ok  ", "-   ", "FAIL") or line.startswith(" " * 21) for line in table), table
        assert any(line.startswith(verdict) for line in lines)
        assert not any("…" in line for line in lines)


def test_weights_alone_say_what_they_do_not_prove(plain: Callable[..., Path], tmp_path: Path) -> None:
    torch.save(torch.load(plain(), weights_only=True)["model"], tmp_path / "weights.bin")
    found = compare_two(plain(), tmp_path / "weights.bin")
    assert found.verdict == "equivalent"
    assert found.steps[0].stage("optimizer-state").measures == []
    assert "AdamW hides a wrong scale" in " ".join(" ".join(screen.lines(found)).split())


def test_the_trainer_and_its_steps(tmp_path: Path) -> None:
    writers.trainer(tmp_path / "a", "single", Plan())
    writers.plain(tmp_path / "plain.pt", Plan(constant=True))
    alone = compare_two(tmp_path / "plain.pt", tmp_path / "a")
    assert alone.verdict == "equivalent"
    assert len(alone.steps[0].moments["exp_avg"]) == 21
    assert "config.json" in " ".join(alone.to_json()["notes"])
    every = compare_two(tmp_path / "a", tmp_path / "a")
    assert [one.step for one in every.steps] == [1, 2, 3]
    (tmp_path / "c").mkdir()
    for step in (2, 3):
        shutil.copytree(tmp_path / "a" / f"checkpoint-{step}", tmp_path / "c" / f"checkpoint-{step}")
    wrong = tmp_path / "c/checkpoint-2/optimizer.pt"
    document = torch.load(wrong, weights_only=True)
    document["state"][3]["exp_avg"] *= 3
    torch.save(document, wrong)
    found = compare_two(tmp_path / "a", tmp_path / "c")
    assert [one.step for one in found.steps] == [2], "the later step follows from it"
    assert found.different is not None
    assert found.different[2].tensor == "model.layers.0.self_attn.v_proj.weight exp_avg"


def test_an_adapter_of_the_trainer(tmp_path: Path) -> None:
    """Its moments are numbered in the order of the base's modules, which its files do not have."""
    writers.trainer(tmp_path, "single", Plan(), adapter=True)
    config = tmp_path / "checkpoint-3/adapter_config.json"
    unknown = compare_two(tmp_path, tmp_path / "checkpoint-3")
    assert [one.step for one in unknown.steps] == [3]
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in unknown.steps[0].weights)
    assert "could not be named" in " ".join(unknown.to_json()["notes"])
    writers.make_model(Plan()).config.save_pretrained(tmp_path / "base")
    base = json.loads((tmp_path / "base/config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "base/config.json").write_text(json.dumps(base))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}))
    found = compare_two(tmp_path, tmp_path / "checkpoint-3")
    assert found.verdict == "equivalent"
    moments = found.steps[0].a.moments["exp_avg"]
    state = torch.load(tmp_path / "checkpoint-3/optimizer.pt", weights_only=True)["state"]
    layers = [f"model.layers.{layer}.self_attn.{kind}_proj" for layer in (0, 1) for kind in "qkvo"]
    order = [f"{layer}.lora_{part}.weight" for layer in layers for part in "AB"]
    assert [*moments] == order
    assert all(torch.equal(moments[name].read(), state[at]["exp_avg"]) for at, name in enumerate(order))


def test_sharded_safetensors_and_numbers_without_an_order(plain: Callable[..., Path], tmp_path: Path) -> None:
    document = torch.load(plain(), weights_only=True)
    names = sorted(document["model"])
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    index = {name: file for file, part in parts.items() for name in part}
    for file, part in parts.items():
        save_file({name: document["model"][name] for name in part}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    optimizer = document["optimizer"]
    torch.save(optimizer, tmp_path / "optimizer.bin")
    found = compare_two(plain(), tmp_path)
    assert found.verdict == "equivalent"
    assert len(found.steps[0].moments["exp_avg"]) == 21, "the other file has the order"
    alone = compare_two(tmp_path, tmp_path)
    assert "could not be named" in " ".join(alone.to_json()["notes"])
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-2\.safetensors: missing"):
        compare_two(plain(), tmp_path)


def test_torch_distributed_checkpoint_and_lightning(plain: Callable[..., Path], tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    document = torch.load(plain(), weights_only=True)
    state = dict(zip(_numbered_names(document), moments_of(document), strict=True))
    optimizer = {"state": state, "param_groups": document["optimizer"]["param_groups"]}
    dcp.save({"model": document["model"], "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = compare_two(plain(), tmp_path / "dcp")
    assert found.verdict == "equivalent"
    assert found.to_json()["bit_equal"]
    assert len(found.steps[0].moments["exp_avg_sq"]) == 21
    lightning = {
        "pytorch-lightning_version": "2.5", "global_step": 3,
        "state_dict": {f"model.{name}": tensor for name, tensor in document["model"].items()},
        "optimizer_states": [document["optimizer"]], "lr_schedulers": [document["scheduler"]],
    }  # fmt: skip
    torch.save(lightning, tmp_path / "a.ckpt")
    found = compare_two(tmp_path / "a.ckpt", tmp_path / "dcp")
    assert found.verdict == "equivalent"
    assert found.to_json()["checkpoints"][0]["a"]["renamed"] == ["model. removed (the other side has none)"]
    assert len(found.steps[0].moments["exp_avg"]) == 21


def _numbered_names(document: Document) -> list[str]:
    weights = document["model"]
    return [n for n in weights if weights[n].ndim > 1] + [n for n in weights if weights[n].ndim < 2]


def test_canonical_names() -> None:
    found, rules = canonical([
        "module._orig_mod.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.weight",
        "module.base_model.model.q_proj.lora_A.default.weight",
        "module.base_model.model.q_proj.base_layer.weight",
        "module.base_model.model.lm_head.modules_to_save.default.weight",
    ])  # fmt: skip
    assert list(found.values()) == [
        "model.layers.0.mlp.weight", "q_proj.lora_A.weight", "q_proj.weight", "lm_head.weight",
    ]  # fmt: skip
    assert any("PEFT's adapter name" in rule for rule in rules)
    assert canonical(["module.weight", "head.weight"])[0]["module.weight"] == "module.weight"


class _Runs:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran-code"),)


def test_nothing_is_unpickled(plain: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    monkeypatch.chdir(tmp_path)
    torch.save({"model": torch.load(plain(), weights_only=True)["model"], "extra": _Runs()}, tmp_path / "a.pt")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/.metadata").write_bytes(pickle.dumps(_Runs()))
    (tmp_path / "c").mkdir()
    torch.save({"module": {}, "extra": _Runs()}, tmp_path / "c/mp_rank_00_model_states.pt")
    for name in ("a.pt", "b", "c"):
        with pytest.raises(InputError, match="not loaded: it needs") as error:
            compare_two(plain(), tmp_path / name)
        assert "Path" in str(error.value)
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    assert not (tmp_path / "ran-code").exists()


def test_the_trainers_arguments_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.verification.checkpoints.readers.beside import _compute

    monkeypatch.chdir(tmp_path)
    torch.save(_Runs(), tmp_path / "training_args.bin")
    assert _compute(tmp_path / "training_args.bin") is None
    assert not (tmp_path / "ran-code").exists()
    writers.trainer(tmp_path / "run", "single", Plan(steps=1, bf16=True))
    assert read(places(str(tmp_path / "run"))[0]).compute == "bfloat16"


def refused(arguments: list[str], cwd: Path) -> str:
    command = [sys.executable, "-m", "toolkit", "verify", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.mark.usefixtures("launches")
def test_the_command(plain: Callable[..., Path], tmp_path: Path) -> None:
    a, b = str(plain()), str(plain(scale=2.0))
    both = [sys.executable, "-m", "toolkit", "verify", "--checkpoint", a, "--checkpoint", b, "--json", "r.json"]
    done = subprocess.run(both, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "likely     gradients of B are 2 times those of A" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= max(100, len(a) + 11, len(b) + 11)
    written = json.loads((tmp_path / "r.json").read_text())
    result = toolkit.compare_checkpoints(a, b)
    times = ("started", "seconds")
    ours = json.loads(json.dumps(result.to_json()))
    assert {k: v for k, v in written.items() if k not in times} == {k: v for k, v in ours.items() if k not in times}
    assert (result.exit_code, result.verdict, written["command"]) == (1, "different", "verify")
    assert [stage["stage"] for stage in written["passes"][0]["stages"]] == list(comparing.STAGES)
    assert {"id", "cause", "evidence", "facts"} <= written["diagnosis"].keys()
    assert refused(["--checkpoint", a], tmp_path).endswith("given 1 times; expected twice, once for each checkpoint")
    own = CliRunner().invoke(app, ["compare", a, b, "--json", str(tmp_path / "own.json")])
    assert (own.exit_code, own.stdout.splitlines()[0]) == (1, f"compare A  {a}")
    compared = json.loads((tmp_path / "own.json").read_text())
    assert (compared.pop("command"), compared.pop("schema")) == ("compare", "toolkit.compare/1")
    assert {k: v for k, v in compared.items() if k not in times} == {k: ours[k] for k in compared if k not in times}


def test_what_cannot_be_used(plain: Callable[..., Path], tmp_path: Path) -> None:
    good = plain()
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:5000])
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "list.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"step": 3}, tmp_path / "none.pt")
    save_file({"a": torch.ones(1000)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:400])
    torch.save({"conv.weight": torch.ones(3, 3)}, tmp_path / "other.pt")
    torch.save({QUERY: torch.ones(64, 64)}, tmp_path / "larger.pt")
    (tmp_path / "data.json").write_text("{}")
    (tmp_path / "folder/model.safetensors").mkdir(parents=True)
    for name, message in {
        "nowhere": "no such file or folder",
        "empty": "no checkpoint; looked for manifest.json",
        "cut.pt": "truncated, or not written by torch.save",
        "text.pt": "truncated, or not written by torch.save",
        "list.pt": "list, expected a dictionary",
        "none.pt": "no tensors by name",
        "cut.safetensors": "cannot be read",
        "other.pt": "are of different models: A has 21 tensors",
        "larger.pt": "are of different models: model.layers.0.self_attn.q_proj.weight has shape",
        "data.json": "not a checkpoint; expected a folder, or a file",
        "folder": "no checkpoint; looked for",
    }.items():
        with pytest.raises(InputError) as error:
            compare_two(good, tmp_path / name)
        assert message in str(error.value), name
        assert name in str(error.value)
        assert "\n" not in str(error.value)
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(InputError, match="--tolerance"):
            compare_two(good, good, tolerance=tolerance)


def test_a_file_that_may_not_be_read(
    plain: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == "locked.pt":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    shutil.copy(plain(), tmp_path / "locked.pt")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"locked\.pt: Permission denied; make it readable"):
        compare_two(plain(), tmp_path / "locked.pt")


def test_steps_that_have_no_counterpart(tmp_path: Path) -> None:
    for run, steps in (("a", (1, 2)), ("b", (3, 4))):
        for step in steps:
            folder = tmp_path / run / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"no step in common: .*a has 1, 2, .*b has 3, 4"):
        compare_two(tmp_path / "a", tmp_path / "b")


def test_tensors_are_read_one_after_another(plain: Callable[..., Path]) -> None:
    """The peak is two tensors, not two models."""
    a, b = (read(places(str(plain()))[0]) for _ in range(2))
    alive: list[int] = []
    held: set[str] = set()

    def watched(name: str, one: Any) -> Any:
        def take() -> torch.Tensor:
            import weakref

            tensor = one.read().clone()
            held.add(name)
            weakref.finalize(tensor, held.discard, name)
            alive.append(len(held))
            return tensor

        return replace(one, read=take)

    for side, checkpoint in (("a", a), ("b", b)):
        checkpoint.weights = {n: watched(f"{side} {n}", one) for n, one in checkpoint.weights.items()}
    comparing.compare(a, b)
    assert len(alive) == 42
    assert max(alive) == 2
