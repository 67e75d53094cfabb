"""The page of a plan: one HTML file that needs no network."""
