"""Substitutions: rewrite rules as data.

Here belong the form of a rule, the rules themselves, matching and applying them to a graph, and whatever
derives or generates rules. No rule is trusted for being here: `verifier` certifies each before a search loads it.

Imports `pcg`; imported by `verifier`, `search` and `shardwright`.
"""
