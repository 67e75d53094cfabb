"""Reports for people, and the data that the page draws.

Facts, each computed once:

    facts          the use of each axis, the storage of weights, moves, costs
    parameters     the place and layout of each parameter
    tree, modules  the tree of the model's modules with the facts of the plan
    finding        names in the model, though equal blocks are folded
    forms          closed forms of the cost
    course, peak   the actions of each stage over time; the memory at the peak
    lifetimes, running, rounding, encoded, exposed, occurrences, named
                   gathered weights; the way a step is run; rounding; what is sent encoded, and its bounds; waits of
                   compute; occurrences of a rule; names of tasks and values
    shown          reports in the cache folder

Reports, each a `Report` with `paragraphs()` for people and `data()` for programs:

    report         the base of every report; the command line shows any by `terminal.show`
    plan           `explain`; `asking`, `byhand`, `formula`, `again`, `away`, `stages`, `trace`, `throughput`,
                   `foreign`, `scheduled`: its parts
    comparison     `compare`; `differences`: two trees side by side
    timeline       `timeline`
    profile        measured steps beside the prediction
    rules          `rules`; `coverage`: rules that the search used
    calibration    `calibrate`
    collectives    `collectives`: networks, schedules step by step, verdicts
    answer         an answer in a file, for the page

Words:

    wording, units, setting
                   facts in words; numbers as people read them; text and tables in columns

A new item begins as a fact, computed here from the plan, its timeline or the search. Then it becomes a paragraph and a
key of the data in the report where it belongs, or a report of its own; the page draws from the same data. Nothing here
decides anything: the search does not import it.

Imports every folder but `lowering`; imported by `shardwright.cli`, `shardwright.view` and the rule drivers.
"""
