"""A trace of any origin: nothing in it runs, and a loop of another device is replayed only where that can decide."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loops
import pytest
import torch
from torch import nn

from cases import every_case
from toolkit.errors import InputError
from toolkit.verification.command import run_trace
from toolkit.verification.loops.recorder import Recorder
from toolkit.verification.loops.verify_trace import verify_trace
from toolkit.verification.record.plain_form import SCHEMA, from_plain, load_plain, save_plain, to_plain
from toolkit.verification.record.trace import RankTrace
from toolkit.verification.scripts import replay_device
from toolkit.verification.scripts.facts import ScriptFacts, UnitTrace
from toolkit.verification.scripts.kept_model import KeptModel, keep_model, rebuild

Edit = Callable[[ScriptFacts], None]


def record(folder: Path, model: Any, batches: list[dict[str, torch.Tensor]]) -> None:
    """Three steps of one micro-batch, as a loop in plain torch takes them."""
    recorder = Recorder(folder, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder.attach(model, optimizer)
    for batch in batches[:3]:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, without dropout."""
    folder = tmp_path_factory.mktemp("recorded")
    model, batches = loops.model_and_batches(3)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    model.config.attention_dropout = 0.0
    record(folder, model, batches)
    return folder


@pytest.fixture
def trace(recorded: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(recorded, tmp_path / "trace"))


def unit_of(folder: Path) -> UnitTrace:
    """What rank 0 kept."""
    return load_plain(folder / "0/rank0.pt", UnitTrace, folder / "0/rank0.tensors")


def kept_model_of(folder: Path) -> KeptModel:
    return load_plain(folder / "0/model.pt", KeptModel, folder / "0/rank0.tensors")


def edit(folder: Path, change: Edit) -> None:
    unit = unit_of(folder)
    change(unit.facts)
    save_plain(unit, folder / "0/rank0.pt")


# ---------------------------------------------------------------------- nothing in it runs


class Malicious:
    """What a pickle may do: call anything."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("file", ["0/rank0.pt", "0/model.pt"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_malicious_pickle_does_not_run(file: str, inside: bool, trace: Path) -> None:
    made = trace / "it ran"
    content: Any = {"schema": SCHEMA, "content": Malicious(made)} if inside else Malicious(made)
    torch.save(content, trace / file)
    with pytest.raises(InputError, match=rf"{file}: not a trace of this toolkit version.*record the loop again"):
        verify_trace(trace)
    assert not made.exists()
    torch.load(trace / file, weights_only=False)
    assert made.exists(), "the file would do no harm: this test shows nothing"


def test_a_trace_of_an_earlier_version_is_refused_with_what_to_do(trace: Path) -> None:
    """They were pickles of whole objects."""
    torch.save(unit_of(trace), trace / "0/rank0.pt")
    with pytest.raises(InputError, match=r"Earlier versions wrote pickles.*record the loop again"):
        verify_trace(trace)


def test_a_trace_of_the_earlier_recorder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """It wrote a file of each rank, and one of the model, into the folder itself."""
    for name in ("model.pt", "rank0.pt", "extra0.pt"):
        torch.save({"schema": SCHEMA, "content": {}}, tmp_path / name)
    with pytest.raises(InputError, match=r"by an earlier version of toolkit\.Recorder; record the loop again"):
        verify_trace(tmp_path)


@every_case("kind", ["pipeline", "AutoModelForCausalLM", "LlamaConfig", "os.system", "__builtins__"])
def test_only_model_classes_of_transformers_are_built(kind: str, trace: Path) -> None:
    kept = kept_model_of(trace)
    kept.kind = kind
    save_plain(kept, trace / "0/model.pt")
    with pytest.raises(InputError, match=f"{kind} is not a transformers model class, and is not imported"):
        verify_trace(trace)


def test_code_of_the_hub_is_not_fetched_for_attention(trace: Path) -> None:
    kept = kept_model_of(trace)
    kept.attention = "somebody/kernel"
    save_plain(kept, trace / "0/model.pt")
    with pytest.raises(InputError, match="attention 'somebody/kernel' is none of eager, sdpa"):
        verify_trace(trace)


def test_what_lacks_a_part_is_refused(trace: Path) -> None:
    edit(trace, lambda facts: facts.steps.pop())
    with pytest.raises(InputError, match="has no complete steps"):
        verify_trace(trace)
    torch.save({"schema": SCHEMA, "content": {"trace": 0}}, trace / "0/rank0.pt")
    with pytest.raises(InputError, match=r"\(a UnitTrace of other fields\): record the loop again"):
        verify_trace(trace)
    (trace / "0/rank0.pt").unlink()
    with pytest.raises(InputError, match="contains no trace"):
        verify_trace(trace)


def test_plain_form_gives_back_what_it_took(recorded: Path) -> None:
    traced = unit_of(recorded).trace
    traced.offloaded, traced.collectives = [(1, 2, 3)], {"all-reduce": 2}
    again = from_plain(to_plain(traced), RankTrace)
    assert str(again) == str(traced)
    for wrong in ({"rank": "0"}, {"forwards": True}, {"tied": [["a", 1]]}, {"run": None}):
        with pytest.raises(TypeError):
            from_plain(to_plain(traced) | wrong, RankTrace)


# ---------------------------------------------------------------------- the model, built again


def test_a_model_that_was_changed_after_it_was_built_is_not_replayed_as_another(tmp_path: Path) -> None:
    model, batches = loops.model_and_batches(3)
    model.model.layers[1].self_attn.attention_dropout = 0.0
    record(tmp_path, model, batches)
    with pytest.raises(InputError, match=r"model\.layers\.1\.self_attn was .*attention_dropout=0\.0.* and is .*=0\.1"):
        verify_trace(tmp_path)
    assert verify_trace(tmp_path, model=model).verdict == "equivalent"


class OwnModel(nn.Module):
    """Not one of transformers' classes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = loops.model_and_batches(1)
        self.config = self.inner.config

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.inner(**inputs)


