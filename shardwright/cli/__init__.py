"""The command line: one file per group of commands. torch is imported by the commands that need it, when they run.

    main           the group of commands, and what becomes of errors
    status         exit statuses
    options        options that several commands share
    terminal       results on stdout, progress on stderr
    models         where a command's model comes from; `huggingface`: from a transformers config
    planfiles      what commands that take a plan file share
    plan           `plan`
    inspect        `explain`, `compare`, `view`; `asking`: questions of `explain` that need another search
    timeline       `timeline`
    verify         `verify`; `dryrun`: predictions beside a dry run; `numeric`: a step beside the model's
    run            `run`; `train`: what each of its ranks does; `elastic`: torchrun without a traceback of its own
    profile        `profile`; `measured`: operators and collectives of real steps
    rules          `rules`; `coverage`: which rules the search used
    calibrate      `calibrate`
    cluster        `cluster import`
    doctor         `doctor`; `examining`: its checks

Imports everything; imported by `shardwright.__main__`.
"""
