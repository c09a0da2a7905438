"""Results of pooling models as plain data. Needs no array library."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import grpc

from triptych.api.v1 import embedding_pb2
from triptych.common.v1 import tensor_pb2
from triptych_client.errors import TriptychError
from triptych_client.events import Usage, read_usage

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PooledTensor:
    """The result of one input: a vector, or with `per_token` one vector per token."""

    vectors: tuple[Vector, ...]

    @property
    def vector(self) -> Vector:
        """The only vector, or the first token's."""
        return self.vectors[0]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of the inputs, in their order."""

    embeddings: tuple[PooledTensor, ...]
    usage: Usage
    request_id: str


@dataclass(frozen=True, slots=True)
class Classes:
    """Class probabilities of each input, in order; `labels` is empty if the model has no label names."""

    results: tuple[PooledTensor, ...]
    labels: tuple[str, ...]
    usage: Usage
    request_id: str


@dataclass(frozen=True, slots=True)
class Scores:
    """The score of each document, in the order of the documents."""

    scores: tuple[float, ...]
    usage: Usage
    request_id: str


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, by its index in the request; a higher score is better."""

    document_index: int
    score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best documents, best first."""

    documents: tuple[RankedDocument, ...]
    usage: Usage
    request_id: str


def to_embeddings(response: embedding_pb2.EmbedResponse) -> Embeddings:
    tensors = tuple(read_tensor(tensor) for tensor in response.embeddings)
    return Embeddings(tensors, read_usage(response.usage), response.request_id)


def to_classes(response: embedding_pb2.ClassifyResponse) -> Classes:
    tensors = tuple(read_tensor(tensor) for tensor in response.results)
    return Classes(tensors, tuple(response.labels), read_usage(response.usage), response.request_id)


def to_scores(response: embedding_pb2.ScoreResponse) -> Scores:
    return Scores(tuple(response.scores), read_usage(response.usage), response.request_id)


def to_ranking(response: embedding_pb2.RerankResponse) -> Ranking:
    documents = tuple(RankedDocument(result.document_index, result.score) for result in response.results)
    return Ranking(documents, read_usage(response.usage), response.request_id)


def read_tensor(tensor: tensor_pb2.Tensor) -> PooledTensor:
    """Read a vector or a matrix. Raises TriptychError for any other tensor."""
    numbers = _numbers(tensor)
    width = tensor.shape[-1] if tensor.shape else 0
    count = tensor.shape[0] if len(tensor.shape) == 2 else 1
    if len(tensor.shape) not in (1, 2) or not width or len(numbers) != width * count:
        raise _unreadable(f"has the shape {list(tensor.shape)} and {len(numbers)} numbers")
    return PooledTensor(tuple(numbers[start : start + width] for start in range(0, len(numbers), width)))


def _numbers(tensor: tensor_pb2.Tensor) -> Vector:
    content = tensor.inline
    if tensor.WhichOneof("payload") != "inline":
        raise _unreadable(f"is kept elsewhere: {tensor.WhichOneof('payload')}")
    if tensor.dtype == tensor_pb2.D_TYPE_BF16:
        # A bfloat16 is the upper half of a float32.
        wide = bytearray(2 * len(content))
        wide[2::4], wide[3::4] = content[::2], content[1::2]
        content = bytes(wide)
    elif tensor.dtype == tensor_pb2.D_TYPE_FP16:
        return struct.unpack(f"<{len(content) // 2}e", content)
    elif tensor.dtype != tensor_pb2.D_TYPE_FP32:
        raise _unreadable(f"has numbers of the type {tensor_pb2.DType.Name(tensor.dtype)}")
    return struct.unpack(f"<{len(content) // 4}f", content)


def _unreadable(what: str) -> TriptychError:
    return TriptychError(grpc.StatusCode.INTERNAL, f"a tensor of the answer {what}")
