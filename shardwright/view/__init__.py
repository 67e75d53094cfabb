"""Pages: one HTML file each, which needs no network. `page` draws a plan, `schedule` a schedule of a collective."""
