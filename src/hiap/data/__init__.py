"""Images in batches: folders, data sets held in memory, streams, and loaders of one's own."""
