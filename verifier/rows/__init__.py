"""Row rules and rules of the parallel operators: index semantics with symbolic sizes and degrees, decided by Z3."""
