"""The report of a run: one page that needs nothing else, and the same facts as Markdown, JSON or a picture."""
