"""Text workers: what hangs, grows or dies costs one piece of work its status, and nothing else."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from frontend_svc.text.tokenize.id_column import id_column
from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.workers.frames import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    Frame,
    FrameError,
    FrameReader,
    pack_head,
    unpack_numbers,
)
from frontend_svc.text.workers.link import WorkerLink
from frontend_svc.text.workers.work_queue import LONG_BYTES, Work, WorkQueue
from frontend_svc.text.workers.workers import TextWorkers, noting_wait
from tests.frontend_svc.tokenizers import SAMPLES, byte_level_tokenizer
from tests.processes import running, source_environment
from triptych_kit.errors import Internal, InvalidArgument, ResourceExhausted, ServiceError, Unavailable
from triptych_kit.security.identity import Identity, Role, bind_identity

# Limits are short where something is to run into them, and long where nothing may.
SHORT_S = 1.0
WAIT_S = 60.0
MakeWorkers = Callable[..., TextWorkers]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Each run of letters takes a regular expression with nested repeats milliseconds; all of them take a minute.
SLOW_TEXT = ("x" * 20 + " ") * 10_000


@pytest.fixture
async def make_workers() -> AsyncIterator[MakeWorkers]:
    made: list[TextWorkers] = []

    def make(*arguments, **options) -> TextWorkers:
        made.append(TextWorkers(*arguments, **options))
        return made[-1]

    yield make
    for workers in made:
        await workers.close()


def files(template: str = "", tokenizer: Tokenizer | None = None) -> TextFiles:
    config = json.dumps({"chat_template": template}).encode() if template else b""
    return TextFiles((tokenizer or byte_level_tokenizer()).to_str().encode(), config)


def slow_tokenizer() -> Tokenizer:
    """A tokenizer whose pre-tokenizer is a regular expression with nested repeats."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "ok": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    return tokenizer


def chat(template: str = "") -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"}], "chat_template": template}


async def encode(workers: TextWorkers, text: str, given: TextFiles | None = None) -> list[int]:
    return await workers.encode(given or files(), text, add_special_tokens=False)


async def refusal(workers: TextWorkers, text: str, given: TextFiles) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await encode(workers, text, given)
    return caught.value


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  What processes do sets no event.
            await asyncio.sleep(0)


async def test_short_texts_of_one_task_get_their_own_tokens(make_workers):
    workers, raw = make_workers(1, time_limit_s=WAIT_S), byte_level_tokenizer()
    texts = {f"inputs[{index}]": text for index, text in enumerate(("", *SAMPLES, "a"))}
    got = await workers.encode_all(files(), texts, add_special_tokens=False)
    assert got == [raw.encode(text, add_special_tokens=False).ids for text in texts.values()]


async def test_a_refused_text_of_several_is_named(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S)
    given = files(tokenizer=Tokenizer(models.WordLevel({"ok": 0}, unk_token="[none]")))
    with pytest.raises(InvalidArgument) as caught:
        await workers.encode_all(given, {"inputs[0]": "ok", "inputs[1]": "else"}, add_special_tokens=False)
    assert [field for field, _ in caught.value.violations] == ["inputs[1]"]


@pytest.mark.parametrize("num_processes", [1, 2])
async def test_a_thousand_texts_at_once_each_get_their_own_tokens_in_order(make_workers, num_processes):
    workers = make_workers(num_processes, time_limit_s=WAIT_S)
    raw, given = byte_level_tokenizer(), files()
    texts = [f"{SAMPLES[index % len(SAMPLES)]} {index}" * (1 + index % 7) for index in range(1000)]
    order: list[int] = []

    async def one(index: int) -> list[int]:
        ids = await encode(workers, texts[index], given)
        order.append(index)
        return ids

    got = await asyncio.gather(*(one(index) for index in range(len(texts))))
    assert got == [raw.encode(text, add_special_tokens=False).ids for text in texts]
    # Of two workers one may be the faster one.
    assert (order if num_processes == 1 else sorted(order)) == list(range(len(texts)))


async def test_large_texts_cross_the_pipe_whole(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S)
    text = "".join(SAMPLES) * 3000
    ids = await encode(workers, text)
    assert len(ids) > 65536
    assert await workers.decode(files(), ids, skip_special_tokens=False) == text


