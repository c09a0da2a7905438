"""Version 1 of the api area: messages and stubs generated from the .proto files beside."""
