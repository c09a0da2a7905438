"""PYTHON -m benchmarks.contestants.llama_cpp FILE ROWS TOKENS THREADS: llama.cpp, all sequences in one batch.

ROWS: sequences at once, of at most TOKENS each. Uses the C interface that llama-cpp-python publishes; the
largest logit is found with numpy.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp
import numpy as np

from benchmarks.contestants.jobs import Job, Prompts, serve

_BATCH_TOKENS = 4096
_CELLS_AT_ONCE = 256


class Context:
    """A loaded model with room for some sequences of so many tokens."""

    def __init__(self, path: str, max_sequences: int, max_tokens: int, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        # Kept, as the library only has its address.
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        model_options = llama_cpp.llama_model_default_params()
        model_options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), model_options)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._num_logits = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = -(-max_tokens // _CELLS_AT_ONCE) * _CELLS_AT_ONCE * max_sequences
        options.n_batch = _BATCH_TOKENS
        options.n_seq_max = max_sequences
        options.n_threads = options.n_threads_batch = num_threads
        options.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._computed: Prompts = []  # tokens of each sequence in the context's memory

    def generate(self, prompts: Prompts, job: Job) -> list[list[int]]:
        """Greedy tokens of each prompt. What is computed of the job before stays if all prompts begin so."""
        if job.json_schema:
            raise SystemExit("llama.cpp is not measured with constraints")
        if len(self._computed) != len(prompts) or not all(
            len(ids) < len(prompt) and prompt[: len(ids)] == ids
            for prompt, ids in zip(prompts, self._computed, strict=True)
        ):
            # Without writing zeros, as its server clears a sequence.
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
            self._computed = [[] for _ in prompts]
        starts = [len(ids) for ids in self._computed]
        waiting = [(row, start, prompts[row][start:]) for row, start in enumerate(starts)]
        newest: dict[int, int] = {}
        while waiting:
            taken: list[tuple[int, int, list[int]]] = []
            room = _BATCH_TOKENS
            while waiting and len(waiting[0][2]) <= room:
                taken.append(waiting.pop(0))
                room -= len(taken[-1][2])
            newest |= self._step(taken)
        answers = [[newest[row]] for row in range(len(prompts))]
        for step in range(job.num_output_tokens - 1):
            newest = self._step(
                [(row, len(prompts[row]) + step, answer[-1:]) for row, answer in enumerate(answers)]
            )
            for row, answer in enumerate(answers):
                answer.append(newest[row])
        self._computed = [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
        return answers

    def _step(self, rows: list[tuple[int, int, list[int]]]) -> dict[int, int]:
        """Compute (sequence, first position, tokens) rows; the next token of each sequence."""
        batch, place = self._batch, 0
        last: dict[int, int] = {}
        for sequence, start, tokens in rows:
            for offset, token in enumerate(tokens):
                batch.token[place] = token
                batch.pos[place] = start + offset
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = sequence
                batch.logits[place] = offset == len(tokens) - 1
                place += 1
            last[sequence] = place - 1
        batch.n_tokens = place
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp failed to decode")
        return {sequence: self._best_token(place) for sequence, place in last.items()}

    def _best_token(self, place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._num_logits,)).argmax())


def main() -> None:
    path, *numbers = sys.argv[1:]
    context = Context(path, *map(int, numbers))
    serve("llama.cpp", context.generate)


if __name__ == "__main__":
    main()
