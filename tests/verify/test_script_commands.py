"""`toolkit record` and `toolkit prove`: a launched script is proven unchanged; bad commands get one line each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nights import nightly_but
from toolkit.errors import InputError, RunFailed, ToolkitError
from toolkit.results import Result
from toolkit.verification.scripts import renamed
from toolkit.verification.scripts.command import record
from toolkit.verification.scripts.prove import judge, prove

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("launches")
RIGHT = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, {here!r})
import script_loops as loops

dist.init_process_group("gloo")
model = DistributedDataParallel(loops.llama())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
for at, batch in enumerate(loops.batches(6)[dist.get_rank() :: 2]):
    labels = batch.pop("labels")
    tokens = torch.tensor(float((labels[:, 1:] != -100).sum()))
    dist.all_reduce(tokens)
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    (loss * {ranks} / tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent.parent), str(HERE)]))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text, encoding="utf-8")
    return str(folder / "train.py")


def test_torchrun_is_recorded_and_proven(tmp_path: Path) -> None:
    """DDP by hand. The session's sitecustomize goes on to one that was there before."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"open({str(tmp_path / 'hidden')!r}, 'a').close()", encoding="utf-8"
    )
    os.environ["PYTHONPATH"] += os.pathsep + str(tmp_path / "site")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    file = script(tmp_path, RIGHT.format(here=str(HERE), ranks=2))
    found = prove([*launch, file], tmp_path / "recording", timeout=120)
    assert found.verdict == "equivalent", found.document["first_difference"]
    (model,) = found.document["models"]
    assert (model["strategy"], model["loss"]) == ("ddp", "cross-entropy")
    assert (tmp_path / "hidden").exists()
    assert json.loads((tmp_path / "recording" / "record.json").read_text())["models"][0]["recorded"]


BAD = {
    "crash": ("import torch\nraise ValueError('no such column: text')", 1, "exit status 1: ValueError: no such column"),
    "status": ("import sys\nprint('disk full', file=sys.stderr)\nsys.exit(3)", 3, "exit status 3: disk full"),
    "no-torch": ("print('hello')", 2, "no Python process of it imported torch"),
    "no-model": ("import torch", 2, "no model was prepared"),
    "nothing-trains": (
        "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.AdamW(model.parameters())",
        2,
        "nothing trains: no optimizer step of Linear was taken",
    ),
    "too-short": (
        "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.AdamW(model.parameters())\n"
        "model(torch.ones(2)).sum().backward()\noptimizer.step()",
        2,
        "Linear took 1 optimizer steps, too few",
    ),
}


@pytest.mark.parametrize("kind", nightly_but(BAD, "crash", "no-model"))
def test_a_bad_command_gets_one_line(kind: str, tmp_path: Path) -> None:
    text, status, line = BAD[kind]
    with pytest.raises(ToolkitError) as caught:
        record([sys.executable, script(tmp_path, text)], tmp_path / "recording")
    assert caught.value.exit_code == status
    first, *more = str(caught.value).splitlines()
    assert line in first
    assert more == (["run again without recording, it failed too (exit status 1)"] if kind == "crash" else [])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["train.py"]


def test_a_command_that_fails_only_while_it_is_recorded(tmp_path: Path) -> None:
    text = f"import sys, torch\nif {renamed.NAME!r} in sys.modules:\n    sys.exit('no such attribute')"
    with pytest.raises(RunFailed) as caught:
        record([sys.executable, script(tmp_path, text)], tmp_path / "recording")
    first, part = str(caught.value).splitlines()
    assert first.endswith("exit status 1: no such attribute")
    assert part == "run again without recording, it ended well: recording had a part in it. Please report it"