def test_a_class_of_ones_own_is_given_from_python(tmp_path: Path) -> None:
    record(tmp_path, OwnModel(), loops.model_and_batches(3)[1])
    with pytest.raises(InputError, match=r"OwnModel is not a transformers model class.*verify_trace\(Path"):
        verify_trace(tmp_path)
    assert verify_trace(tmp_path, model=OwnModel()).verdict == "equivalent"


def test_what_the_user_set_is_kept(tmp_path: Path) -> None:
    """Frozen weights, the attention, and values that the config does not give."""
    model, _ = loops.model_and_batches(1)
    model.set_attn_implementation("eager")
    model.model.norm.requires_grad_(False)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
        model.model.rotary_emb.inv_freq.mul_(1.5)
    again = rebuild(keep_model(model), None, "model.pt")
    assert again.config._attn_implementation == "eager"
    assert {n for n, p in again.named_parameters() if not p.requires_grad} == {"model.norm.weight"}
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


# ---------------------------------------------------------------------- loops of another device


def on_cuda(facts: ScriptFacts) -> None:
    """As a recorder on a GPU writes it: the GPU's own generator state beside the CPU's."""
    facts.device, facts.device_name = "cuda", "NVIDIA H100"
    for step in facts.steps:
        for call in step:
            call.rng["cuda"] = torch.zeros(16, dtype=torch.uint8)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_device, "is_here", lambda kind: kind == "cpu")


def test_float32_without_dropout_is_compared_on_the_cpu(
    trace: Path, no_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify_trace(trace).notes == []
    edit(trace, on_cuda)
    assert run_trace(str(trace), None) == 0
    assert "note: recorded on cuda (NVIDIA H100), replayed on the CPU: in float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda facts: facts.steps[1][0].drawn.append("cuda"), "it drew random numbers.*record it with dropout 0"),
        (lambda facts: facts.computed.append("bfloat16"), "it computes in bfloat16.*record it in float32"),
        (lambda facts: facts.computed.append("float16"), "it computes in float16"),
        (lambda facts: setattr(facts, "float32_products", "tf32"), "it multiplies in TF32"),
    ],
)
def test_what_cannot_be_distinguished_is_refused(change: Edit, reason: str, trace: Path, no_gpu: None) -> None:
    edit(trace, change)
    assert verify_trace(trace).verdict == "equivalent", "of the CPU's own it can"
    edit(trace, on_cuda)
    with pytest.raises(InputError, match=rf"recorded on cuda \(NVIDIA H100\).* cannot be replayed on a CPU: {reason}"):
        verify_trace(trace)


