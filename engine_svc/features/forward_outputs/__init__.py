"""Hidden states and chosen experts of a request's positions, beside its tokens.

1. `wire` reads what an ADD asks for, and checks its size against `--max-forward-output-bytes`.
2. The prompt is computed as a whole: positions from the prefix cache would have none.
3. `runner` has the forward keep both, and copies the positions of its rows.
4. `scheduler` leaves out positions of drafts that were rejected, and those that a preempted request repeats.
5. The rest goes to the client with the row of the step, in several messages if it is large.
"""
