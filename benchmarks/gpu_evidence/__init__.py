"""Evidence from a GPU: ``python -m benchmarks.gpu_evidence PART... --out DIR``, see docs/gpu-evidence.md.

A part is a list of named cells. A cell's result is a small JSON file of its own, so that a part can be stopped at any
moment and resumed; a part's summary is ``DIR/PART.json``.
"""
