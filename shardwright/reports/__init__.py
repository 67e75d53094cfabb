"""What people read, and what the page draws.

    facts.py, tree.py, modules.py  what a plan is and costs, each fact worked out once: per axis, move, operator, module
    wording.py, units.py           what people call these facts, and numbers as they read them
    plan.py, comparison.py, timeline.py, coverage.py, calibration.py, rules.py
                                   the reports: each a `Report` with `paragraphs()` for people and `data()` for programs
    report.py                      `Report` and `Paragraph`; the command line shows any report by `terminal.show`

A new thing to tell (memory over time, why a layout was not taken) is a fact first, computed here from the plan, its
timeline or the search; then a paragraph and a key of the data in the report where it belongs, or a report of its own;
the page draws from the same data. Nothing here decides anything: the search does not import it.

Imports every folder but `lowering`; imported by `shardwright.cli`, `shardwright.view` and the rule drivers.
"""
