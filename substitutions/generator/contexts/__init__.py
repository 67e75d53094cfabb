"""The contexts that are enumerated, each an independent unit of work."""
