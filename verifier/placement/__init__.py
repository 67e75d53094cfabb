"""Placement rules: by types and the erased sides (`typing`), and by what terms denote (`denotation`)."""
