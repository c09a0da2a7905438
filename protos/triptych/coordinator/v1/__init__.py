"""Version 1 of the coordinator area: messages and stubs generated from the .proto files beside."""
