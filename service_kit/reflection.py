"""Server reflection under both of its names, v1 and v1alpha, which have the same messages."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1ALPHA, _V1 = "grpc.reflection.v1alpha", "grpc.reflection.v1"
V1ALPHA_NAME: str = reflection.SERVICE_NAME
V1_NAME = V1ALPHA_NAME.replace(_V1ALPHA, _V1)


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Let clients list `service_names` and fetch their descriptors."""
    _describe_v1(descriptor_pool.Default())
    servicer = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]  # missing in the stubs
        [*service_names, V1ALPHA_NAME, V1_NAME]
    )
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (V1ALPHA_NAME, V1_NAME):
        handlers = {"ServerReflectionInfo": method}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _describe_v1(pool: descriptor_pool.DescriptorPool) -> None:
    # grpcio-reflection ships v1alpha alone; a client that asks v1 to describe itself wants a descriptor too.
    path = "grpc/reflection/v1/reflection.proto"
    proto = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(proto)
    text = text_format.MessageToString(proto).replace(_V1ALPHA, _V1).replace(proto.name, path)
    try:
        pool.FindFileByName(path)
    except KeyError:
        pool.AddSerializedFile(
            text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString()
        )
