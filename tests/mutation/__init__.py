"""Is a small wrong change of the code noticed by the tests? Mutants are made, run and counted."""