def test_where_there_is_such_a_device_the_loop_is_replayed_on_it(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_device, "is_here", lambda kind: True)
    edit(trace, on_cuda)
    edit(trace, lambda facts: facts.steps[0][0].drawn.append("cuda"))
    assert replay_device.replay_device([unit_of(trace).facts], "trace") == (torch.device("cuda"), None)
    moved: list[Any] = []
    monkeypatch.setattr(nn.Module, "to", lambda self, device: moved.append(device) or self)
    monkeypatch.setattr(torch.Tensor, "to", _instead(torch.Tensor.to, moved))
    monkeypatch.setattr(replay_device.torch, "get_device_module", lambda kind: StandIn())
    monkeypatch.setattr(replay_device, "multiplying", replay_device.multiplying)
    outcome = verify_trace(trace)
    assert outcome.verdict == "equivalent"
    assert outcome.notes == []
    assert outcome.resolved.device == "cuda"
    assert moved.count(torch.device("cuda")) >= 1 + 3 * 3, "the model, and the tensors of three micro-batches"


def _instead(right: Callable[..., Any], moved: list[Any]) -> Callable[..., Any]:
    def to(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if arguments and arguments[0] == torch.device("cuda"):
            moved.append(arguments[0])
            return self
        return right(self, *arguments, **options)

    return to


class StandIn:
    """In place of ``torch.cuda``: one generator, which a forward draws from as dropout does."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        if state.numel() > 16:
            self.generator.set_state(state)


def test_the_generator_of_the_device_is_recorded_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = StandIn(), torch.device("cuda", 0)
    monkeypatch.setattr(replay_device.torch, "get_device_module", lambda kind: {"cuda": cuda}[kind])
    torch.manual_seed(3)
    states = replay_device.generator_states(device)
    assert states.keys() == {"cpu", "cuda"}
    assert replay_device.drawn_since(states, device) == []
    masks = torch.rand(4, generator=cuda.generator)
    assert replay_device.drawn_since(states, device) == ["cuda"]
    host = torch.rand(4)
    assert replay_device.drawn_since(states, device) == ["cpu", "cuda"]
    replay_device.set_generators(states, torch.device("cuda"))
    assert torch.equal(torch.rand(4, generator=cuda.generator), masks)
    assert torch.equal(torch.rand(4), host)
    replay_device.set_generators(states, torch.device("cpu"))
    assert not torch.equal(torch.rand(4, generator=cuda.generator), masks), "left alone on the CPU"


def test_a_recorder_sees_who_was_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with a generator of its own, the forwards of a model with dropout draw from that."""
    cuda = StandIn()
    of = torch.get_device_module
    monkeypatch.setattr(
        replay_device.torch, "get_device_module", lambda kind=None: cuda if kind == "cuda" else of(kind)
    )  # optimizers of torch 2.14 ask for the accelerator's own, by its device
    model, batches = loops.model_and_batches(3)
    recorder = Recorder(tmp_path, model)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder.attach(model, optimizer)
    monkeypatch.setattr("toolkit.verification.scripts.calls._computing", lambda *given: torch.device("cuda", 0))
    monkeypatch.setattr("toolkit.verification.scripts.recorded_facts.device_name", lambda device: "stand-in")
    for at, batch in enumerate(batches):
        draws = model.model.norm.register_forward_hook(lambda *_: torch.rand(1, generator=cuda.generator) and None)
        if at == 1:
            draws.remove()
        model(**batch).loss.backward()
        draws.remove()
        optimizer.step()
        optimizer.zero_grad()
    steps = unit_of(tmp_path).facts.steps
    assert [["cuda" in call.drawn for call in step] for step in steps] == [[True], [False], [True]]
    assert all(call.rng.keys() == {"cpu", "cuda"} for step in steps for call in step)
    assert not torch.equal(steps[0][0].rng["cuda"], steps[2][0].rng["cuda"])


def test_products_are_as_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = SimpleNamespace(fp32_precision="none")
    backends = SimpleNamespace(fp32_precision="none", cuda=SimpleNamespace(matmul=matmul))
    monkeypatch.setattr(replay_device.torch, "backends", backends)
    cuda = torch.device("cuda")
    assert replay_device.float32_products(cuda) == "ieee"
    with replay_device.multiplying("tf32", cuda):
        assert replay_device.float32_products(cuda) == "tf32"
        assert replay_device.float32_products(torch.device("cpu")) == "ieee"
    assert matmul.fp32_precision == "none"
    backends.fp32_precision = "tf32"
    assert replay_device.float32_products(cuda) == "tf32"
    matmul.fp32_precision = "ieee"
    assert replay_device.float32_products(cuda) == "ieee"
