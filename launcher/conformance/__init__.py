"""The conformance kit: checks an engine of anybody's against `protos/engine-session.md`, over the wire alone.

A case is a function with the rule that it checks; the rules of a section are a file in `engine/`.
Must not know a service, nor how the peer is built: stubs, gRPC and `service_kit` are all that it imports.
"""
