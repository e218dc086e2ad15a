"""Launch scripts in the shapes that public repositories use: what is read, and what is left unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import every_case
from toolkit.linting.engine import lint
from toolkit.linting.files.shell_reader import Command, parse_commands


def one(*lines: str) -> Command:
    (command,) = parse_commands("\n".join(lines) + "\n")
    return command


def flags(*lines: str) -> dict[str, object]:
    return one(*lines).flags.plain()


def arguments(*lines: str) -> dict[str, object]:
    return one(*lines).args.plain()


def test_a_variable_before_further_values() -> None:
    command = one("torchrun train.py --compile $MODE fast --lr 1e-4")
    assert command.args.plain() == {"lr": 1e-4}
    assert set(command.unknown_arguments) == {"compile"}


def test_a_flag_whose_value_is_a_variable_is_written() -> None:
    command = one("accelerate launch --num_machines 2 --main_process_ip $MASTER train.py --bf16 $X")
    assert command.flags.plain() == {"num_machines": 2}
    assert set(command.unknown_flags) == {"main_process_ip"}
    assert set(command.unknown_arguments) == {"bf16"}


@every_case(
    "lines",
    [
        ("DIR=conf", "deepspeed train.py --deepspeed_config $DIR/ds.json"),
        ("export DIR=conf", "deepspeed train.py --deepspeed_config ${DIR}/ds.json"),
        ("ROOT=conf; FILE=$ROOT/ds.json", 'deepspeed train.py --deepspeed_config "$FILE"'),
        ("OPTIONS='--deepspeed_config conf/ds.json'", "deepspeed train.py $OPTIONS"),
        ("OPTIONS=(", "  --deepspeed_config conf/ds.json  # the config", ")", 'deepspeed train.py "${OPTIONS[@]}"'),
    ],
)
def test_assignments_of_the_script_are_resolved(lines: tuple[str, ...]) -> None:
    assert arguments(*lines) == {"deepspeed_config": "conf/ds.json"}


@every_case(
    "lines",
    [
        ("N=2", "N=4", "torchrun --nproc_per_node $N train.py"),
        ("if [ $1 ]; then N=2; else N=4; fi", "torchrun --nproc_per_node $N train.py"),
        ("for N in 1 2; do torchrun --nproc_per_node $N train.py; done",),
        ("N=$(nvidia-smi -L | wc -l)", "torchrun --nproc_per_node $N train.py"),
        ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) train.py",),
        ("torchrun --nproc_per_node `nvidia-smi -L | wc -l` train.py",),
        ("N=${1:-8}", "torchrun --nproc_per_node $N train.py"),
        ("torchrun --nproc_per_node $N train.py",),
        ("read N", "torchrun --nproc_per_node $N train.py"),
    ],
)
def test_what_the_script_does_not_decide_is_unknown(lines: tuple[str, ...]) -> None:
    command = one(*lines)
    assert command.flags.plain() == {}
    assert set(command.unknown_flags) == {"nproc_per_node"}
    assert command.script == "train.py"


def test_words_that_are_only_a_variable_leave_the_command_open() -> None:
    assert one("accelerate launch $FLAGS --num_machines 2 train.py").open_flags
    assert one("torchrun train.py --lr 1 --bf16").open_arguments is False
    extra = one("torchrun train.py --bf16 --lr 1 $EXTRA")
    assert extra.open_arguments
    assert extra.args.plain() == {"bf16": True, "lr": 1}
    assert one("torchrun train.py $EXTRA --lr 1").open_arguments
    assert one('torchrun train.py --lr 1 "$@"').open_arguments


@every_case(
    "redirection",
    ["> log", ">log", "2>&1", "> log 2>&1", "&> log", ">> $LOG", "2>/dev/null", "< in", "&>> log", ">| log"],
)
def test_redirections_are_no_values(redirection: str) -> None:
    assert arguments(f"deepspeed train.py --bf16 {redirection}") == {"bf16": True}
    assert arguments(f"deepspeed train.py --bf16 {redirection} &") == {"bf16": True}
    assert arguments(f"deepspeed train.py --lr 2 {redirection} | tee out") == {"lr": 2}


def test_text_between_markers_is_no_command() -> None:
    script = ("cat <<EOF > run.md", "accelerate launch --nonsense train.py", "EOF", "accelerate launch train.py")
    assert flags(*script) == {}


def test_a_repeated_flag_has_its_last_value() -> None:
    assert arguments("torchrun train.py --lr 1 --lr 2") == {"lr": 2}
    assert one("torchrun train.py --lr 1 --lr $X").args.plain() == {}
    assert one("torchrun train.py --lr $X --lr 2").unknown_arguments == {}


@every_case(
    ("line", "launcher"),
    [
        ("python -m torch.distributed.run --nproc_per_node 2 train.py --lr 1", "torchrun"),
        ("python3 -u -m torch.distributed.launch --nproc_per_node 2 train.py --lr 1", "torchrun"),
        ("uv run torchrun --nproc_per_node 2 train.py --lr 1", "torchrun"),
        ("uv run --extra gpu accelerate launch --num_processes 2 train.py --lr 1", "accelerate"),
        ("srun --jobid 1 -N 2 torchrun --nproc_per_node 2 train.py --lr 1", "torchrun"),
        ("for i in 1 2; do deepspeed --num_gpus 2 train.py --lr 1; done", "deepspeed"),
        ("if true; then deepspeed --num_gpus 2 train.py --lr 1; fi", "deepspeed"),
        ("  else accelerate launch --num_processes 2 train.py --lr 1", "accelerate"),
        ("WANDB_MODE=offline torchrun --nproc_per_node 2 train.py --lr 1", "torchrun"),
        ("env A=1 B=2 accelerate launch --num_processes 2 train.py --lr 1", "accelerate"),
        ("nohup /opt/conda/bin/deepspeed --num_gpus 2 train.py --lr 1 > log 2>&1 &", "deepspeed"),
        ("poetry run accelerate launch --num_processes=2 train.py --lr 1", "accelerate"),
        ("timeout 60 torchrun --nproc_per_node 2 train.py --lr 1", "torchrun"),
    ],
)
def test_ways_to_start_a_launcher(line: str, launcher: str) -> None:
    command = one(line)
    assert (command.launcher, command.script, command.args.plain()) == (launcher, "train.py", {"lr": 1})
    assert 2 in command.flags.plain().values()


@every_case(
    ("line", "launcher"),
    [
        ("swift sft --model Qwen/Qwen2-7B --lora_rank 8", "swift"),
        ("NPROC_PER_NODE=4 swift rlhf --rlhf_type dpo --model x", "swift"),
        ("llamafactory-cli train examples/a.yaml", "llamafactory"),
        ("uv run llamafactory-cli train examples/a.yaml", "llamafactory"),
        ("trl sft --config a.yaml --output_dir out", "trl"),
        ("axolotl train a.yml", "axolotl"),
        ("tune run --nproc_per_node 2 lora_finetune_distributed --config llama", "torchtune"),
    ],
)
def test_commands_of_other_tools(line: str, launcher: str) -> None:
    assert one(line).launcher == launcher


@every_case(
    "line",
    [
        "pip install deepspeed",
        "which torchrun",
        "echo deepspeed train.py",
        "cd swift",
        "git clone x/trl sft",
        "swift --help",
    ],
)
def test_what_starts_nothing(line: str) -> None:
    assert parse_commands(line + "\n") == []


def test_each_command_has_its_own_files_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n")
    (tmp_path / "two.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 2\n")
    command = (
        "accelerate launch --config_file {} train.py --output_dir o --num_train_epochs 1 --save_strategy no --{} True\n"
    )
    (tmp_path / "ok.sh").write_text(command.format("one.yaml", "bf16") + command.format("two.yaml", "fp16"))
    (tmp_path / "swapped.sh").write_text(command.format("one.yaml", "bf16") + command.format("two.yaml", "bf16"))
    (tmp_path / "shared.sh").write_text(command.format("one.yaml", "bf16") + command.format("one.yaml", "fp16"))
    assert [f.code for f in lint(["ok.sh"]).findings if f.code.startswith("XL")] == []
    for script in ("swapped.sh", "shared.sh"):
        found = [(f.code, f.place.line) for f in lint([script]).findings if f.code.startswith("XL")]
        assert found == [("XL201", 2)], script


def test_a_value_that_is_not_known_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch = "accelerate launch --num_machines 2 --num_processes 8 {} train.py\n"
    for given, codes in (("", {"LT502"}), ("--main_process_ip $HEAD", set()), ("$FLAGS", set())):
        (tmp_path / "run.sh").write_text(launch.format(given))
        assert {f.code for f in lint(["run.sh"]).findings} == codes, given


def test_a_config_behind_a_variable_is_not_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("deepspeed train.py --deepspeed --deepspeed_config $DIR/x.json\n")
    (found,) = lint(["run.sh"]).findings
    assert (found.code, found.severity, found.key) == ("KY104", "note", "deepspeed_config")


@every_case(
    ("inside", "found"),
    [
        ('dirname "$0"', "/made"),
        ("dirname $0", "/made"),
        ('cd "$(dirname "${BASH_SOURCE[0]}")" && pwd', "/made"),
        ('cd "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd', "/made"),
        ('dirname "$(readlink -f "$0")"', "/made"),
        ('dirname "$(realpath "${BASH_SOURCE}")"', "/made"),
        ('cd "$(dirname "$0")/.." && pwd', "/made/.."),
        ('cd "$(dirname "$0")/../conf" && pwd -P', "/made/../conf"),
        ('cd "$(dirname "$1")" && pwd', None),
        ("pwd", None),
        ('dirname "$0" | tr a b', None),
    ],
)
def test_the_folder_of_the_script_itself(inside: str, found: str | None) -> None:
    for text in (
        f'accelerate launch --config_file "$({inside})/a.yaml" train.py\n',
        f'here="$({inside})"\naccelerate launch --config_file $here/a.yaml train.py\n',
    ):
        (command,) = parse_commands(text, "/made")
        assert command.flags.plain() == ({"config_file": f"{found}/a.yaml"} if found else {})
        (command,) = parse_commands(text)
        assert set(command.unknown_flags) == {"config_file"}


def test_the_file_beside_a_script_is_checked_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `toolkit config` writes them; the working directory has another file of that name."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    (tmp_path / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    (tmp_path / "made" / "launch.sh").write_text(
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
        'exec accelerate launch --config_file "$here/accelerate.yaml" --num_processes 8 train.py\n'
    )
    monkeypatch.chdir(tmp_path)
    found = [(finding.code, finding.key) for finding in lint(["made/launch.sh"]).findings]
    assert ("KY104", "config_file") not in found
    assert {str(Path(source.path).resolve()) for source in lint(["made/launch.sh"]).sources} == {
        str(tmp_path / "made" / name) for name in ("launch.sh", "accelerate.yaml")
    }
