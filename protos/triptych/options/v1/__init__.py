"""Version 1 of the options area: messages and stubs generated from the .proto files beside."""
