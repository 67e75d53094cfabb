"""The table of models, of packages that few use."""

from __future__ import annotations

from bench.model_rows import Row

PACKAGES: list[Row] = []
