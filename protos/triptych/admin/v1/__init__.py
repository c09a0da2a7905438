"""Version 1 of the admin area: messages and stubs generated from the .proto files beside."""