async def test_a_tokenizer_that_hangs_costs_one_text_its_status_and_a_worker_its_life(make_workers):
    workers = make_workers(1, time_limit_s=SHORT_S)
    slow = files(tokenizer=slow_tokenizer())
    await workers.load(slow)
    (first_id,) = workers.process_ids
    hanging = asyncio.create_task(refusal(workers, SLOW_TEXT, slow))
    waiting = [asyncio.create_task(encode(workers, "ok", slow)) for _ in range(5)]
    error = await hanging
    assert isinstance(error, InvalidArgument)
    assert error.reason == "TEXT_TIME_LIMIT"
    assert error.violations == [("prompt", "prompt took longer than the limit of 1 s to be processed")]
    assert await asyncio.gather(*waiting) == [[1]] * 5
    assert first_id not in workers.process_ids


async def test_others_go_on_beside_a_tokenizer_that_hangs(make_workers):
    workers = make_workers(2, time_limit_s=WAIT_S)
    slow = files(tokenizer=slow_tokenizer())
    hanging = asyncio.create_task(encode(workers, SLOW_TEXT, slow))
    for _ in range(20):
        assert await encode(workers, "ok", slow) == [1]
    assert not hanging.done()
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_a_panic_of_the_library_is_the_text_s_fault_and_its_worker_is_replaced(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S)
    slow = files(tokenizer=slow_tokenizer())
    error = await refusal(workers, "x" * 40, slow)
    assert (type(error), error.reason) == (InvalidArgument, "TEXT_REFUSED")
    assert await encode(workers, "ok", slow) == [1]


