"""Generates candidate rules: enumerates terms, groups them by fingerprint, prunes, and reduces what was certified."""
