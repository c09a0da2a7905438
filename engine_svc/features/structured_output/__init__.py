"""Outputs that belong to a language which the request names.

1. `wire` reads the constraint from the ADD as its client wrote it, and refuses what can be none.
2. The request is blocked; each rank that samples prepares it in a thread beside its steps (`runner`).
3. `grammars` looks for an equal constraint that was compiled or refused before.
4. What has schemas or is large goes to the `grammar_worker`, a process with limits on time and memory.
5. There `check` rewrites schemas (`json_schema/`) for a backend that enforces all, or refuses by keyword.
6. There `llguidance_text` writes the grammar, and what is large is compiled to see what it costs.
7. The backend compiles the grammar for the vocabulary, once, and the request is admitted; a refusal ends it
   before any output, with a status, a reason and the field.
8. In each step `runner` advances the matchers and makes masks while the forward runs, and applies them.
9. A constraint behind reasoning begins with the end of that; drafts that leave the language are masked.
10. `scheduler` ends an output that ignores its end token where the language has ended.
"""
