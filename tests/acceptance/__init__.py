"""Acceptance: promises about answers that hold for whole corpora, models and loads, on real processes.

    make test-acceptance                              # a short cell of each, with the embedded model
    make test-acceptance ARGS="--maskbench FOLDER --model FOLDER"
    python -m tests.acceptance SCENARIO --help        # one in full, with its options; --json writes a report

`scenarios/` has one module or folder for each, `rig/` the loads, languages and checkpoints that they use.
The reports cited in docs/performance.md are in benchmarks/results. A missing prerequisite is a failure.
"""
