"""The conformance kit: checks engines and frontends against `protos/engine-session.md`, over the wire alone.

A case is a function with the rule that it checks; the rules of a section are a file in `engine/` and one in
`frontend/`. Must not know how a peer is built: stubs, gRPC and `triptych_kit` are all that it imports.
"""
