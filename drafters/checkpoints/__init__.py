"""Published drafter checkpoints, read into our networks and written from them. A file per kind of layout."""
