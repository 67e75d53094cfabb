"""Communication: what NCCL and gloo run, over which links, and how long it takes; moves between layouts and stages."""