@pytest.mark.parametrize(
    ("template", "reason", "words"),
    [
        (LOOPS, "TEXT_TIME_LIMIT", "limit of 1 s"),
        ("{{ 'x' * 1000000000 }}", "TEXT_REFUSED", "memory"),
        ("{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "TEXT_REFUSED", "more than 1000 char"),
        ("{{ raise_exception('roles must alternate') }}", "TEXT_REFUSED", "roles must alternate"),
        ("{% if %}", "TEXT_REFUSED", "cannot be used"),
    ],
    ids=["loops", "grows at once", "grows in pieces", "raises", "does not compile"],
)
async def test_a_bad_template_costs_one_conversation_its_status(make_workers, template, reason, words):
    workers = make_workers(1, time_limit_s=SHORT_S if template is LOOPS else WAIT_S)
    with pytest.raises(InvalidArgument, match=words) as caught:
        await workers.render(files(template), {**chat(), "chat_template": None}, max_chars=1000)
    assert caught.value.reason == reason
    assert [field for field, _ in caught.value.violations] == ["messages"]
    assert await workers.render(files(template), chat("{{ messages[0].content }}"), max_chars=1000) == "hi"


async def test_rendering_and_tokenizing_in_one_go_is_both(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S)
    given = files("<|end|>{{ messages[0].content }} 日本")
    text, ids = await workers.render_and_encode(given, {**chat(), "chat_template": None})
    assert text == "<|end|>hi 日本"
    assert ids == byte_level_tokenizer().encode(text, add_special_tokens=False).ids


async def test_work_of_a_worker_that_was_killed_is_done_once_more(make_workers, tmp_path: Path):
    script = str(Path(__file__).with_name("dying_worker.py"))
    workers = make_workers(1, time_limit_s=WAIT_S, command=(sys.executable, script, str(tmp_path / "1"), "1"))
    assert await encode(workers, "x") == [1]
    workers = make_workers(1, time_limit_s=WAIT_S, command=(sys.executable, script, str(tmp_path / "2"), "2"))
    error = await refusal(workers, "x", files())
    assert (type(error), error.reason) == (Internal, "TEXT_WORKER_DIED")
    assert await encode(workers, "x") == [2]


async def test_kill_in_the_middle_ends_no_other_work(make_workers):
    workers = make_workers(2, time_limit_s=WAIT_S)
    slow = files(tokenizer=slow_tokenizer())
    await asyncio.gather(*(encode(workers, "ok", slow) for _ in range(10)))
    hanging = asyncio.create_task(refusal(workers, SLOW_TEXT, slow))
    others = [asyncio.create_task(encode(workers, f"ok {index}", slow)) for index in range(200)]
    for _ in range(2):
        await until(lambda: len(workers.process_ids) == 2)
        for process_id in workers.process_ids:
            os.kill(process_id, signal.SIGKILL)
        await until(lambda: len(workers.process_ids) < 2 or hanging.done())
    results = await asyncio.gather(*others, return_exceptions=True)
    # A piece that was in a worker's hands twice has had its second chance; all others have their tokens.
    lost = [result for result in results if isinstance(result, Internal)]
    assert len(lost) <= 2
    assert [result for result in results if not isinstance(result, Internal)] == [[0]] * (200 - len(lost))
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


def caller(account: str) -> Identity:
    return Identity(account, frozenset((Role.CLIENT,)))


async def encode_for(account: str, workers: TextWorkers, text: str, given: TextFiles) -> list[int]:
    bind_identity(caller(account))
    return await encode(workers, text, given)


@pytest.mark.parametrize("text", ["ok", "ok " * LONG_BYTES], ids=["short", "long"])
async def test_a_tenant_waits_for_no_queue_of_another_tenant_s_slow_texts(make_workers, text):
    workers = make_workers(2, time_limit_s=WAIT_S)
    slow = files(tokenizer=slow_tokenizer())
    await asyncio.gather(*(encode_for("b", workers, "ok", slow) for _ in range(10)))
    await until(lambda: len(workers.process_ids) == 2)
    # About a second each, short and long ones.
    texts = [("x" * 18 + " ") * 500, ("x" * 18 + " ") * 900] * 10
    hostile = [asyncio.create_task(encode_for("a", workers, each, slow)) for each in texts]
    await until(lambda: 0 < workers.num_queued < len(texts))
    await asyncio.create_task(encode_for("b", workers, text, slow))
    assert sum(task.done() for task in hostile) <= 1
    for task in hostile:
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_a_slow_task_counts_as_one_where_no_cpu_time_is_reported(
    make_workers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(WorkerLink, "cpu_s", lambda link: math.inf)
    ended: list[float] = []
    end = WorkQueue.end

    def noting_end(queue: WorkQueue, work: Work, now: float) -> None:
        ended.append(work.cpu_s)
        end(queue, work, now)

    monkeypatch.setattr(WorkQueue, "end", noting_end)
    workers = make_workers(1, time_limit_s=0.3)
    slow = files(tokenizer=slow_tokenizer())
    await workers.load(slow)
    await refusal(workers, SLOW_TEXT, slow)
    assert ended[-1] == math.inf


async def test_the_time_in_the_queue_is_noted_for_those_who_ask(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S)
    began_at = time.monotonic()
    with noting_wait() as first:
        # They wait for the worker's start.
        await asyncio.gather(encode(workers, "the"), encode(workers, "cat"))
    took_s = time.monotonic() - began_at
    with noting_wait() as second:
        await encode(workers, "the cat")
    assert 0 <= second.seconds < first.seconds <= 2 * took_s


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S, max_queued=3)
    tasks = [asyncio.create_task(encode(workers, "the cat")) for _ in range(4)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ResourceExhausted)]
    assert [(error.reason, error.retry_after_ms) for error in refused] == [("TEXT_QUEUE_FULL", 1000)]


async def test_work_that_no_worker_begins_in_time_is_refused(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S, max_wait_s=SHORT_S)
    slow = files(tokenizer=slow_tokenizer())
    await workers.load(slow)
    hanging = asyncio.create_task(encode(workers, SLOW_TEXT, slow))
    await asyncio.sleep(0)
    error = await refusal(workers, "ok", slow)
    assert (type(error), error.reason) == (ResourceExhausted, "TEXT_QUEUE_FULL")
    assert workers.num_queued == 0
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_a_client_that_leaves_takes_its_waiting_work_with_it(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S)
    slow = files(tokenizer=slow_tokenizer())
    await workers.load(slow)
    tasks = [asyncio.create_task(encode(workers, SLOW_TEXT, slow)) for _ in range(3)]
    await until(lambda: workers.num_queued == 2)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert workers.num_queued == 0
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)


