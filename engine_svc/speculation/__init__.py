"""Speculative decoding. A step computes drafts after a row's newest token, and accepts those that equal what
the noise of their positions draws: answers do not depend on drafts.

Engine thread, without torch: `limit` (how many drafts pay), `accounting` (tokens that are planned, but not
known). Device side, without a scheduler: `drafting` (a step's drafts), `proposer` (the protocol),
`text_proposers`, `network` with `heads`. `engine_svc/build/speculation.py` chooses and measures.
"""
