"""Serial rules, first proof: elements of both sides as normal forms; their laws are in `lawbook`."""