async def test_a_worker_left_with_cancelled_work_is_free_after_its_time_limit(make_workers):
    workers = make_workers(1, time_limit_s=SHORT_S)
    slow = files(tokenizer=slow_tokenizer())
    await workers.load(slow)
    hanging = asyncio.create_task(encode(workers, SLOW_TEXT, slow))
    await asyncio.sleep(0)
    hanging.cancel()
    assert await encode(workers, "ok", slow) == [1]


@pytest.mark.parametrize("command", [("/no/such/program",), (sys.executable, "-c", "pass")])
async def test_clients_get_an_error_once_it_is_clear_that_workers_cannot_start(make_workers, command):
    workers = make_workers(1, time_limit_s=WAIT_S, command=command, max_wait_s=WAIT_S)
    first = asyncio.create_task(encode(workers, "the cat"))
    async with asyncio.timeout(WAIT_S):
        while True:
            probe = asyncio.create_task(encode(workers, "the cat"))
            await asyncio.sleep(0)
            if probe.done():
                break
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
    with pytest.raises(Unavailable, match="cannot be started"):
        await probe
    await workers.close()
    # A program that can be started, and ends over its work, is distinguished from one that cannot.
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], Unavailable | Internal)


async def test_files_that_cannot_be_read_are_refused(make_workers):
    workers = make_workers(2, time_limit_s=WAIT_S)
    # What reads them says whose they are.
    with pytest.raises(InvalidArgument, match=r"^Cannot instantiate Tokenizer from buffer: Model missing"):
        await workers.load(TextFiles(b"{}"))
    assert await encode(workers, "the") == byte_level_tokenizer().encode("the").ids


async def test_half_a_character_is_refused(make_workers):
    workers = make_workers(1, time_limit_s=WAIT_S)
    with pytest.raises(InvalidArgument, match="half a character"):
        await encode(workers, "a\ud800")
    with pytest.raises(InvalidArgument, match="half a character"):
        await workers.render(files(), chat("{{ messages[0].content + '\\ud800' }}"))


async def test_closing_ends_idle_and_busy_workers(make_workers):
    workers = make_workers(2, time_limit_s=WAIT_S)
    slow = files(tokenizer=slow_tokenizer())
    await asyncio.gather(*(encode(workers, "ok", slow) for _ in range(10)))
    await until(lambda: len(workers.process_ids) == 2)
    pidfds = [os.pidfd_open(process_id) for process_id in workers.process_ids]
    hanging = asyncio.create_task(refusal(workers, SLOW_TEXT, slow))
    await until(lambda: workers.num_queued == 0)
    await workers.close()
    assert isinstance(await hanging, Unavailable)
    for pidfd in pidfds:
        assert ended(pidfd)


PARENT = """
import asyncio
from frontend_svc.text.workers.work_queue import LONG_BYTES
from frontend_svc.text.workers.workers import TextWorkers
from tests.frontend_svc.text.workers.test_workers import SLOW_TEXT, encode, files, slow_tokenizer, until

async def main():
    workers = TextWorkers(2, time_limit_s=1.0)
    slow = files(tokenizer=slow_tokenizer())
    await asyncio.gather(*(encode(workers, "ok", slow) for _ in range(10)))
    await until(lambda: len(workers.process_ids) == 2)
    hanging = asyncio.create_task(encode(workers, SLOW_TEXT, slow))
    await until(lambda: workers.num_queued == 0)
    print(*workers.process_ids, flush=True)
    await hanging

asyncio.run(main())
"""


