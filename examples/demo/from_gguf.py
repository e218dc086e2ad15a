"""Convert a GGUF file to a folder of float32 weights with its tokenizer: `python from_gguf.py FILE FOLDER`.

transformers reads the file with the package `gguf`, and refuses to save the model that it made. The weights go into a
fresh model of the same config.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    del read.config.quantization_config  # of the file; what is saved is float32
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
