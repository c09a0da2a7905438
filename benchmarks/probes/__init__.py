"""Programs that `benchmarks.paired` runs inside another checkout.

They use public entry points alone (`triptych.LLM`, the command line, the gRPC API), so that they run in
every commit, and print one JSON object of metrics as their last line.
"""