def test_the_death_of_a_frontend_ends_its_workers_busy_or_not():
    with running(
        *(sys.executable, "-c", PARENT), env=source_environment(), stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pidfds = [os.pidfd_open(int(process_id)) for process_id in parent.stdout.readline().split()]
        parent.kill()
    assert len(pidfds) == 2
    for pidfd in pidfds:
        assert ended(pidfd)


def ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    has_ended = bool(poll.poll(WAIT_S * 1000))
    os.close(pidfd)
    return has_ended


async def test_a_worker_comes_after_streams_also_where_sessions_share_the_cores(make_workers):
    workers = make_workers(1)
    await encode(workers, "ok", files(tokenizer=slow_tokenizer()))
    (process_id,) = workers.process_ids
    assert os.getpriority(os.PRIO_PROCESS, process_id) == os.getpriority(os.PRIO_PROCESS, 0) + 5
    session = Path(f"/proc/{process_id}/autogroup")
    async with asyncio.timeout(WAIT_S):
        # Where there are such groups they may not be changed at once, and there is no event when they were.
        while session.exists() and session.read_text().split()[-1] != "5":  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_worker_that_is_given_no_core_has_its_time_again_but_not_for_ever(make_workers):
    workers, limit_s = make_workers(1, time_limit_s=0.3), 0.3
    slow = files(tokenizer=slow_tokenizer())
    assert await encode(workers, "ok", slow) == [1]
    (process_id,) = workers.process_ids
    os.kill(process_id, signal.SIGSTOP)
    waiting = asyncio.create_task(encode(workers, "ok", slow))
    await asyncio.wait({waiting}, timeout=1.5 * limit_s)
    os.kill(process_id, signal.SIGCONT)
    assert await waiting == [1]
    assert workers.process_ids == [process_id]
    os.kill(process_id, signal.SIGSTOP)
    error = await refusal(workers, "ok", slow)
    assert (type(error), error.reason) == (InvalidArgument, "TEXT_TIME_LIMIT")
    assert await encode(workers, "ok", slow) == [1]
    assert process_id not in workers.process_ids


# Frames: whole whatever the pieces they come in, and refused when they are none.


def read_all(reader: FrameReader) -> list[Frame]:
    frames = []
    while (frame := reader.take()) is not None:
        frames.append(frame)
    return frames


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_the_same_however_they_are_cut(seed):
    rng = random.Random(seed)
    sent = [Frame({"verb": "x", "number": index}, rng.randbytes(rng.randrange(3000))) for index in range(40)]
    stream = b"".join(pack_head(frame.header, len(frame.body)) + frame.body for frame in sent)
    reader, received = FrameReader(), []
    while stream:
        num_bytes = rng.choice((1, 3, 8, 100, 5000))
        reader.feed(stream[:num_bytes])
        stream = stream[num_bytes:]
        received += read_all(reader)
    assert received == sent


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<II", MAX_HEADER_BYTES + 1, 0),
        struct.pack("<II", 2, MAX_BODY_BYTES + 1),
        struct.pack("<II", 2, 0) + b"[]",
        struct.pack("<II", 1, 0) + b"{",
        struct.pack("<II", 2, 0) + b"\xff\xff",
    ],
    ids=["long header", "long body", "no object", "no JSON", "no text"],
)
def test_what_is_no_frame_is_refused(content):
    reader = FrameReader()
    reader.feed(content)
    with pytest.raises(FrameError):
        reader.take()


def test_nothing_is_sent_that_a_reader_would_refuse():
    with pytest.raises(FrameError):
        pack_head({}, MAX_BODY_BYTES + 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda frame: frame.text("number"),
        lambda frame: frame.number("text"),
        lambda frame: frame.number("flag"),
        lambda frame: frame.number("missing"),
        lambda frame: frame.split(4),
        lambda frame: frame.split(-1),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(read):
    with pytest.raises(FrameError):
        read(Frame({"number": 1, "text": "x", "flag": True}, b"abc"))


def test_numbers_are_little_endian_and_four_bytes():
    assert id_column([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert unpack_numbers(b"\x01\0\0\0\xff\xff\xff\xff") == [1, 2**32 - 1]
    with pytest.raises(FrameError):
        unpack_numbers(b"\0\0\0")


# A bound on memory holds for its block alone.

# In a process of its own: the limit is the whole process's.
PROGRAM = """
from frontend_svc.text.workers.process import extra_memory
try:
    with extra_memory(64 * 2**20):
        bytes(32 * 2**20)
        bytes(512 * 2**20)
except MemoryError:
    print("bounded")
print(len(bytes(512 * 2**20)))
"""


def test_what_a_block_may_allocate_is_bounded_and_what_follows_is_not():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["bounded", str(512 * 2**20)]