STARVED = """
import resource, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2048))
EARLY
optimizer = torch.optim.AdamW(model.parameters())

def refuse(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

def limit():
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**24, resource.RLIM_INFINITY))

for at in range(6):
    rows = 4
    if at == STEP:
        BEFORE
    loss = model(torch.ones(rows, 64)).sum()
    if at == STEP:
        BETWEEN
    loss.backward()
    if at == STEP:
        AFTER
    optimizer.step()
    optimizer.zero_grad()
"""
REFUSED = {
    "limit": ({"BEFORE": "limit(); rows = 2**13", "STEP": "1"}, "can't allocate memory: you tried to allocate",
              r"in optimizer step 2 of Sequential \(recorded: steps 1 to 3\), in the forward"),
    "forward": ({"BEFORE": "model[1].forward = refuse", "STEP": "2"}, "OutOfMemoryError: CUDA out of memory",
                r"in optimizer step 3 of Sequential \(recorded: steps 1 to 3\), in the forward"),
    "backward": ({"BETWEEN": "loss.register_hook(refuse)", "STEP": "0"}, "OutOfMemoryError: CUDA out of memory",
                 r"in optimizer step 1 of Sequential \(recorded: steps 1 to 3\), in the backward"),
    "optimizer step": ({"AFTER": "optimizer.register_step_pre_hook(refuse)", "STEP": "1"}, "OutOfMemoryError",
                       r"in optimizer step 2 of Sequential \(recorded: steps 1 to 3\), in the optimizer step"),
    "afterwards": ({"BEFORE": "raise RuntimeError('CUDA error: out of memory')", "STEP": "4"},
                   "RuntimeError: CUDA error", r"after the recorded steps 1 to 3"),
    "early": ({"EARLY": "raise MemoryError", "STEP": "0"}, "exit status 1: MemoryError",
              "before an optimizer was made"),
}  # fmt: skip


@pytest.mark.parametrize("kind", nightly_but(REFUSED, "limit", "backward"))
def test_a_command_that_ends_by_memory_says_where_and_what_recording_took(kind: str, tmp_path: Path) -> None:
    words, error, place = REFUSED[kind]
    text = STARVED
    for name in ("EARLY", "BEFORE", "BETWEEN", "AFTER", "STEP"):
        text = text.replace(name, words.get(name, "pass"))
    with pytest.raises(RunFailed) as caught:
        prove([sys.executable, script(tmp_path, text)], tmp_path / "recording", timeout=120)
    first, where, part, helps, again = str(caught.value).splitlines()
    assert error in first
    assert re.search(rf"^the script ended by memory {place}.*: at most \d+\.\d\d GiB resident$", where), where
    assert re.match(r"recording had taken \d\.\d\d GiB by then, and may have a part", part)
    assert helps.startswith("what helps: ")
    assert again == "run again without recording, it failed too (exit status 1)"


@pytest.mark.nightly
def test_a_recorder_that_finds_no_memory_gives_its_own_back(tmp_path: Path) -> None:
    """Before its optimizer steps. The command goes on to its end; the message says which tensor was largest."""
    limited = STARVED.replace("STEP", "1").replace("EARLY", "pass").replace("BEFORE", "pass").replace("BETWEEN", "pass")
    lifted = "lambda *_: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)"
    after = f"limit(); optimizer.register_step_pre_hook({lifted})"
    text = limited.replace("AFTER", after).replace("64", "1500").replace("rows = 4", "rows = 1")
    with pytest.raises(InputError, match=r"no memory was left for recording, .*: .* is 0\.\d\d GiB"):
        prove([sys.executable, script(tmp_path, text)], tmp_path / "recording", timeout=120)


@pytest.mark.nightly
def test_a_hanging_command_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    child = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    text = f"import subprocess, sys, time\nprint(subprocess.Popen([sys.executable, '-c', {child!r}], "
    text += f"start_new_session=True).pid, file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True)\ntime.sleep(600)"
    with pytest.raises(RunFailed, match="still running after 2 s"):
        record([sys.executable, script(tmp_path, text)], tmp_path / "recording", timeout=2)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("a process of the command is left")
    assert not (tmp_path / "recording").exists()


OWN = """
import torch
from torch import nn

WIDTH = 8

open("ran", "a").write("x")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale, self.twice = nn.Linear(WIDTH, WIDTH), 0.5, False
        self.act, self.open = (lambda x: torch.relu(x * self.scale)), open("ran")
        self.register_buffer("shift", torch.arange(8.0), persistent=False)

    def forward(self, x):
        return (x + self.act(self.fc(x + self.shift))) * (1 + self.twice)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {"width": WIDTH}
        self.blocks, self.head = nn.Sequential(Block(), nn.Dropout(0.1), Block()), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.blocks(x))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model.blocks[0].twice = True  # after the recorder has seen the model
for _ in range(3):
    nn.functional.cross_entropy(model(torch.randn(16, WIDTH)), torch.randint(0, 4, (16,))).backward()
    DEFECT
    optimizer.step()
    optimizer.zero_grad()
"""
WRONG = "model.blocks[2].fc.weight.grad.mul_(1.001)"


