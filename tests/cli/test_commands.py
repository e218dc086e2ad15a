"""The installed command: exit statuses, one message, nothing half-written, and the same job by two ways."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import toolkit
from nights import nightly_but
from signalled import TOOLKIT, metrics, steps, write_recipe
from tiny import make_text
from toolkit.__main__ import main
from toolkit.errors import InputError
from toolkit.launch.command import TrainOptions
from toolkit.launch.job import train


def call(*arguments: str, cwd: Path, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOOLKIT, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def here(tmp_path: Path, tiny_root: Path) -> Path:
    """A folder with a recipe, run from within."""
    write_recipe(tmp_path, tiny_root)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_root: Path, launches: None) -> Path:
    """A folder in which the recipe has been trained, with the result of the command."""
    folder = tmp_path_factory.mktemp("trained")
    write_recipe(
        folder,
        tiny_root,
        data={"eval": str(tiny_root / "eval.jsonl")},
        strategy={"name": "zero2"},
        run={"output_dir": "run", "save_every": 3, "eval_every": 2, "trackers": ["tensorboard"]},
    )
    done = call("train", "r.yaml", "--json", "result.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "active: processes connected 2" in done.stdout
    chatter = re.findall("warning|deprecated", done.stdout + done.stderr, re.IGNORECASE)
    assert chatter == [], "the packages' chatter belongs into the logs"
    for log in (folder / "run/logs").glob("rank*.log"):
        own = re.escape(str(Path(toolkit.__file__).parent))
        ours = re.findall(rf"{own}/.*: \w*Warning: .*", log.read_text())
        assert ours == [], "a call of ours makes a package warn"
    return folder


@pytest.fixture
def again(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to train in again."""
    return shutil.copytree(trained, tmp_path / "again")


