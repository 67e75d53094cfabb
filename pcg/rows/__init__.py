"""The rows of the op table, one file per topic. Each file exports `ROWS`."""
