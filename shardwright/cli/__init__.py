"""The command line: one file per group of commands. torch is imported by the commands that need it, when they run.

    main           the group of commands, and the handling of errors
    status         exit statuses
    options        options that several commands share
    terminal       results on stdout, progress on stderr
    models         the source of a command's model; `huggingface`: a transformers config
    planfiles      the common part of commands that take a plan file
    plan           `plan`; `configured`: of a transformers config, whose capture is kept
    inspect        `explain`, `compare`, `view`; `asking`: questions of `explain` that need another search
    timeline       `timeline`
    verify         `verify`; `dryrun`: predictions beside a dry run; `numeric`: a step beside the model's
    run            `run`; `torchrun`: its options; `train`: the program of each rank; `elastic`: torchrun with our ends
    launch         `launch`; `launchfiles`: what is said under each launcher; `slurm`, `kubernetes`: how
    profile        `profile`; `measured`: operators and collectives of real steps
    rules          `rules`; `coverage`: rules that the search used
    calibrate      `calibrate`
    cluster        `cluster import`
    collectives    `collectives`
    doctor         `doctor`; `examining`: its checks

Imports everything; imported by `shardwright.__main__`.
"""