@pytest.mark.parametrize("defect", nightly_but(["", WRONG], WRONG))
def test_a_model_of_the_scripts_own_class(defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class is in the main file, which trains at its top level and must not be run again."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, script(tmp_path, OWN.replace("DEFECT", defect or "pass"))]
    found = prove(command, tmp_path / "recording", timeout=200)
    assert found.verdict == ("different" if defect else "equivalent"), found.document["first_difference"]
    assert found.document["models"][0]["loss"] == "cross-entropy"
    if defect:
        assert found.document["first_difference"]["tensor"] == "blocks.2.fc.weight"
    assert any("the plain loop runs a copy" in note for note in found.models[0].outcome.notes)
    assert (tmp_path / "ran").read_text() == "x"
    assert not list((tmp_path / "recording").rglob("*.pickle"))
    with pytest.raises(InputError, match="is not a transformers model class"):
        judge(tmp_path / "recording", Result("verify"))


def test_a_recording_is_complete_when_every_rank_has_written(tmp_path: Path) -> None:
    """With --stop the folder is looked at while it is written."""
    from toolkit.verification.scripts.run import complete

    folder = tmp_path / "models" / "0"
    folder.mkdir(parents=True)
    for name, text, whole in (
        ("world", "", False),
        ("rank0.pt", "", False),
        ("world", "2", False),
        ("rank1.pt", "", True),
    ):
        (folder / name).write_text(text, encoding="utf-8")
        assert complete(tmp_path) == whole


def test_a_model_that_cannot_be_rebuilt(tmp_path: Path) -> None:
    """Its class is defined in a function."""
    text = (
        "import torch\ndef make():\n    class Net(torch.nn.Linear): pass\n    return Net(2, 2)\nmodel = make()\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(3):\n    model(torch.ones(2)).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    )
    with pytest.raises(InputError, match=r"is not a transformers model class.*cannot be copied") as caught:
        prove([sys.executable, script(tmp_path, text)], timeout=60)
    assert len(str(caught.value).splitlines()) == 1


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(InputError, match="accelerat: command not found"):
        record(["accelerat", "launch"], "recording")


def test_a_folder_with_other_things_is_left(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="exists and is not a recording"):
        record([sys.executable, "-c", ""], tmp_path)


def test_a_python_process_without_torch_pays_milliseconds(tmp_path: Path) -> None:
    """The hooks import nothing that the interpreter has not; modules are counted, not time."""
    from toolkit.verification.scripts.run import prepare

    environment = prepare(tmp_path, 3, 0, False)
    code = (
        "import sys; print(len(sys.modules), any(m.split('.')[0] in ('torch', 'json', 'toolkit') for m in sys.modules))"
    )
    messages = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split()
        for env in (dict(os.environ), environment)
    ]
    assert messages[1][1] == "False"
    assert int(messages[1][0]) - int(messages[0][0]) < 25


TRAINS = """
import sys, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
FIRST
for _ in range(3):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_recording_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As on a full disk: no file may grow past a few kB. The command ends well, its own output is all there is."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    reason = r"rank 0 could not write its recording: .* [MG]B are free at .*TMPDIR"
    with pytest.raises(InputError, match=reason) as caught:
        record([sys.executable, script(tmp_path, TRAINS.replace("FIRST", limited))], tmp_path / "recording", timeout=60)
    assert len(str(caught.value).splitlines()) == 1
    assert "Traceback" not in capfd.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.nightly
def test_a_target_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise shutil.Error([(source, target, "[Errno 28] No space left on device")])

    monkeypatch.setattr(shutil, "move", full)
    with pytest.raises(InputError, match=r"-o .*: cannot be written: .*No space left on device") as caught:
        record([sys.executable, script(tmp_path, TRAINS.replace("FIRST", ""))], tmp_path / "recording", timeout=60)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.nightly
def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """By SIGKILL, as the kernel does when memory is out, in the middle of the recorded steps."""
    killed = "    if at == 2 and dist.get_rank() == 1:\n        os.kill(os.getpid(), 9)\n    labels ="
    text = RIGHT.format(here=str(HERE), ranks=2).replace("    labels =", killed, 1)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", script(tmp_path, text)]
    with pytest.raises(RunFailed, match=r"exit status 1: ") as caught:
        prove(launch, tmp_path / "recording", timeout=120)
    assert re.search(
        r"\nrank 1 was ended by SIGKILL \(out of host memory\? [\d.]+ of [\d.]+ GiB were left", str(caught.value)
    )
    assert str(caught.value).splitlines()[2:] == ["run again without recording, it failed too (exit status 1)"]
    assert "still running" not in str(caught.value)
    assert not (tmp_path / "recording").exists()


@pytest.mark.nightly
def test_two_commands_record_to_one_folder(tmp_path: Path) -> None:
    """The one that ends first keeps the folder; the other says so and takes nothing of it away."""
    file = tmp_path / "recording" / "record.json"
    waits = f"import os, time\nwhile not os.path.exists({str(file)!r}):\n    time.sleep(0.1)"
    (tmp_path / "first.py").write_text(TRAINS.replace("FIRST", ""), encoding="utf-8")
    command = [sys.executable, "-m", "toolkit", "record", "-o", str(tmp_path / "recording"), "--", sys.executable]
    first = subprocess.Popen([*command, str(tmp_path / "first.py")], stdout=subprocess.DEVNULL)
    try:
        with pytest.raises(InputError, match="another command wrote this folder meanwhile"):
            record([sys.executable, script(tmp_path, TRAINS.replace("FIRST", waits))], file.parent, timeout=120)
        assert first.wait(60) == 0
    finally:
        first.kill()
    assert json.loads(file.read_text(encoding="utf-8"))["recorded"][-1].endswith("first.py")
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".recording")]


@pytest.mark.nightly
def test_a_recorded_command_that_records_another(tmp_path: Path) -> None:
    """Each process belongs to one recording: the innermost."""
    (tmp_path / "inner.py").write_text(TRAINS.replace("FIRST", ""), encoding="utf-8")
    command = [sys.executable, "-m", "toolkit", "record", "-o", str(tmp_path / "inner"), "--", sys.executable]
    inner = f"import subprocess; subprocess.run({[*command, str(tmp_path / 'inner.py')]!r}, check=True, timeout=180)"
    record([sys.executable, script(tmp_path, TRAINS.replace("FIRST", inner))], tmp_path / "outer", timeout=200)
    for name, file in (("outer", "train.py"), ("inner", "inner.py")):
        kept = json.loads((tmp_path / name / "record.json").read_text(encoding="utf-8"))
        assert kept["recorded"][-1].endswith(file)
        assert len(kept["models"]) == 1


OWN_PACKAGE = """
import sys, torch
sys.path.insert(0, {here!r})
import script_loops as loops
from toolkit.rates import rate

model = loops.llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=rate())
for batch in loops.batches(4):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
import toolkit
assert toolkit.__file__.startswith({folder!r}), toolkit.__file__
"""


def test_a_script_whose_project_has_a_package_called_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ImportError under `prove`, and not alone: the recorder's own package stood in the place of the script's."""
    # ``script_loops`` itself needs this package: a copy without that line.
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "toolkit" / "rates.py").write_text("def rate():\n    return 1e-3\n", encoding="utf-8")
    loops = (HERE / "script_loops.py").read_text(encoding="utf-8")
    own = loops.replace("from toolkit.verification.scripts import catch\n", "")
    assert own != loops
    (tmp_path / "script_loops.py").write_text(own, encoding="utf-8")
    monkeypatch.delenv("PYTHONPATH")
    file = script(tmp_path, OWN_PACKAGE.format(here=str(tmp_path), folder=str(tmp_path)))
    found = prove([sys.executable, file], tmp_path / "recording", timeout=120)
    assert found.verdict == "equivalent", found.document["first_difference"]
