"""Reports for people, and the data that the page draws.

Facts, each worked out once:

    facts          what each axis does, how weights are stored, what moves, what it costs
    parameters     each parameter: where it is stored, in which layout
    tree, modules  the tree of the model's modules with what the plan says of them
    finding        names in the model, though equal blocks are folded
    forms          closed forms of the cost
    course, peak   what each stage does when; what is in memory at the peak
    lifetimes, running, rounding, exposed, occurrences, named
                   gathered weights; how a step is run; what is rounded; what compute waits for; where a rule occurs;
                   names of tasks and values
    shown          facts that are kept in the cache folder

Reports, each a `Report` with `paragraphs()` for people and `data()` for programs:

    report         what every report is; the command line shows any by `terminal.show`
    plan           `explain`; `asking`, `byhand`, `formula`, `again`, `stages`, `trace`, `throughput`: its parts
    comparison     `compare`; `differences`: two trees side by side
    timeline       `timeline`
    profile        measured steps beside the prediction
    rules          `rules`; `coverage`: which rules the search used
    calibration    `calibrate`
    answer         an answer that is kept, for the page

Words:

    wording, units, setting
                   what people call the facts; numbers as they read them; text and tables in columns

A new thing to tell is a fact first, computed here from the plan, its timeline or the search; then a paragraph and a key
of the data in the report where it belongs, or a report of its own; the page draws from the same data. Nothing here
decides anything: the search does not import it.

Imports every folder but `lowering`; imported by `shardwright.cli`, `shardwright.view` and the rule drivers.
"""
