"""Version 1 of the common area: messages and stubs generated from the .proto files beside."""
