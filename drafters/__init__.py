"""The drafting strategies, one file each: a family's network and its proposal loop side by side."""
