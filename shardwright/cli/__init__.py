"""The command line: one file per group of commands. torch is imported by the commands that need it, when they run."""
