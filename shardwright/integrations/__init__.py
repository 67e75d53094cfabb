"""Adapters that let other people's training loops run a compiled model. Each file needs its own library.

    accelerate     `Accelerator`: to it, all ranks together are one process
    transformers   `Trainer`, on that accelerator
    lightning      `ShardwrightStrategy`, which Lightning's `Trainer` takes
    states         one state of a run in a folder, for accelerate and Lightning

In all of them a batch is the global one, and every rank is given it. What they do not carry over is refused by name.
"""
