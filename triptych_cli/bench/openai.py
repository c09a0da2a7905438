"""A load over OpenAI's completions, of ours or of another server: prompts are ids, answers are streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from triptych_cli.bench.config import BenchServeConfig
from triptych_cli.bench.metrics import OK
from triptych_cli.bench.transport import AnswerFailed, BenchedModel, Part
from triptych_cli.verbs.probe import untrusted
from triptych_kit.channel import ChannelCredentials
from triptych_kit.errors import NotFound, Unauthenticated, Unavailable

_COMPLETE = frozenset({"stop", "length"})
_READ_BYTES = 64 * 1024
_CALL_LIMIT_S = 30.0
_REFUSED_KEY = frozenset({"HTTP_401", "HTTP_403"})
_DONE = b"[DONE]"
# The first ids of a vocabulary are often special ones, which end a prompt or change its meaning.
_NUM_SPECIAL = 8
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "logprobs")


@dataclass(slots=True)
class _Open:
    """A connection and the state of its requests."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection


class OpenAITransport:
    """Sends requests to `base`, each over a connection of its own that later ones use again."""

    def __init__(self, base: str, credentials: ChannelCredentials, config: BenchServeConfig) -> None:
        parts = urlsplit(base)
        self.base = base
        self._host, self._netloc = parts.hostname or "", parts.netloc
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = credentials.context() if parts.scheme == "https" else None
        self._key = credentials.read_key()
        self._seed, self._vocab_size = config.seed, config.vocab_size
        self._body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        self._body |= {name: getattr(config, name) for name in _SAMPLING if getattr(config, name) is not None}
        if config.ignore_eos:
            self._body["ignore_eos"] = True
        if config.dataset == "multi-turn":
            # The next prompt has the ids of the answer.
            self._body["return_token_ids"] = True
        self._idle: list[_Open] = []

    async def find_model(self, name: str | None) -> BenchedModel:
        """The model `name`, or the first one that is listed. Raises ServiceError."""
        content = b""
        try:
            async with contextlib.aclosing(self._exchange("GET", "/v1/models", b"", _CALL_LIMIT_S)) as parts:
                async for part in parts:
                    content += part
            listed = {str(one["id"]): one for one in json.loads(content)["data"]}
        except AnswerFailed as error:
            if error.code in _REFUSED_KEY:
                whose = "is not accepted" if self._key else "is not set"
                raise Unauthenticated(
                    f"{self.base}: {error.message}; the key, TRIPTYCH_API_KEY or else OPENAI_API_KEY, {whose}"
                ) from error
            raise _no_models(f"{self.base} answers {error.code}: {error.message}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise _no_models(f"{self.base} does not list models at /v1/models") from error
        served = listed.get(name) if name else next(iter(listed.values()), None)
        if served is None:
            known = ", ".join(listed)
            raise NotFound(
                f"model {name or ''!r} is not served at {self.base}; served: {known}",
                resource_type="model",
                resource_name=name or "",
            )
        self._body["model"] = served["id"]
        length = served.get("max_model_len")
        return BenchedModel(
            served["id"], self._vocab_size, range(_NUM_SPECIAL), length if isinstance(length, int) else None
        )

    def build(self, token_ids: Sequence[int], num_output_tokens: int, index: int) -> bytes:
        body = self._body | {
            "prompt": list(token_ids), "max_tokens": num_output_tokens, "seed": self._seed + index
        }  # fmt: skip
        return json.dumps(body).encode()

    async def answer(self, request: bytes, index: int, timeout_s: float) -> AsyncGenerator[Part, None]:
        num_tokens, reason, usage = 0, "", None
        events = _events(self._exchange("POST", "/v1/completions", request, timeout_s))
        async with contextlib.aclosing(events):
            async for event in events:
                if "error" in event:
                    raise AnswerFailed("ERROR", _message_in(event))
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    ids = choice.get("token_ids") or ()
                    count = len(ids) or bool(choice.get("text"))
                    num_tokens += count
                    reason = choice.get("finish_reason") or reason
                    yield Part(count, ids)
        if not reason:
            return
        details = (usage or {}).get("prompt_tokens_details") or {}
        yield Part(
            code=OK if reason in _COMPLETE else f"FINISH_REASON_{reason.upper()}",
            num_cached_tokens=details.get("cached_tokens") or 0,
            num_uncounted=max(0, (usage or {}).get("completion_tokens", 0) - num_tokens),
        )

    async def close(self) -> None:
        for one in self._idle:
            one.writer.close()
        self._idle.clear()

    async def _exchange(
        self, method: str, path: str, body: bytes, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """The body of an answer as it comes. Raises AnswerFailed for another status than 200."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        opened: _Open | None = None
        status, refusal = 200, b""
        try:
            async with asyncio.timeout_at(deadline):
                opened = await self._connection()
                state = opened.state
                head = h11.Request(method=method, target=self._path + path, headers=self._headers(body))
                for written in (head, *([h11.Data(body)] if body else []), h11.EndOfMessage()):
                    opened.writer.write(state.send(written) or b"")
            while True:
                event = state.next_event()
                if event is h11.NEED_DATA:
                    async with asyncio.timeout_at(deadline):
                        state.receive_data(await opened.reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status == 200:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    refusal += event.data
                elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                    break
            if state.our_state is h11.DONE and state.their_state is h11.DONE:
                state.start_next_cycle()
                self._idle.append(opened)
                opened = None
        except TimeoutError as error:
            raise AnswerFailed("DEADLINE_EXCEEDED", f"no whole answer within {timeout_s:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise AnswerFailed("UNAVAILABLE", untrusted(self._netloc, error)) from error
        except (OSError, h11.ProtocolError) as error:
            raise AnswerFailed("UNAVAILABLE", str(error) or type(error).__name__) from error
        finally:
            if opened is not None:
                opened.writer.close()
        if status != 200:
            raise AnswerFailed(f"HTTP_{status}", _refusal(refusal))

    async def _connection(self) -> _Open:
        while self._idle:
            one = self._idle.pop()
            if not one.reader.at_eof() and not one.writer.is_closing():
                return one
            one.writer.close()
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return _Open(reader, writer, h11.Connection(h11.CLIENT))

    def _headers(self, body: bytes) -> list[tuple[str, str]]:
        headers = [("host", self._netloc)]
        if body:
            headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
        return headers + ([("authorization", f"Bearer {self._key}")] if self._key else [])


async def _events(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[Mapping[str, Any], None]:
    """The JSON objects of server-sent events. Raises AnswerFailed for what is none."""
    unread = b""
    async with contextlib.aclosing(parts):
        async for part in parts:
            *lines, unread = (unread + part).split(b"\n")
            for line in lines:
                content = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or content == _DONE:
                    continue
                try:
                    event = json.loads(content)
                except ValueError as error:
                    raise AnswerFailed("INTERNAL", f"an event is no JSON: {content[:80]!r}") from error
                if isinstance(event, dict):
                    yield event


def _no_models(message: str) -> Unavailable:
    return Unavailable(message, reason="NO_MODELS")


def _refusal(content: bytes) -> str:
    try:
        return _message_in(json.loads(content))
    except ValueError:
        return content[:200].decode(errors="replace")


def _message_in(answer: Any) -> str:
    """The message of an error, in the form of OpenAI or of others."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:500]


@contextlib.asynccontextmanager
async def openai_transport(
    config: BenchServeConfig, credentials: ChannelCredentials
) -> AsyncIterator[tuple[OpenAITransport, BenchedModel]]:
    """A transport to the server at `--base-url`, and its model. Raises ServiceError."""
    transport = OpenAITransport(config.base_url, credentials, config)
    try:
        yield transport, await transport.find_model(config.model)
    finally:
        await transport.close()
