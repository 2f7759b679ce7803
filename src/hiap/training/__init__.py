"""One run: its configuration, its phases, the loop that trains them, and the folder it is kept in."""
