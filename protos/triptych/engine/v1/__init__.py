"""Version 1 of the engine area: messages and stubs generated from the .proto files beside."""
