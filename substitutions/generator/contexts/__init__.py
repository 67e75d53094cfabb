"""The contexts that are enumerated, each an independent unit of work.

    serial         of serial rules, by topic
    placement      of placement rules

Read by `sources`.
"""
