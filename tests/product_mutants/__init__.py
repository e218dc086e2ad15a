"""Defects planted in the product's own code, one at a time: does the default set of tests find each of them?

``mutants/*.toml`` lists them: a text that occurs once in ``toolkit/``, what replaces it, and what a user would suffer.
The file is found by the text, so code may move and be formatted anew. A change of the text itself is noticed by
``test_list.py``: the entry then follows the code, or goes with it.

    python -m tests.product_mutants check        # every text is there once; seconds
    python -m tests.product_mutants map          # once: which test runs which line; longer than the default set
    python -m tests.product_mutants run --resume # a copy of the tree with one mutant after another; hours
    python -m tests.product_mutants table        # Markdown

``run`` begins with the tests that run the mutated line, the fastest first, and goes on to the rest of the set only if
all of them pass. A mutant is killed by a test that fails with it, fails again by itself, and passes without it. One
that survives shows a test that is missing.
"""