def test_train_writes_its_result(trained: Path) -> None:
    here, result = trained, json.loads((trained / "result.json").read_text())
    assert {"schema", "command", "recipe_sha256", "versions", "device", "started", "seconds"} <= result.keys()
    lines = metrics(here / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert result["final_loss"] == lines[-1]["loss"]
    assert result["tokens"] == sum(line["tokens"] for line in lines)
    assert len(result["peak_memory_bytes"]) == 2
    assert min(result["peak_memory_bytes"]) > 100 << 20, "each process holds torch alone in more"
    assert result["checkpoint"] == "run/checkpoints/step-00000004"
    assert [json.loads(line)["step"] for line in (here / "run/eval.jsonl").read_text().splitlines()] == [2, 4]
    assert list((here / "run").rglob("events.out.tfevents*"))


@pytest.mark.usefixtures("launches")
def test_accelerate_launch_is_the_same_job(here: Path) -> None:
    assert call("train", "r.yaml", "strategy.name=fsdp2", cwd=here).returncode == 0
    assert call("config", "r.yaml", "strategy.name=fsdp2", "-o", "files", cwd=here).returncode == 0
    overrides = ["strategy.name=fsdp2", "run.output_dir=other"]
    command = ["-m", "accelerate.commands.launch", "--config_file", "files/accelerate.yaml", "-m", "toolkit.train"]
    subprocess.run(
        [sys.executable, *command, "r.yaml", *overrides], cwd=here, check=True, timeout=240, capture_output=True
    )
    assert steps(here / "run") == steps(here / "other")


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_launched_for_another_strategy_is_refused(here: Path) -> None:
    assert call("config", "r.yaml", "strategy.name=fsdp2", "-o", "files", cwd=here).returncode == 0
    command = ["-m", "accelerate.commands.launch", "--config_file", "files/accelerate.yaml", "-m", "toolkit.train"]
    done = subprocess.run(
        [sys.executable, *command, "r.yaml", "strategy.name=zero2"],
        cwd=here, check=False, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "launched for FSDP, but the recipe's strategy is zero2" in done.stderr


def test_resume_goes_on(again: Path) -> None:
    whole = steps(again / "run")
    shutil.rmtree(again / "run" / "checkpoints" / "step-00000004")
    done = call("train", "r.yaml", "--resume", cwd=again)
    assert "resumed from run/checkpoints/step-00000003" in done.stdout
    assert steps(again / "run") == whole


def test_a_second_start_keeps_the_first(again: Path) -> None:
    whole = steps(again / "run")
    assert call("train", "r.yaml", cwd=again).returncode == 0
    assert steps(again / "run.1") == whole


BAD: dict[str, tuple[list[str], str]] = {
    "unknown key": (["run.sead=1"], "did you mean seed?"),
    "wrong type": (["run.seed=x"], "should be a valid integer"),
    "no such data": (["data.train=absent.jsonl"], "command line: data.train=absent.jsonl: data.train: absent.jsonl"),
    "empty data": (["data.train=empty.jsonl"], "empty.jsonl is empty"),
    "missing field": (["data.train=other.jsonl"], "other.jsonl:1: text: missing"),
    "malformed line": (["data.train=torn.jsonl"], "torn.jsonl:4: not valid JSON"),
    "targets match nothing": (['adapter={r: 4, target_modules: [foo]}'], "'foo' matches no module; linear layers of "
        "this model"),
    "a GPU that is not there": (["machine.device=cuda"], "command line: machine.device=cuda: machine.device: cuda, but "
        "this machine has no GPU"),
    "misspelt section": (["optimzer.lr=1e-4"], "command line: optimzer.lr=1e-4: optimzer: unknown key; did you mean "
        "optimizer?"),
    "a section for a value": (["strategy=fsdp2"], "command line: strategy=fsdp2: strategy: is a section, not a value "
        "(given: 'fsdp2'); did you mean strategy.name?"),
    "not an override": (["zero3"], "command line: zero3: an override has the form section.key=value"),
    "contradiction of an override": (["strategy.name=single"], "command line: strategy.name=single: strategy.name: "
        "single runs in one process"),
    "contradiction within a section": (["batch.global_size=7"], "command line: batch.global_size=7: batch: "),
    "the file's own mistake beside an override": (["run.seed=1", "data.train=gone.jsonl"], "command line: "
        "data.train=gone.jsonl: data.train: gone.jsonl"),
    "fp16 under DeepSpeed on a CPU": (["precision=fp16", "strategy.name=zero2"], "DeepSpeed runs fp16 on a GPU only"),
    "cannot offload": (["strategy.offload=all"], "ddp cannot offload"),
    "unknown wrap class": (["strategy={name: fsdp2, wrap: [Foo]}"], "no block of class Foo; its repeated modules"),
    "impossible model": (["model.config={model_type: llama, hidden_size: 30, num_attention_heads: 7}"], "model"),
}  # fmt: skip


COMMANDS = (
    ("config", "r.yaml", "-o", "out"), ("train", "r.yaml"), ("verify", "r.yaml"), ("plan", "r.yaml"),
    ("bench", "r.yaml"), ("data", "r.yaml"), ("import", "axolotl.yaml"),
)  # fmt: skip
OVERRIDES = {
    "optimzer.lr=1e-4": "optimzer: unknown key; did you mean optimizer?",
    "strategy=fsdp2": "strategy: is a section, not a value (given: 'fsdp2'); did you mean strategy.name?",
    "run.seed=x": "run.seed: input should be a valid integer (given: 'x')",
    "strategy.name=single": "strategy.name: single runs in one process",
}


def test_every_command_names_the_command_line_for_what_it_says(
    subtests: pytest.Subtests, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = "datasets: [{path: org/data, type: completion}]"
    (here / "axolotl.yaml").write_text(f"base_model: a/b\n{datasets}\nmicro_batch_size: 1\nlearning_rate: 1e-4\n")
    monkeypatch.chdir(here)
    before = sorted(path.name for path in here.iterdir())
    for command in COMMANDS:
        for override, expected in OVERRIDES.items():
            if command[0] == "import" and override == "strategy.name=single":
                continue  # right there: the files say one process
            with subtests.test(command[0], override=override):
                monkeypatch.setattr(sys, "argv", ["toolkit", *command, override])
                with pytest.raises(SystemExit) as ended:
                    main()
                said = capsys.readouterr()
                assert (ended.value.code, said.out) == (2, ""), said
                assert said.err.startswith(f"command line: {override}: {expected}"), said.err
                assert sorted(path.name for path in here.iterdir()) == before


LATE = ("targets match nothing", "unknown wrap class", "impossible model")
"""Found by the ranks, once they have a model."""


def check_refusal(done: subprocess.CompletedProcess[str], expected: str) -> None:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count(expected) == 1, done.stderr


def test_bad_input_is_exit_2_and_writes_nothing(
    subtests: pytest.Subtests, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty.jsonl").write_text("")
    (here / "other.jsonl").write_text('{"txt": "a"}\n')
    make_text(here / "torn.jsonl", 3)
    with (here / "torn.jsonl").open("a") as file:
        file.write('{"text": "cut of\n')
    before = sorted(path.name for path in here.iterdir())
    monkeypatch.chdir(here)
    for case, (overrides, expected) in BAD.items():
        if case not in LATE:
            with subtests.test(case):
                monkeypatch.setattr(sys, "argv", ["toolkit", "train", "r.yaml", *overrides])
                with pytest.raises(SystemExit) as ended:
                    main()
                said = capsys.readouterr()
                check_refusal(subprocess.CompletedProcess([], int(ended.value.code or 0), said.out, said.err), expected)
                assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("case", nightly_but(LATE, "targets match nothing"))
def test_what_the_ranks_find_is_exit_2_and_leaves_nothing(case: str, here: Path) -> None:
    before = sorted(path.name for path in here.iterdir())
    overrides, expected = BAD[case]
    check_refusal(call("train", "r.yaml", *overrides, cwd=here), expected)
    assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_a_folder_of_another_recipe_is_left_alone(here: Path) -> None:
    assert call("train", "r.yaml", cwd=here).returncode == 0
    before = steps(here / "run")
    done = call("train", "r.yaml", "run.seed=8", cwd=here)
    assert done.returncode == 2
    assert "another recipe" in done.stderr
    assert steps(here / "run") == before
    (here / "docs").mkdir()
    (here / "docs" / "mine.txt").write_text("mine")
    done = call("train", "r.yaml", "run.output_dir=docs", cwd=here)
    assert (done.returncode, (here / "docs" / "mine.txt").read_text()) == (2, "mine")


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_bad_data_in_the_middle_of_a_run_takes_no_checkpoint_away(here: Path) -> None:
    # Beyond the rows that are looked at before the start, and beyond those that a worker has read ahead of step 2.
    make_text(here / "long.jsonl", 10_200)
    with (here / "long.jsonl").open("a") as file:
        file.write('{"text": 3}\n')
    streamed = ["data.train=long.jsonl", "data.streaming=true", "data.shuffle=false", "data.max_length=8"]
    batch = ["batch.micro_size=256", "batch.accumulation=1", "model.config.hidden_size=8"]
    done = call("train", "r.yaml", *streamed, *batch, "run.max_steps=500", "run.save_every=5", cwd=here)
    assert done.returncode == 2, done.stderr
    assert "long.jsonl:10201: text: must be a string" in done.stderr
    assert (here / "run/checkpoints/step-00000015/manifest.json").exists()
    assert len(metrics(here / "run")) >= 15


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_a_second_run_in_a_live_folder_is_refused(here: Path) -> None:
    command = [*TOOLKIT, "train", "r.yaml", "run.max_steps=100000"]
    job = subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        log = here / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not log.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for resume in ([], ["--resume"]):
            second = call("train", "r.yaml", "run.max_steps=100000", *resume, cwd=here)
            assert second.returncode == 2
            assert "directory in use by a running job" in second.stderr
        assert not (here / "run.1").exists()
        assert job.poll() is None, "the first run goes on"
    finally:
        job.send_signal(signal.SIGINT)
        os.kill(_rank_pid(job.pid, 0), signal.SIGKILL)
        job.wait(60)


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_a_damaged_checkpoint_is_reported_on_resume(here: Path) -> None:
    saving = ["run.save_every=2", "run.max_steps=4"]
    assert call("train", "r.yaml", *saving, cwd=here).returncode == 0
    weights = here / "run/checkpoints/step-00000004/weights-00000-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    again = call("train", "r.yaml", *saving, "--resume", cwd=here)
    assert again.returncode == 0
    assert "skipping an invalid checkpoint" in again.stdout
    assert "resumed from run/checkpoints/step-00000002" in again.stdout


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_a_loss_that_is_not_finite_fails_the_run(here: Path) -> None:
    done = call(
        "train", "r.yaml", "optimizer.lr=1e30", "optimizer.max_grad_norm=null", "schedule.warmup_steps=0", cwd=here
    )
    assert done.returncode == 1
    assert "the loss is not finite" in done.stderr


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("strategy", "sent", "said"),
    [
        pytest.param(
            "ddp",
            signal.SIGKILL,
            r" \(out of host memory\? [\d.]+ of [\d.]+ GiB were left .*\); see",
            marks=pytest.mark.nightly,
        ),
        ("zero3", signal.SIGABRT, r' \(.*in File ".+", line \d+ in .+\); see'),
    ],
)
def test_a_killed_rank_ends_the_job_within_seconds(strategy: str, sent: signal.Signals, said: str, here: Path) -> None:
    command = [*TOOLKIT, "train", "r.yaml", f"strategy.name={strategy}", "run.max_steps=100000"]
    job = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        log = here / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().count("\n") > 3):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(_rank_pid(job.pid, 1), sent)
        _, output = job.communicate(timeout=60)  # the other rank waits in a collective for ever
        assert job.returncode == 1
        assert re.search(f"rank 1 was ended by {sent.name}{said}", output), output
    finally:
        job.kill()


def _rank_pid(launcher: int, rank: int) -> int:
    """The process below ``launcher`` that torchrun gave ``rank``."""
    import psutil

    for process in psutil.Process(launcher).children(recursive=True):
        if "toolkit.train" in process.cmdline() and process.environ().get("RANK") == str(rank):
            return process.pid
    raise AssertionError("no such rank")


# Measured: 0.9 and 3.0 times the libraries that every command needs; importing torch alone is above 15.
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("arguments", "limit"), [(["--help"], 2), (["config", "r.yaml", "-o", "out"], 6)])
def test_commands_cost_little_more_than_the_libraries_that_they_need(
    arguments: list[str], limit: float, here: Path
) -> None:
    libraries = [sys.executable, "-c", "import typer, pydantic, yaml"]
    ours, theirs = (min(seconds_of(words, here) for _ in range(4)) for words in ([*TOOLKIT, *arguments], libraries))
    assert ours < limit * theirs, (ours, theirs)


def seconds_of(words: list[str], here: Path) -> float:
    """Processor seconds of a command: what it costs, not what else the machine is doing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert subprocess.run(words, cwd=here, capture_output=True, timeout=60, check=False).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("command", [["config", "r.yaml", "-o", "out", "--explain"], ["train", "--help"], ["init"]])
def test_commands_that_only_read_and_write_files_import_no_torch(command: list[str], here: Path) -> None:
    code = "import sys; sys.argv[1:] = sys.argv[1:]; from toolkit.__main__ import main\n"
    code += (
        "try: main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=here, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("launches")
def test_init_writes_a_recipe_that_is_valid(here: Path) -> None:
    done = call("init", "-o", "new.yaml", "--model", "a/b", "--lora", "8", "--strategy", "zero3", cwd=here)
    assert done.returncode == 0, done.stderr
    recipe = yaml.safe_load((here / "new.yaml").read_text())
    assert (recipe["model"]["path"], recipe["adapter"]["r"], recipe["strategy"]["name"]) == ("a/b", 8, "zero3")
    assert call("init", "-o", "new.yaml", cwd=here).returncode == 2
    assert call("init", "-o", "x.yaml", "--precision", "bf15", cwd=here).returncode == 2
    assert not (here / "x.yaml").exists()


def test_verify_names_the_dry_run_as_the_next_step() -> None:
    """It has proven a small model; whether the real one takes the data is not known yet."""
    from toolkit.verification.screen import ending

    outcome: Any = SimpleNamespace(verdict="equivalent", passes=[], deviations=[], reorderings=[])
    assert ending(outcome, 1.0, "r.yaml")[-1] == "next: toolkit train r.yaml --dry-run"


def test_a_dry_run_does_not_resume(capfd: pytest.CaptureFixture[str]) -> None:
    from toolkit.training.rank import main as rank_main

    with pytest.raises(InputError, match="--dry-run: starts from the model, not from a checkpoint"):
        train(TrainOptions("r.yaml", resume=True, dry_run=True))
    assert rank_main(["r.yaml", "--dry-run", "--resume"]) == 2
    assert "--dry-run: starts from the model" in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
def test_a_dry_run_leaves_nothing_and_says_what_it_took(here: Path) -> None:
    temporary = here / "temporary"
    temporary.mkdir()
    before = sorted(here.iterdir())
    done = call("train", "r.yaml", "--dry-run", "--json", "-", cwd=here, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["steps"] == 0
    assert all(check["ok"] for check in result["preflight"])
    assert min(result["peak_memory_bytes"]) > 2**20
    alone = subprocess.run(
        [sys.executable, "-m", "toolkit.train", "r.yaml", "machine.processes=1", "strategy.name=single", "--dry-run"],
        cwd=here, env=os.environ | {"TMPDIR": str(temporary)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    assert "peak memory (resident, before the optimizer's first update): " in alone.stdout
    assert [path for path in temporary.iterdir() if "toolkit" in path.name] == []
    broken = call("train", "r.yaml", "--dry-run", "model.config.rms_norm_eps=.nan", cwd=here, TMPDIR=str(temporary))
    assert broken.returncode == 1, broken.stderr
    assert "the loss of the longest micro-batch is nan" in broken.stderr
    assert sorted(here.iterdir()) == before
